"""The way in that runs a Megatron script unchanged: what it runs, and what it refuses."""

import sys

import pytest

from megatron_epp import run
from megatron_epp.mcore import entry


@pytest.fixture
def prepared(monkeypatch):
    """Calls of what prepares Megatron, which here changes nothing."""
    calls = []
    monkeypatch.setattr(entry, "prepare", lambda: calls.append([*sys.argv]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return calls


def test_the_script_runs_as_main_with_its_own_flags_and_folder(prepared, monkeypatch, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("text = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, *sys.argv[1:], beside.text)\n")
    monkeypatch.setattr(sys, "argv", ["run", str(script), "--epp", "--lr", "1"])
    run.main()
    assert capsys.readouterr().out == "__main__ --epp --lr 1 found\n"
    assert prepared == [[str(script), "--epp", "--lr", "1"]]


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "say which script to run: torchrun"), (["nowhere.py"], "there is no script .*nowhere.py")]
)
def test_without_a_script_one_line_says_what_is_missing(prepared, monkeypatch, arguments, words):
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit, match=f"megatron_epp, rank 0: {words}"):
        run.main()
    assert prepared == []
