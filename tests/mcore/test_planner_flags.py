"""Flags about planning and experts that do not go together are refused by name."""

import argparse

import pytest
import torch

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.model.adopt_built import refusal
from megatron_epp.mcore.training import caps
from megatron_epp.plan import EppError
from tests.support.mcore.megatron_flags import arguments

FLAGS = add_epp_args(argparse.ArgumentParser())._actions


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--epp-plan-budget-ms", "9", "--epp-planner", "1f1b"], "--epp-plan-budget-ms is for --epp-planner greedy, not 1f1b"),
        (["--epp-fragmentation-share", "5"], "--epp-fragmentation-share is 5.0; it must be a share, 0 to 1"),
        (["--epp-loss-block-tokens", "some"], "--epp-loss-block-tokens is 'some'; it must be auto or a number of tokens"),
        (
            ["--epp-planner", "helixpipe"],
            "--epp-planner helixpipe is planned, not run: training lacks attention of a layer on another rank than its "
            "weights; use --epp-planner greedy",
        ),
        (
            ["--epp-planner", "flexsp"],
            "training lacks groups of context-parallel ranks that change with every chunk; use --epp-pl",
        ),
        (
            ["--epp-offload", "--epp-planner", "1f1b"],
            "--epp-offload is for --epp-planner greedy and orders of papers, not 1f1b",
        ),
        (["--epp-offload", "on", "--epp-recompute", "1"], "leave --epp-recompute at auto"),
        (["--epp-order", "given"], "--epp-order given is for --epp-microbatches user"),
        (
            ["--epp-host-memory-gb", "4", "--epp-recompute", "1"],
            "--epp-host-memory-gb is for offload, .* --epp-recompute at auto",
        ),
        (["--epp-offload", "--epp-planner", "mine:own", "--epp-recompute", "1"], "--epp-offload is for offload, .* at auto"),
        (["--epp-host-memory-gb", "4", "--epp-planner", "1f1b"], "--epp-host-memory-gb is for --epp-planner greedy"),
        (["--epp-costs", "measure"], "--epp-costs measure has gone: use learn"),
        (
            ["--epp-offload", "--epp-host-memory-gb", "0"],
            "--epp-host-memory-gb is 0.0; it must be a positive number up to 1,000,000,000",
        ),
        (["--epp-plan-budget-ms", "2000", "--epp-wait-limit-seconds", "2"], "2000 is not below --epp-wait-limit-seconds 2"),
    ],
)
def test_what_cannot_be_is_refused(flags, says):
    with pytest.raises(ArgumentError, match=says):
        prepare_epp_args(arguments(*flags))


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        ([], {"tensor_model_parallel_size": 1}, "does not go with --tensor-model-parallel-size 1: there is no exchange"),
        (["--epp-planner", "stp"], {}, "is for --epp-planner greedy, not stp; leave one of them out"),
        ([], {"hidden_dropout": 0.25}, "does not go with --hidden-dropout 0.25: both would draw"),
        ([], {"tp_comm_overlap": True}, "does not go with --tp-comm-overlap: its buffers"),
        ([], {"timing_log_level": 2}, "does not go with --timing-log-level 2: its timers"),
        ([], {"nvtx_ranges": True}, "does not go with --nvtx-ranges: its ranges"),
    ],
)
def test_what_keeps_two_actions_from_running_in_one_step_is_refused(flags, megatron, says):
    with pytest.raises(ArgumentError, match=f"--epp-overlap-exchanges {says}"):
        prepare_epp_args(arguments("--epp-overlap-exchanges", *flags, **{"tensor_model_parallel_size": 2} | megatron))
    prepare_epp_args(arguments("--epp-overlap-exchanges", tensor_model_parallel_size=2, timing_log_level=1))


@pytest.mark.parametrize("flag", [action for action in FLAGS if action.type in (int, float)], ids=lambda action: action.dest)
def test_no_flag_takes_what_is_no_finite_number(flag):
    """Nor one below zero, or so large that it means none."""
    values = ["nan", "inf", "-1", "1e300"] if flag.type is float else ["-1", "0", "9" * 30]
    offload = ["--epp-offload"] if flag.dest == "epp_host_memory_gb" else []
    traced = ["--epp-report-dir", "reports"] if flag.dest == "epp_trace" else []
    for value in values:
        with pytest.raises(ArgumentError, match=f"{flag.option_strings[0]} is .*; it must be"):
            prepare_epp_args(arguments(*offload, *traced, f"{flag.option_strings[0]}={value}"))


@pytest.mark.parametrize("flag", ["--epp-recompute", "--epp-loss-block-tokens"])
@pytest.mark.parametrize("value", ["²", "-1", "nan", "9" * 5000])
def test_a_number_or_auto_is_nothing_else(flag, value):
    with pytest.raises(ArgumentError, match=f"{flag} is .*; it must be auto or a number"):
        prepare_epp_args(arguments(f"{flag}={value}"))


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--epp-plan-budget-ms", "500"],
        ["--epp-loss-block-tokens", "0"],
        ["--epp-offload", "off", "--epp-planner", "zb-v"],
        ["--epp-offload", "--epp-planner", "sppo"],
        ["--epp-recompute", "1", "--epp-planner", "1f1b"],
        ["--epp-offload", "--epp-host-memory-gb", "4", "--epp-recompute-modes", "full"],
    ],
)
def test_others_are_not(flags):
    prepare_epp_args(arguments(*flags))


@pytest.mark.parametrize("has_gpu", [True, False])
def test_offload_is_left_to_plans_that_may_have_copies_on_gpus_and_with_host_memory(has_gpu, monkeypatch):
    monkeypatch.setattr(caps.torch.cuda, "is_available", lambda: has_gpu)
    assert caps.offloads(arguments()) == has_gpu
    assert caps.offloads(arguments("--epp-host-memory-gb", "4"))
    assert caps.offloads(arguments("--epp-offload"))
    for no_copies in (["--epp-offload", "off"], ["--epp-planner", "1f1b"], ["--epp-recompute", "1"], ["--epp-order", "given"]):
        assert not caps.offloads(arguments(*no_copies))


EXPERTS = {"num_experts": 8, "expert_model_parallel_size": 4}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": False, "moe_flex_dispatcher_backend": "deepep"}
HYBRID_EP = FLEX | {"moe_flex_dispatcher_backend": "hybridep", "moe_hybridep_pad_uneven_dispatch_inputs": False}


@pytest.mark.parametrize(
    ("flags", "megatron", "says"),
    [
        ([], {"num_experts": None}, "--expert-model-parallel-size 4 is for a model with --num-experts"),
        ([], {"num_experts": 6}, "--num-experts 6 cannot be shared evenly by --expert-model-parallel-size 4: .* multiple of 4"),
        ([], FLEX | {"moe_flex_dispatcher_backend": "ncclep"}, "backend ncclep has buffers for a fixed number of tokens"),
        (
            [],
            FLEX | {"moe_flex_dispatcher_backend": "hybridep"},
            "backend hybridep needs equally many .* as 0.19 does: use deep",
        ),
        ([], HYBRID_EP | {"moe_expert_rank_capacity_factor": 2.0}, "--moe-expert-rank-capacity-factor 2.0 drops tokens by the"),
        ([], HYBRID_EP | {"moe_pad_expert_input_to_capacity": True}, "counts the tokens with which --moe-flex-dispatcher-back"),
        ([], FLEX | {"expert_model_parallel_size": 1}, "flex by deepep needs several ranks, and all experts are on each: use"),
        ([], {"moe_token_dispatcher_type": "allgather"}, "--moe-token-dispatcher-type allgather needs equally many tokens"),
        ([], {"moe_pad_expert_input_to_capacity": True}, "--moe-pad-expert-input-to-capacity needs equally many tokens"),
        ([], {"moe_router_load_balancing_type": "global_aux_loss"}, "--moe-router-load-balancing-type global_aux_loss"),
        ([], {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, "type quantile_balancing; there are"),
        (["--epp-schedule", "packed"], {}, "--epp-schedule packed .*: use padded"),
        (["--epp-planner", "stp"], {}, "replicas are planned together, which only --epp-planner greedy does"),
        (["--epp-plan-budget-ms", "50"], {}, "without --epp-plan-budget-ms"),
    ],
)
def test_experts_that_cannot_be_trained_are_refused(flags, megatron, says):
    with pytest.raises(EppError, match=says):
        prepare_epp_args(arguments(*flags, **(EXPERTS | megatron)))


def test_a_model_of_samples_is_refused_for_a_dispatcher_by_the_names_of_its_configuration():
    model, plain = torch.nn.Module(), {"multi_latent_attention": False, "recompute_granularity": None, "num_moe_experts": None}
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList()
    for backend, says in {"hybridep": "needs equally many tokens", "ncclep": "has buffers for", "deepep": ""}.items():
        model.config = argparse.Namespace(**plain, **FLEX | {"moe_flex_dispatcher_backend": backend})
        assert says in refusal(model)
        assert refusal(model).count(f"moe_flex_dispatcher_backend='{backend}'") == bool(says)


@pytest.mark.parametrize(
    "megatron", [FLEX, HYBRID_EP, FLEX | {"expert_model_parallel_size": 1, "tensor_model_parallel_size": 2}]
)
def test_tokens_reach_experts_by_deepep_and_hybridep_too(megatron):
    prepare_epp_args(arguments(**(EXPERTS | megatron)))


@pytest.mark.parametrize(
    "megatron",
    [{}, {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, {"epp_schedule": "stock", "epp_planner": "stp"}],
)
def test_other_experts_are_not(megatron):
    args = arguments(**EXPERTS)
    vars(args).update(megatron)
    prepare_epp_args(args)


def test_experts_of_one_rank_may_be_gathered():
    prepare_epp_args(arguments(num_experts=3, moe_token_dispatcher_type="allgather"))


def test_transformer_engines_layers_put_off_weight_gradients_where_plans_split_them():
    def delays(*epp, **megatron):
        args = arguments(*epp, **megatron)
        prepare_epp_args(args)
        return args.delay_wgrad_compute

    split, engine = "--epp-split-weight-gradient", {"transformer_impl": "transformer_engine"}
    assert delays(split, **engine)
    assert not delays(**engine)
    assert not delays(split)
    assert not delays(split, "--epp-schedule", "whole", **engine)
    with pytest.raises(ArgumentError, match="leave out --delay-wgrad-compute"):
        delays(delay_wgrad_compute=True, **engine)
