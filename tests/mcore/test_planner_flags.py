"""Flags about planning that do not go together are refused by name."""

import argparse

import pytest

from megatron_epp.mcore.args import ArgumentError, add_epp_args, prepare_epp_args


def flags(*given):
    args = add_epp_args(argparse.ArgumentParser()).parse_args(["--epp", *given])
    others = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "seq_length": 1024, "rank": 0}
    others |= {"calculate_per_token_loss": True, "context_parallel_size": 1, "num_attention_heads": 8}
    others |= {"pipeline_model_parallel_size": 1, "num_layers": 4, "world_size": 1, "global_batch_size": 8}
    return argparse.Namespace(**vars(args), **others)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--epp-plan-budget-ms", "0"], "--epp-plan-budget-ms is 0; it must be at least 1"),
        (["--epp-plan-budget-ms", "9", "--epp-planner", "milp"], "--epp-plan-budget-ms is for --epp-planner greedy, not milp"),
        (["--epp-recompute", "1", "--epp-planner", "milp"], "leave --epp-recompute at auto"),
        (["--epp-plan-budget-ms", "2000", "--epp-wait-limit-seconds", "2"], "2000 is not below --epp-wait-limit-seconds 2"),
    ],
)
def test_a_budget_that_cannot_be_is_refused(given, says):
    with pytest.raises(ArgumentError, match=says):
        prepare_epp_args(flags(*given))


@pytest.mark.parametrize("given", [[], ["--epp-planner", "milp"], ["--epp-plan-budget-ms", "500"]])
def test_others_are_not(given):
    prepare_epp_args(flags(*given))
