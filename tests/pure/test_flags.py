"""One table gives every setting its flags; what a flag says arrives in the planner's options at both doors."""

import argparse
import dataclasses

import pytest

from megatron_epp.mcore.arguments.flag import COUNT, Flag
from megatron_epp.mcore.arguments.parser import add_epp_args, options_from
from megatron_epp.mcore.arguments.table import ROWS, TABLE
from megatron_epp.planner import Options
from megatron_epp.tools.cli import main as cli

BATCH = ["plan", "--lengths", "9,5"]
GIVEN = [
    ("chunk-tokens", "64", "chunk_tokens", 64), ("slices", "3", "slices", 3), ("recompute", "2", "recompute", 2),
    ("recompute", "auto", "recompute", "auto"), ("recompute-modes", "full", "recompute_modes", "full"),
    ("offload", "on", "offload", True), ("offload", "off", "offload", False), ("planner", "seq1f1b", "planner", "seq1f1b"),
]  # fmt: skip


def training(*flags, **megatron):
    args = add_epp_args(argparse.ArgumentParser()).parse_args(flags)
    return options_from(argparse.Namespace(**vars(args), **megatron), training=True)


def command_line(*flags):
    return options_from(cli._parser().parse([*BATCH, *flags]))


def test_without_flags_both_doors_have_the_defaults():
    assert training() == command_line() == Options()


@pytest.mark.parametrize(("flag", "value", "field", "expected"), GIVEN)
def test_a_setting_arrives_at_both_doors(flag, value, field, expected):
    options = dataclasses.replace(Options(), **{field: expected})
    assert (
        training(f"--epp-{flag}", value) == command_line(f"--{flag}", value) == command_line(f"--epp-{flag}", value) == options
    )


def test_commands_offload_where_the_host_memory_is_known():
    assert command_line("--host-memory-gb", "100").offload
    assert not command_line("--host-memory-gb", "100", "--offload", "off").offload


def test_a_flag_of_megatron_of_the_same_name_is_no_setting_of_the_planner():
    assert training(seed=77, context=5) == Options()


def test_every_option_that_users_may_set_has_a_row():
    assert {field.name for field in dataclasses.fields(Options)} - set(ROWS) == {"kv_offload", "steps", "chunks"}
    assert len(ROWS) == len(TABLE)


def test_commands_take_the_settings_that_have_a_flag_there_and_no_others():
    (commands,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    actions = [action for command in commands.choices.values() for action in command._actions]
    assert {action.setting for action in actions if hasattr(action, "setting")} == {row.setting for row in TABLE if row.short}


def test_a_row_is_all_that_a_new_setting_needs(monkeypatch):
    """Parsers and options take it from the row; its effect is the planner's."""
    row = Flag("plan_limit_s", "--epp-most-seconds", "--most-seconds", COUNT, "Time for the solver (default: 10).")
    monkeypatch.setattr("megatron_epp.mcore.arguments.parser.TABLE", (row,))
    monkeypatch.setitem(ROWS, "plan_limit_s", row)
    assert training("--epp-most-seconds", "5") == Options(plan_limit_s=5)
    assert options_from(cli._parser().parse([*BATCH, "--most-seconds", "6"])) == Options(plan_limit_s=6)
