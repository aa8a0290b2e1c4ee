"""The routers' own losses, in backward and Megatron's log; experts' copies of tokens, and the buffers they are exchanged by."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.iteration import document_schedule as forward_backward
from megatron_epp.mcore.model.losses import average_router_losses, scale_added_losses
from tests.mcore.test_activations import EXPERTS, GROUPED, LLAMA, SIZES, small
from tests.support.mcore import worker
from tests.support.mcore.forked import job, of_ranks


@pytest.fixture
def scaler(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    return MoEAuxLossAutoScaler


def scaled(scaler, **config):
    usual = {"num_moe_experts": 4, "mtp_num_layers": None, "grad_scale_func": None}
    scale_added_losses(SimpleNamespace(**usual | config), torch.zeros(3))
    return scaler.main_loss_backward_scale


def test_router_losses_have_the_scale_of_the_main_loss(scaler):
    assert scaled(scaler, num_moe_experts=None) is None
    assert scaled(scaler).tolist() == [1.0]
    assert scaled(scaler, grad_scale_func=lambda loss: 512 * loss).tolist() == [512.0]
    assert scaled(scaler, grad_scale_func=lambda loss: 512 * loss, moe_grad_scale_func=lambda: 2.0).tolist() == [2.0]


def test_megatrons_log_gets_the_mean_over_chunks(monkeypatch):
    """Megatron divides the sum by the microbatches: here by 8, though 2 chunks ran."""
    tracker = moe_logging.MoEMetricsTracker()
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", tracker)
    for loss in (1.0, 2.0):
        tracker.record("load_balancing_loss", torch.tensor(loss), layer_number=2, num_layers=3)
    average_router_losses(num_microbatches=8, num_chunks=2)
    assert (tracker.metrics["load_balancing_loss"].values / 8).tolist() == [0.0, 1.5, 0.0]


def test_a_batch_without_a_trained_token_has_no_gradients_of_routers_either_and_is_told(monkeypatch, caplog):
    """They would be those of losses times their tokens, divided by none."""
    monkeypatch.setattr(forward_backward.dist, "get_rank", lambda: 0)
    scales, run = [], SimpleNamespace(untrained_batches=0, names=TRAINING)
    model = SimpleNamespace(scale_gradients=scales.append)
    for consumed in range(8, 48, 8):
        batch = SimpleNamespace(global_size=8, consumed_samples=consumed)
        forward_backward.warn_and_clear_untrained(run, [model, model], SimpleNamespace(num_moe_experts=4), batch)
    assert scales == [0.0] * 10
    told = [record.getMessage() for record in caplog.records]
    assert [line.split("(batch")[1].split()[0] for line in told] == ["1", "2", "4"]
    assert told[2].startswith("none of the 8 sequences up to sample 32 has a trained token: their loss and gradients are 0")
    forward_backward.warn_and_clear_untrained(run, [model], SimpleNamespace(num_moe_experts=None), batch)
    assert len(scales) == 10


FLAGS = [*small(SIZES | LLAMA | GROUPED | EXPERTS), "--hidden-size", "512", "--moe-router-topk", "8"]
SHARED = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
CASES = {
    "two ranks have experts": ({"expert_model_parallel_size": 2}, FLAGS),
    "one rank has them": ({"expert_model_parallel_size": 1}, FLAGS),
    "two ranks share each": (SHARED, [*FLAGS, "--sequence-parallel"]),
    "and add up in fp32": (SHARED, [*FLAGS, "--sequence-parallel", "--moe-router-dtype", "fp32"]),
}
TOLERANCE = 0.05
"""Share of the layer's output, which is there before the copies are gone."""


def test_a_forward_holds_the_copies_that_plans_count():
    figures, _ = of_ranks(job(2, "activations:dispatched", cases=list(CASES.values())))
    for name, (planned, measured) in zip(CASES, figures, strict=True):
        assert measured == pytest.approx(planned, rel=TOLERANCE), name


CHUNK_TOKENS = [(9, 30), (31, 2), (5, 33), (7, 7), (7, 7), (7, 7)]
"""Tokens of two ranks in the largest chunks of their plans, by iteration."""
TOKEN_BYTES = 2 * 16 * 4
SPARE = [(0, 0), (0, 0), (0, 0), (28 * TOKEN_BYTES, 1 << 60), (1 << 60, 28 * TOKEN_BYTES - 1), (0, 0)]
"""Bytes that their plans leave of their caps."""


def test_deepeps_buffer_is_there_first_and_hybrideps_changes_between_iterations_where_a_rank_has_no_room():
    """In steps of 4 tokens, as the stand-in's exchanges have them. Other dispatchers have none."""
    for of_rank in worker.call(2, "tests.support.mcore.jobs.activations:buffers", sizes=CHUNK_TOKENS, spare=SPARE):
        assert of_rank["deepep"] == {"num_bytes": TOKEN_BYTES, "is taken": True, "reserves": False}
        assert of_rank["hybridep"] == {"sizes": [32, 32, 36, 36, 8, 8], "num buffers": 3, "allocates": False}
        assert not of_rank["alltoall"]
