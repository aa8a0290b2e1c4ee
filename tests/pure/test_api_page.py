"""The page of the API is what signatures and docstrings say."""

from scripts import write_api


def test_the_page_is_current():
    assert write_api.TARGET.read_text() == write_api.document(), "run: python scripts/write_api.py"
