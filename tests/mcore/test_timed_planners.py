"""Planners whose plans depend on how fast the machine is do not train: every rank plans for itself."""

import argparse

import pytest

from megatron_epp.mcore.args import ArgumentError, add_epp_args, prepare_epp_args
from megatron_epp.planner import TIMED


def flags(planner):
    args = add_epp_args(argparse.ArgumentParser()).parse_args(["--epp", "--epp-planner", planner])
    others = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "seq_length": 1024, "rank": 0}
    others |= {"calculate_per_token_loss": True, "context_parallel_size": 1, "num_attention_heads": 8}
    return argparse.Namespace(**vars(args), **others)


@pytest.mark.parametrize("planner", sorted(TIMED))
def test_a_timed_planner_is_refused_with_what_to_use_instead(planner):
    with pytest.raises(ArgumentError, match=rf"--epp-planner {planner} .*greedy"):
        prepare_epp_args(flags(planner))


@pytest.mark.parametrize("planner", ["greedy", "infinipipe"])
def test_others_are_not(planner):
    args = flags(planner)
    prepare_epp_args(args)
    assert args.epp_planner == planner
