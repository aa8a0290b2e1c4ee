"""Bytes that autograd does not keep in measured costs: none on a CPU, where nothing else is measured."""

from __future__ import annotations

import logging
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.cost import CPU, ModelShape, analytic_costs
from megatron_epp.cost.memory import FRAGMENTATION_SHARE
from megatron_epp.mcore.costs import sources as costs_of_runs
from megatron_epp.mcore.costs.shape import with_device_memory
from tests.mcore.test_refusals import arguments

SHAPE = ModelShape(num_layers=3, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
COSTS = analytic_costs(SHAPE, CPU, [1, 1, 1])


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_on_a_cpu_the_costs_stay_as_they_are_but_for_a_share_that_was_given():
    assert with_device_memory(Namespace(epp_fragmentation_share=None), COSTS) == COSTS
    with_share = with_device_memory(Namespace(epp_fragmentation_share=0.1), COSTS)
    assert with_share.fragmentation_share == 0.1
    assert with_share.stages == COSTS.stages


def test_on_a_gpu_passes_and_messages_take_room(on_gpu):
    costs = with_device_memory(arguments(padded_vocab_size=1024), COSTS)
    assert costs.fragmentation_share == FRAGMENTATION_SHARE
    assert costs.message_bytes_per_token == COSTS.hidden_bytes_per_token
    running = [stage.layers.working_bytes_per_token for stage in costs.stages]
    assert running == [stage.layers.bytes_per_token for stage in COSTS.stages]
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    args = arguments(num_experts=8, expert_model_parallel_size=4, padded_vocab_size=1024, **flex)
    exchanged = with_device_memory(args, COSTS)
    buffer = 4 * 4 * args.hidden_size  # fp32 rows of four ranks
    assert exchanged.exchange_bytes_per_token == buffer
    assert [stage.layers.working_bytes_per_token for stage in exchanged.stages] == running


class Experts(torch.nn.Module):
    """Weights of three experts in one module, as a grouped layer of Transformer Engine has them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.zeros(30, 20)))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_a_module_come_together_and_fused_layers_have_a_placeholder_of_every_shape(fused: bool):
    decoder = torch.nn.ModuleList([torch.nn.Linear(30, 40, bias=False), torch.nn.Linear(30, 40, bias=False), Experts()])
    model = torch.nn.ModuleList([torch.nn.Embedding(10, 8), decoder])
    stage, args = SimpleNamespace(model=model, decoder=decoder), Namespace(gradient_accumulation_fusion=fused)
    assert costs_of_runs.new_gradient_bytes(args, stage) == 4 * (10 * 8 if fused else 3 * 30 * 20)
    assert costs_of_runs.placeholder_bytes(args, [stage, stage]) == 4 * fused * (30 * 40 + 30 * 20)


def test_a_profile_of_another_precision_is_named_and_gives_times_alone(caplog, monkeypatch):
    monkeypatch.setattr(costs_of_runs.dist, "get_rank", lambda: 0)
    half = analytic_costs(replace(SHAPE, bytes_per_value=2), CPU, [1, 1, 1])
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        assert costs_of_runs._with_bytes(half, 128.0) == half
        assert not caplog.records
        assert costs_of_runs._with_bytes(half, 256.0).hidden_bytes_per_token == 256.0
    assert "128 bytes per token where this run's take 256" in caplog.text
