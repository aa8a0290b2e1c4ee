"""Bad flags, planners and unforeseen errors end in one line; no text of a file moves the terminal's cursor."""

import os
import subprocess
import sys

import pytest

from megatron_epp.cli import main as cli
from megatron_epp.cli import plan as cli_plan
from megatron_epp.cli import planning_flags as cli_inputs
from megatron_epp.plan import EppError, check
from megatron_epp.plan.reading import MOST_SIZE, check_nested, naming_file
from tests.support.plan.bad_files import PLAN, SOUND, error_line, exit_code, signed, spoiled, written

BATCH = ["--lengths", "300,200", "--stages", "2"]
FLAGS = {
    "memory": (["--memory-gb", "1e300"], "'1e300' is not a positive number up to 1,000,000,000"),
    "host memory": (["--offload", "--host-memory-gb", "1e308"], "is not a positive number"),
    "no memory": (["--memory-gb", "nan"], "'nan' is not a positive number"),
    "layers": (["--layers", "100000000000"], "is not a whole number from 1 to 10,000"),
    "layers to balance": (["--layers", "100000000000", "--layout", "balanced"], "from 1 to 10,000"),
    "stages": (["--stages", "1000000000"], "is not a whole number from 1 to 4,096"),
    "seed": (["--seed", "9" * 30], "is not a whole number from 0 to 4,294,967,295"),
    "recompute": (["--recompute", "9" * 5000], "is not auto or a number of layers, up to 10,000"),
    "power of two": (["--recompute", "²"], "is not auto or a number of layers"),
    "layers of a stage": (["--layout", "9" * 5000 + ",1"], "2 multiples of 0.5 (one for each of --stages)"),
    "tokens": (["--lengths", "2147483647", "--token-multiple", "2147483647", "--hidden", "2147483616"], "a plan can hold"),
    "surrogate": (["--lengths", "a\udcff"], "there is no such file"),
    "escape": (["--lengths", "\x1b[31m"], r"\x1b[31m"),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_a_bad_value_is_named_with_what_would_do(case, capsys):
    flags, words = FLAGS[case]
    message = error_line(capsys, ["plan", *BATCH, *flags])
    assert words in message
    assert message.isprintable()


def numeric_flags():
    """Every flag of every command that takes a number, with the words before it that the command needs."""
    (commands,) = (action for action in cli._parser()._actions if hasattr(action, "choices") and action.choices)
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if callable(action.type) and action.option_strings and action.metavar in ("N", "S", "GB", "X", "SHARE", "MS", "K"):
                yield name, action


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", "1" + "0" * 400])
def test_no_flag_of_any_command_takes_what_is_no_finite_number_from_0(value):
    flags = list(numeric_flags())
    assert len(flags) > 60
    for command, action in flags:
        with pytest.raises((ValueError, cli.argparse.ArgumentTypeError)):
            print(command, action.option_strings, action.type(value))


def test_drawn_batches_are_as_many_as_there_are(capsys):
    batches = ["--lengths", "5,4,3", "--batch-size", "2", "--batches", str(MOST_SIZE)]
    argv = ["compare", *batches, "--planner", "1f1b", "--stages", "2"]
    assert exit_code(argv) == 0
    assert capsys.readouterr().out.count("1f1b") == 2


def test_text_on_stdin_that_is_none_is_refused():
    command = [sys.executable, "-m", "megatron_epp.cli.main", "plan", "--lengths", "-"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, input=b"12 \xff", env=strict, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr.decode().startswith("megatron-epp: error: --lengths -: 'utf-8' codec can't decode")


PLANNERS = """
from megatron_epp.planner import PLANNERS, Decisions
def raises(problem, costs, options): raise RuntimeError("no luck\\nin line 2")
def divides(problem, costs, options): return 1 / 0
def exits(problem, costs, options): raise SystemExit(3)
def nothing(problem, costs, options): return None
def text(problem, costs, options): return "a plan"
def two(problem, costs): return None
def halves(problem, costs, options): return Decisions((), [], [])
value = 5
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "failed (PLACE:3): RuntimeError: no luck in line 2"),
        ("divides", "failed (PLACE:4): ZeroDivisionError: division by zero"),
        ("exits", "failed (PLACE:5): SystemExit: 3"),
        ("nothing", "returned None; a planner returns `Decisions`"),
        ("text", "returned 'a plan'; a planner returns `Decisions`"),
        ("two", "TypeError: two() takes 2 positional arguments but 3 were given"),
        ("value", "is 5, which is not a function"),
        ("absent", "has no attribute 'absent'; give module:function"),
    ],
)
def test_a_planner_of_a_users_own_that_fails_is_named_with_where(tmp_path, monkeypatch, capsys, name, words):
    path = written(tmp_path / "given_planners.py", PLANNERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "given_planners", raising=False)
    message = error_line(capsys, ["plan", *BATCH, "--planner", f"given_planners:{name}"])
    assert f"planner given_planners:{name}" in message
    assert words.replace("PLACE", path) in message


def test_decisions_of_a_users_planner_that_make_no_plan_are_reported(tmp_path, monkeypatch, capsys):
    written(tmp_path / "given_planners.py", PLANNERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "given_planners", raising=False)
    assert exit_code(["plan", *BATCH, "--planner", "given_planners:halves"]) == 2
    error = capsys.readouterr().err
    assert "planner 'given_planners:halves' made a plan that cannot run" in error
    assert "order has 0 rows for 2 ranks" in error


@pytest.mark.parametrize(("text", "words"), [("def (", "SyntaxError"), ("1 / 0", "ZeroDivisionError")])
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, capsys, text, words):
    written(tmp_path / "broken_planners.py", text)
    monkeypatch.syspath_prepend(tmp_path)
    assert words in error_line(capsys, ["plan", *BATCH, "--planner", "broken_planners:f"])


ESCAPES = {"planner": "\x1b[31mred", "costs": "\x1b]0;title\x07", "notes": ["two\nlines", "half \ud800", "back\u202ewards"]}


@pytest.mark.parametrize("command", [["show", "FILE"], ["show", "FILE", "--all"], ["check", "FILE"], ["simulate", "FILE"]])
def test_no_text_of_a_plan_moves_the_terminals_cursor(tmp_path, capsys, command):
    path = written(tmp_path / "plan.json", signed(SOUND["plan"] | ESCAPES))
    assert exit_code([path if word == "FILE" else word for word in command]) == 0
    out, err = capsys.readouterr()
    assert all(line.isprintable() for line in (out + err).split("\n"))
    if command[0] == "show":
        assert r"planner \x1b[31mred, costs \x1b]0;title\x07, " in out
        for note in (r"two\nlines", r"half \ud800", r"back\u202ewards"):
            assert f"note: {note}\n" in out


def test_text_of_a_plan_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path):
    path = written(tmp_path / "plan.json", signed(SOUND["plan"] | ESCAPES | {"planner": "$\\frac{$"}))
    picture, text = tmp_path / "plan.svg", tmp_path / "plan.txt"
    assert exit_code(["show", path, "-o", str(picture)]) == exit_code(["show", path, "-o", str(text)]) == 0
    assert "planner $\\frac{$" in text.read_text()


def test_a_profiles_name_is_printed_as_escapes(tmp_path, capsys):
    path = written(tmp_path / "costs.json", spoiled("profile", "name", to="\x1b[2J"))
    assert exit_code(["plan", *BATCH, "--costs", path]) == 0
    assert r"costs \x1b[2J, " in capsys.readouterr().out
    origin = {"source": "measured", "machine": "\x1b[2J"}
    path = written(tmp_path / "costs.json", spoiled("profile", "origin", to=origin))
    exit_code(["doctor", "--costs", path])
    assert r"measured, of \x1b[2J" in capsys.readouterr().out


@pytest.fixture
def unforeseen(monkeypatch):
    """An error in the middle of a command that reads costs."""

    def broken(name):
        with naming_file(name):
            raise LookupError("what\x1b\nwas that")

    monkeypatch.setattr(cli_inputs, "load_costs", broken)


def test_an_unforeseen_error_is_one_line_with_the_file_at_hand(unforeseen, capsys):
    assert exit_code(["plan", *BATCH, "--costs", "given.json"]) == 70
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert r"unforeseen LookupError: what\x1b was that; the file at hand was given.json; a fault of megatron-epp" in err
    assert "--debug" in err


@pytest.mark.parametrize("argv", [["--debug", "plan"], ["plan", "--debug"]])
def test_its_traceback_is_there_where_it_is_asked_for(unforeseen, capsys, argv):
    assert exit_code([*argv, *BATCH, "--costs", "given.json"]) == 70
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):\n")
    assert "in broken\n" in err
    assert "unforeseen LookupError" in err.splitlines()[-1]


def test_the_traceback_of_a_foreseen_error_is_there_too(capsys):
    assert exit_code(["plan", "--debug", "--lengths", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_interrupted_command_ends_with_130_and_without_a_traceback(monkeypatch, capsys):
    def interrupted(args, lengths, layout):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_plan, "costs_of", interrupted)
    assert exit_code(["plan", *BATCH]) == 130
    assert capsys.readouterr().err == "\nmegatron-epp: interrupted\n"


def piped(tmp_path, shell, **options):
    """A command that checks a plan with a fault, in a shell line with its output somewhere."""
    path = written(tmp_path / "plan.json", spoiled("plan", "predicted", "makespan_us", to=1.0))
    command = f"{sys.executable} -m megatron_epp.cli.main check {path} {shell}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, **options)


def test_a_closed_pipe_is_silent_and_keeps_the_exit_code(tmp_path):
    done = piped(tmp_path, "| true; echo ${PIPESTATUS[0]}")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_closed_output_is_no_error(tmp_path):
    done = piped(tmp_path, ">&-")
    assert (done.returncode, done.stderr) == (1, "")


def test_an_output_that_cannot_be_written_is_one_line(tmp_path):
    done = piped(tmp_path, "> /dev/full")
    assert done.returncode == 2
    assert done.stderr == "megatron-epp: error: [Errno 28] No space left on device\n"


def test_what_a_terminals_encoding_lacks_is_escaped(tmp_path):
    path = written(tmp_path / "plan.json", signed(SOUND["plan"] | {"planner": "größe"}))
    command = f"PYTHONUTF8=0 PYTHONIOENCODING=ascii {sys.executable} -m megatron_epp.cli.main show {path} --width 60"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"planner gr\xf6\xdfe" in done.stdout


def test_what_is_nested_up_to_the_limit_is_taken():
    value = []
    for _ in range(100):
        value = [value]
    check_nested(value, "it")
    with pytest.raises(EppError, match="it has lists or objects nested deeper than 100"):
        check_nested([value], "it")
    with pytest.raises(EppError, match="it holds more than 9 values"):
        check_nested([[0] * 5, [0] * 5], "it", most_values=9)


def test_the_plan_that_is_spoiled_here_is_sound():
    assert check(PLAN) == []


@pytest.mark.parametrize("command", ["quickstart", "first-run"])
@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("a-file", "a-file is a file: give a folder"),
        ("a-file/below", "a-file is a file"),
        ("/proc/none", "cannot be written to"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_starts(
    command, folder, why, capsys, tmp_path, monkeypatch
):
    (tmp_path / "a-file").write_text("")
    monkeypatch.chdir(tmp_path)
    message = error_line(capsys, [command, "-o", folder])
    assert why in message
    assert "-o/--output" in message
