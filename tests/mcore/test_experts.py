"""The routers' own losses: their scale in backward, and their mean in Megatron's log."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_epp.mcore.model.losses import average_router_losses, scale_router_losses


@pytest.fixture
def scaler(monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    return MoEAuxLossAutoScaler


def scaled(scaler, **config):
    scale_router_losses(SimpleNamespace(**({"num_moe_experts": 4, "grad_scale_func": None} | config)), torch.zeros(3))
    return scaler.main_loss_backward_scale


def test_router_losses_have_the_scale_of_the_main_loss(scaler):
    assert scaled(scaler).tolist() == [1.0]
    assert scaled(scaler, grad_scale_func=lambda loss: 512 * loss).tolist() == [512.0]
    assert scaled(scaler, grad_scale_func=lambda loss: 512 * loss, moe_grad_scale_func=lambda: 2.0).tolist() == [2.0]


def test_a_dense_model_has_no_such_scale(scaler):
    assert scaled(scaler, num_moe_experts=None) is None


def test_megatrons_log_gets_the_mean_over_chunks(monkeypatch):
    """Megatron divides the sum by the microbatches: here by 8, though 2 chunks ran."""
    tracker = moe_logging.MoEMetricsTracker()
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", tracker)
    for loss in (1.0, 2.0):
        tracker.record("load_balancing_loss", torch.tensor(loss), layer_number=2, num_layers=3)
    average_router_losses(num_microbatches=8, num_chunks=2)
    assert (tracker.metrics["load_balancing_loss"].values / 8).tolist() == [0.0, 1.5, 0.0]
