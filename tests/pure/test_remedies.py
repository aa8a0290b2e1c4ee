"""Errors of planning carry what to change as data; who asked reads it with the names of their own door."""

import ast
import pickle
from copy import copy
from dataclasses import fields
from pathlib import Path

import pytest

import megatron_epp
from megatron_epp.cli import main as cli
from megatron_epp.cost import ModelShape
from megatron_epp.mcore.arguments.parser import names_of
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.plan import EppError, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.reading import naming_file
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.message_room import MessageRoomError

ROOT = Path(megatron_epp.__file__).parent
PURE = ("plan", "cost", "planner", "data")
FIELDS = {field.name for kind in (Options, Problem, ModelShape) for field in fields(kind)}
MEGATRONS = {"global_batch_size", "num_stages", "vocab_parallel", "eod_mask_loss", "tokenizer_type", "tokenizer_model"}
"""Settings of errors that are no field of the planner's own, but a flag of Megatron, or a number of fields."""
COMMAND_LINE = {
    "plan": {
        "chunk_tokens": "--chunk-tokens",
        "slices": "--slices",
        "recompute": "--recompute",
        "planner": "--planner",
        "budget_ms": "--plan-budget-ms",
        "cap_bytes": "--memory-cap-gb",
        "host_cap_bytes": "--host-memory-gb",
        "context": "--context",
        "global_batch_size": "--batch-size",
        "num_stages": "--stages",
        "tensor_parallel": "--tensor-parallel",
        "context_parallel": "--context-parallel",
        "expert_parallel": "--expert-parallel",
        "num_layers": "--layers",
        "hidden_size": "--hidden",
        "num_attention_heads": "--heads",
        "num_query_groups": "--kv-heads",
        "num_experts": "--experts",
        "experts_per_token": "--experts-per-token",
    },
    "advise": {"context": "--context", "global_batch_size": "--global-batch-size"},
    "prepare": {"tokenizer_type": "--tokenizer-type", "tokenizer_model": "--tokenizer-model", "vocab_size": "--vocab-size"},
}
ERROR = InfeasibleError(
    "no plan fits.\n",
    Remedy("raise", "cap_bytes", (5 << 28) + 1),
    Remedy("raise", "host_cap_bytes", 1 << 31),
    Remedy("lower", "chunk_tokens"),
    Remedy("set", "planner", "greedy"),
    least_cap_bytes=7,
)


def command(name):
    (commands,) = (action for action in cli._parser()._actions if isinstance(action.choices, dict))
    return commands.choices[name]


def literals(package):
    """Every text of a package, docstrings too, with its file."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.value


def remedied(package):
    """Settings that a package names in `Remedy(change, setting)`."""
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Remedy":
                yield from (arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_names_no_flag(package):
    words = [(path.name, word) for path, text in literals(package) for word in text.split() if word.strip("(`'\"")[:2] == "--"]
    assert [(name, word) for name, word in words if word.strip("(`'\"-")[:1].isalpha()] == []


@pytest.mark.parametrize("package", PURE)
def test_every_setting_that_an_error_names_is_a_field_and_a_flag_in_training(package):
    found = set(remedied(package))
    assert found <= FIELDS | MEGATRONS
    assert found <= set(TRAINING)


def test_each_door_has_its_own_name_for_a_setting():
    for name, expected in COMMAND_LINE.items():
        names = names_of(command(name))
        assert names | expected == names
    for setting in set().union(*map(remedied, PURE)) - {"eod_mask_loss"}:
        assert any(setting in names_of(command(name)) for name in COMMAND_LINE), setting


def test_the_text_is_of_who_asked():
    assert str(ERROR) == (
        "no plan fits.\nRaise cap_bytes to 1342177281 or host_cap_bytes to 2147483648, or lower chunk_tokens, or set planner "
        "to greedy."
    )
    assert ERROR.text(TRAINING) == (
        "no plan fits.\nRaise --epp-memory-cap-gb to 1.26 or --epp-host-memory-gb to 2.00, or lower --epp-chunk-tokens, or set "
        "--epp-planner to greedy."
    )
    assert ERROR.text(names_of(command("plan"))).endswith("lower --chunk-tokens, or set --planner to greedy.")
    both = EppError("too few", Remedy("drop", "slices"), Remedy("use", value="another file"))
    assert str(both) == "too few; leave out slices, or use another file"


@pytest.mark.parametrize("moved", [copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_keep_everything_on_their_way_from_process_to_process(moved):
    found = moved(ERROR.with_context("a batch: ", "\nIt was long.", TRAINING))
    assert type(found) is InfeasibleError
    assert found.least_cap_bytes == 7
    assert found.remedies == ERROR.remedies
    assert str(found) == f"a batch: {ERROR.text(TRAINING)}\nIt was long."
    assert moved(MessageRoomError("full", (1, 2))).needed == (1, 2)


def test_an_error_that_is_told_of_a_file_keeps_its_remedies():
    with pytest.raises(PlanError) as refused, naming_file("a.yaml", PlanError):
        raise EppError("too few", Remedy("raise", "slices", 3))
    assert refused.value.text(TRAINING) == "a.yaml: too few; raise --epp-slices to 3"
