"""Numbers that are none, text that moves the terminal's cursor, closed pipes and unforeseen errors."""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from megatron_epp.plan import EppError
from megatron_epp.plan.reading import MOST_SIZE, check_nested, naming_file
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli import plan as cli_plan
from megatron_epp.tools.cli import planning_flags
from tests.support.plan.bad_files import SOUND, exit_code, signed, spoiled, written

BATCH = ["--lengths", "300,200", "--stages", "2"]


def numeric_flags():
    (commands,) = (action for action in cli._parser()._actions if hasattr(action, "choices") and action.choices)
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if callable(action.type) and action.option_strings and action.metavar in ("N", "S", "GB", "X", "SHARE", "MS", "K"):
                yield name, action


def test_no_flag_of_any_command_takes_what_is_no_finite_number_from_0():
    flags = list(numeric_flags())
    assert len(flags) > 60
    for command, action in flags:
        for value in ("nan", "inf", "-inf", "-1", "1e400", "1" + "0" * 400):
            with pytest.raises((ValueError, cli.argparse.ArgumentTypeError)):
                print(command, action.option_strings, action.type(value))


def test_drawn_batches_are_as_many_as_there_are(capsys):
    batches = ["--lengths", "5,4,3", "--batch-size", "2", "--batches", str(MOST_SIZE)]
    assert exit_code(["compare", *batches, "--planner", "1f1b", "--stages", "2"]) == 0
    assert capsys.readouterr().out.count("1f1b") == 2


@pytest.mark.parametrize(
    ("command", "stdout", "stderr"),
    [
        (r"printf '\xff' | PYTHONIOENCODING=utf-8:strict EPP plan --lengths -; echo $?", "2\n", "--lengths -: 'utf-8' codec"),
        ("EPP check FAULTY | true; echo ${PIPESTATUS[0]}", "1\n", ""),
        ("(EPP check FAULTY >&-); echo $?", "1\n", ""),
        ("EPP check FAULTY > /dev/full; echo $?", "2\n", "megatron-epp: error: [Errno 28] No space left on device"),
        ("PYTHONUTF8=0 PYTHONIOENCODING=ascii EPP show UMLAUT --width 60 | grep -o 'er gr[^,]*,'", r"er gr\xf6\xdfe,", ""),
    ],
    ids=["no text on stdin", "closed pipe", "closed output", "full disk", "ascii"],
)
def test_what_is_wrong_with_a_stream_is_one_line_or_silence_and_keeps_the_exit_code(tmp_path, command, stdout, stderr):
    faulty, umlaut = spoiled("plan", "predicted", "makespan_us", to=1.0), signed(SOUND["plan"] | {"planner": "größe"})
    files = {name: written(tmp_path / f"{name}.json", text) for name, text in (("FAULTY", faulty), ("UMLAUT", umlaut))}
    for word, value in {"EPP": f"{sys.executable} -m megatron_epp.tools.cli.main", **files}.items():
        command = command.replace(word, value)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], env=buffered, capture_output=True, text=True, check=False)
    assert stdout in done.stdout
    assert stderr in done.stderr
    assert done.stderr.count("\n") == bool(stderr)


def test_text_of_a_plan_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path):
    path = written(tmp_path / "plan.json", signed(SOUND["plan"] | {"planner": "$\\frac{$\x1b"}))
    picture, text = tmp_path / "plan.svg", tmp_path / "plan.txt"
    assert exit_code(["show", path, "-o", str(picture)]) == exit_code(["show", path, "-o", str(text)]) == 0
    assert r"planner $\frac{$\x1b" in text.read_text()


def test_a_profiles_name_is_printed_as_escapes(tmp_path, capsys):
    path = written(tmp_path / "costs.json", spoiled("profile", "name", to="\x1b[2J"))
    assert exit_code(["plan", *BATCH, "--layout", "even", "--costs", path]) == 0
    assert r"costs \x1b[2J, " in capsys.readouterr().out


@pytest.fixture
def unforeseen(monkeypatch):
    def broken(name):
        with naming_file(name):
            raise LookupError("what\x1b\nwas that")

    monkeypatch.setattr(planning_flags, "load_costs", broken)


def test_an_unforeseen_error_is_one_line_with_the_file_at_hand(unforeseen, capsys):
    assert exit_code(["plan", *BATCH, "--costs", "given.json"]) == 70
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    for fact in (r"unforeseen LookupError: what\x1b was that", "given.json", "a fault of megatron-epp", "--debug"):
        assert fact in err


@pytest.mark.parametrize("argv", [["--debug", "plan"], ["plan", "--debug"]])
def test_a_traceback_is_there_where_it_is_asked_for(unforeseen, capsys, argv):
    assert exit_code([*argv, *BATCH, "--costs", "given.json"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "in broken\n" in err
    assert "unforeseen LookupError" in err.splitlines()[-1]
    assert exit_code([*argv, "--lengths", "nowhere"]) == 2, "a foreseen error"
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_interrupted_command_ends_with_130_and_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(cli_plan.planning_flags, "costs_of", Mock(side_effect=KeyboardInterrupt))
    assert exit_code(["plan", *BATCH, "--layout", "even"]) == 130  # no slow step, which would be told
    assert capsys.readouterr().err == "\nmegatron-epp: interrupted\n"


def test_what_is_nested_up_to_the_limit_is_taken():
    value = []
    for _ in range(100):
        value = [value]
    check_nested(value, "it")
    with pytest.raises(EppError, match="it has lists or objects nested deeper than 100"):
        check_nested([value], "it")
    with pytest.raises(EppError, match="it holds more than 9 values"):
        check_nested([[0] * 5, [0] * 5], "it", most_values=9)
