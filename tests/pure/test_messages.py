"""What a refusal says would do does: flags, caps and contexts that fit, by the names of who asked; help imports little."""

import ast
import pickle
import subprocess
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import fields
from pathlib import Path

import pytest

import megatron_epp
from megatron_epp.mcore.arguments.parser import names_of
from megatron_epp.mcore.arguments.table import TRAINING, names_in_loop
from megatron_epp.plan import EppError, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.reading import naming_file
from megatron_epp.plan.units import enough_gib, format_bytes, format_gib
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.message_room import MessageRoomError
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.main import MODULES, NAMES
from megatron_epp.tools.formulas import ModelShape
from tests.support.plan.bad_files import exit_code

LLAMA = ["plan", "--lengths", "1000", "--model", "llama3-8b"]
SMALL = [*LLAMA, "--cluster", "h100x8", "--stages", "1"]


def test_a_device_that_is_too_small_has_no_larger_cap_to_raise_and_flags_that_are_named_help(capsys):
    assert exit_code(SMALL) == 2
    *_, refusal, other = capsys.readouterr().err.splitlines()
    assert refusal == "Raise --stages or --tensor-parallel. A device of 80 GiB has less."
    assert other == "`megatron-epp advise` tries sizes, layouts and contexts, and prints what fits."
    for flags in (["--stages", "4"], ["--tensor-parallel", "2", "--sequence-parallel"]):
        assert exit_code([*SMALL, *flags]) == 0


def test_help_imports_nothing_heavy_and_a_command_no_other():
    """All run in one process, which names the first that imports such a package."""
    commands = ["check", "", *MODULES, *NAMES]
    program = (
        "import sys; from megatron_epp.tools.cli.main import main\n"
        f"for number, command in enumerate({commands}):\n"
        " try: main([*command.split(), '--help'])\n"
        " except SystemExit:\n"
        "  heavy = {'numba', 'torch', 'matplotlib', 'megatron', 'highspy'} & set(sys.modules)\n"
        "  if heavy: sys.exit(f'{command}: {heavy}')\n"
        "  if number == 0 and 'megatron_epp.tools.cli.advise' in sys.modules: sys.exit('check imports advise')\n"
        "  print('end of help')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *texts, rest = done.stdout.split("end of help\n")
    assert (len(texts), rest) == (len(commands), "")
    assert all(text.startswith("usage: megatron-epp") for text in texts)


ROOT = Path(megatron_epp.__file__).parent
PURE = ("plan", "cost", "planner", "data")
FIELDS = {field.name for kind in (Options, Problem, ModelShape) for field in fields(kind)}
MEGATRONS = {
    *("global_batch_size", "num_stages", "vocab_parallel", "eod_mask_loss", "tokenizer_type", "tokenizer_model", "fp8_recipe")
}
"""Settings of errors that are no field of the planner's own, but a flag of Megatron, or a number of fields."""
ERROR = InfeasibleError(
    "no plan fits.\n",
    Remedy("raise", "cap_bytes", (5 << 28) + 1),
    Remedy("raise", "host_cap_bytes", 1 << 31),
    Remedy("lower", "chunk_tokens"),
    Remedy("set", "planner", "greedy"),
    least_cap_bytes=7,
)


def flags_of(name: str) -> dict[str, str]:
    (commands,) = (action for action in cli._parser()._actions if isinstance(action.choices, dict))
    return names_of(commands.choices[name])


def nodes(package: str) -> Iterator[ast.AST]:
    for path in (ROOT / package).rglob("*.py"):
        yield from ast.walk(ast.parse(path.read_text()))


def remedied(package: str) -> set[str]:
    """Settings that a package names in `Remedy(change, setting)`."""
    calls = (node for node in nodes(package) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    return {arg.value for call in calls if call.func.id == "Remedy" for arg in call.args[1:2] if isinstance(arg, ast.Constant)}


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_names_settings_and_no_flag(package):
    texts = (node.value for node in nodes(package) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    words = (word.strip("(`'\"") for text in texts for word in text.split())
    assert [word for word in words if word[:2] == "--" and word.strip("-")[:1].isalpha()] == []
    assert remedied(package) <= (FIELDS | MEGATRONS) & set(TRAINING)


TRAININGS = {
    "mcore/iteration": {"document_schedule.py", "sliced_run.py", "wrap.py"},
    "mcore/model": {"adopt.py", "core_attention.py", "model_chunks.py"},
    "mcore/costs": set(),
    "runtime": set(),
    "losses": set(),
}
"""Packages that a program with a loop of its own reaches, and their files with texts that only a training with flags does."""


@pytest.mark.parametrize("package", TRAININGS)
def test_no_text_that_a_loop_of_ones_own_reaches_names_our_flags(package):
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]  # docstrings
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in statements)
        if "kinds" not in path.parts and any("--epp" in str(text.value) for text in texts):
            found.add(path.name)
    assert found == TRAININGS[package]


def test_settings_that_a_loop_of_ones_own_has_not_are_not_advised():
    error = InfeasibleError("no plan.\n", Remedy("raise", "cap_bytes", 1 << 30), Remedy("set", "vocab_parallel", "on"))
    context = Remedy("lower", "context")
    names = names_in_loop(["memory_cap_gb"])
    assert error.text(names) == "no plan.\nRaise memory_cap_gb to 1.00."
    assert EppError("no plan", context).text(names) == "no plan; lower the length of the longest sequence"
    assert EppError("no plan.\n", Remedy("set", "vocab_parallel", "on")).text(names) == "no plan."
    assert "--epp-vocab-parallel to on" in error.text(TRAINING)


def test_each_door_has_its_own_name_for_a_setting():
    doors = {name: flags_of(name) for name in ("plan", "advise", "prepare")}
    assert doors["plan"]["global_batch_size"] == "--batch-size"
    assert doors["advise"]["global_batch_size"] == "--global-batch-size"
    assert (doors["plan"]["cap_bytes"], doors["plan"]["num_layers"]) == ("--memory-cap-gb", "--layers")
    assert doors["prepare"]["tokenizer_model"] == "--tokenizer-model"
    settings = set().union(*map(remedied, PURE)) - {"eod_mask_loss"}
    assert settings - set().union(*doors.values()) == set()


def test_the_text_is_of_who_asked():
    assert str(ERROR) == (
        "no plan fits.\nRaise cap_bytes to 1342177281 or host_cap_bytes to 2147483648, or lower chunk_tokens, or set planner "
        "to greedy."
    )
    assert ERROR.text(TRAINING) == (
        "no plan fits.\nRaise --epp-memory-cap-gb to 1.26 or --epp-host-memory-gb to 2.00, or lower --epp-chunk-tokens, or set "
        "--epp-planner to greedy."
    )
    assert ERROR.text(flags_of("plan")).endswith("lower --chunk-tokens, or set --planner to greedy.")
    both = EppError("too few", Remedy("drop", "slices"), Remedy("use", value="another file"))
    assert str(both) == "too few; leave out slices, or use another file"
    with pytest.raises(PlanError) as refused, naming_file("a.yaml", PlanError):
        raise EppError("too few", Remedy("raise", "slices", 3))
    assert refused.value.text(TRAINING) == "a.yaml: too few; raise --epp-slices to 3"


@pytest.mark.parametrize("moved", [copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_keep_everything_on_their_way_from_process_to_process(moved):
    error = moved(ERROR.with_context("a batch: ", "\nIt was long.", TRAINING))
    assert type(error) is InfeasibleError
    assert (error.least_cap_bytes, error.remedies) == (7, ERROR.remedies)
    assert str(error) == f"a batch: {ERROR.text(TRAINING)}\nIt was long."
    assert moved(MessageRoomError("full", (1, 2))).needed == (1, 2)


GIB = 1 << 30
PAIRS = [(72 * GIB, 72 * GIB + 1), (10_737_418, 11_000_000), (80_745_586_688, 80_745_586_680), (1, 2), (5 << 20, 5 << 30)]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_sizes_that_differ_look_different_and_a_limit_raised_to_the_number_suffices(pair):
    for shown in (format_bytes, format_gib):
        first, other = (shown(*sizes) for sizes in (pair, pair[::-1]))
        assert first != other
        assert all(text.split()[1] in ("GiB", "MiB", "KiB", "B") for text in (first, other))
    for size in (0, *pair):
        enough = float(enough_gib(size)) * GIB
        assert size <= enough <= max(size * 1.01, size + 0.01 * GIB)
        assert enough <= 1.01 * size or not 10_000 < size < GIB, "small ones keep their digits"
    assert format_bytes(pair[0], pair[0]) == format_bytes(pair[0]), "equal sizes take no more digits"
    assert enough_gib((5 << 28) + 1) == "1.26"
