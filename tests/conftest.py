"""What all tests share: property tests have no deadline, for a busy machine must not fail them; and who runs what, and when."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

FOLDERS = ("slurm", "mcore", "cpu", "gpu", "pure")
"""In the order in which they run: what waits most first, many short tests last, so that all processes end together."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``--dist loadgroup`` a process takes whole files, whose tests share what they look at; of tests/pure any test."""
    for item in items:
        if item.path.parent.name != "pure":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: FOLDERS.index(item.path.parent.name))
