"""One table gives every setting its flags; what a flag says arrives in the planner's options at both doors."""

import argparse
import dataclasses

import pytest

from megatron_epp.cli import main as cli
from megatron_epp.mcore.arguments.flag import WHOLE, Flag
from megatron_epp.mcore.arguments.parser import add_epp_args, options_from
from megatron_epp.mcore.arguments.table import ROWS, TABLE
from megatron_epp.planner import Options

TRAINING_ONLY = {"epp", "schedule", "placement", "costs", "fp32_kv_gradients", "lookahead", "wait_limit_seconds", "report_dir"}
BATCH = ["plan", "--lengths", "9,5"]
GIVEN = [
    ("chunk-tokens", "64", "chunk_tokens", 64),
    ("slices", "3", "slices", 3),
    ("recompute", "2", "recompute", 2),
    ("recompute", "auto", "recompute", "auto"),
    ("recompute-modes", "full", "recompute_modes", "full"),
    ("offload", "on", "offload", True),
    ("offload", "off", "offload", False),
    ("plan-budget-ms", "70", "budget_ms", 70),
    ("planner", "seq1f1b", "planner", "seq1f1b"),
]


def training(*given, **megatron):
    args = add_epp_args(argparse.ArgumentParser()).parse_args(given)
    return options_from(argparse.Namespace(**vars(args), **megatron), training=True)


def command_line(*given):
    return options_from(cli._parser().parse([*BATCH, *given]))


def test_without_flags_both_doors_have_the_defaults():
    assert training() == command_line() == Options()


@pytest.mark.parametrize(("flag", "value", "field", "expected"), GIVEN)
def test_a_setting_arrives_at_both_doors(flag, value, field, expected):
    options = dataclasses.replace(Options(), **{field: expected})
    assert (
        training(f"--epp-{flag}", value) == command_line(f"--{flag}", value) == command_line(f"--epp-{flag}", value) == options
    )


def test_a_flag_of_megatron_of_the_same_name_is_no_setting_of_the_planner():
    assert training(seed=77, context=5, steps=9) == Options()


def test_every_option_that_users_may_set_has_a_row():
    assert {field.name for field in dataclasses.fields(Options)} - set(ROWS) == {"kv_offload", "wide_windows"}
    assert len(ROWS) == len(TABLE)
    assert all(ROWS[setting].short == "" for setting in TRAINING_ONLY)


def test_a_row_is_all_that_a_new_setting_needs(monkeypatch):
    """Parsers and options take it from the row; its effect is the planner's."""
    row = Flag("steps", "--epp-search-steps", "--search-steps", WHOLE, "Steps of local search (default: 0).", default=0)
    monkeypatch.setattr("megatron_epp.mcore.arguments.parser.TABLE", (row,))
    monkeypatch.setitem(ROWS, "steps", row)
    assert training("--epp-search-steps", "5") == Options(steps=5)
    args = cli._parser().parse([*BATCH, "--search-steps", "6"])
    assert options_from(args) == Options(steps=6)


def test_old_names_and_values_work_with_a_warning(caplog, capsys):
    whole = Options(recompute_modes="full")
    assert training("--epp-recompute-levels", "whole") == whole
    assert caplog.messages == [
        "'whole' of --epp-recompute-modes is now 'full'; the old name goes with the next release",
        "--epp-recompute-levels is now --epp-recompute-modes; the old name goes with the next release",
    ]
    caplog.clear()
    assert command_line("--recompute-levels", "all") == Options()
    assert caplog.messages == ["--recompute-levels is now --recompute-modes; the old name goes with the next release"]
    caplog.clear()
    assert training("--epp-recompute-modes", "full") == whole
    assert not caplog.messages
    with pytest.raises(SystemExit):
        training("--epp-recompute-modes", "some")
    assert "argument --epp-recompute-modes: invalid choice: 'some' (choose from 'all', 'full')" in capsys.readouterr().err


def test_on_other_ranks_a_renaming_is_not_told_again(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    training("--epp-recompute-levels", "all")
    assert not caplog.messages


def test_help_shows_no_old_name():
    shown = add_epp_args(argparse.ArgumentParser()).format_help()
    assert "recompute-modes" in shown
    assert "recompute-levels" not in shown


def test_a_removed_flag_is_refused_with_what_to_do_and_not_shown(monkeypatch, capsys):
    row = Flag("gone", "--epp-gone", removed="0.2.0: lower --epp-slices")
    monkeypatch.setattr("megatron_epp.mcore.arguments.parser.TABLE", (row,))
    parser = add_epp_args(argparse.ArgumentParser())
    assert vars(parser.parse_args([])) == {}
    assert "gone" not in parser.format_help()
    with pytest.raises(SystemExit):
        parser.parse_args(["--epp-gone"])
    assert "--epp-gone was removed in 0.2.0: lower --epp-slices" in capsys.readouterr().err
