"""Layers are run before training in every way in which training runs them, so that what is compiled is compiled then."""

from types import SimpleNamespace

import torch

from megatron_epp.mcore.costs import memory_probe
from megatron_epp.plan import NO_RECOMPUTE


def test_layers_run_with_and_without_recompute_and_without_gradients(monkeypatch):
    ran = []

    def forward(stage, chunk, recompute=NO_RECOMPUTE):
        ran.append((chunk.num_tokens, recompute.full, torch.is_grad_enabled()))
        return None, "output", "context"

    monkeypatch.setattr(memory_probe, "forward", forward)
    monkeypatch.setattr(memory_probe, "backward", lambda stage, output, context: ran.append("backward"))
    stage = SimpleNamespace(token_multiple=4, num_layers=3, has_gradient=True)
    memory_probe.run_other_size(stage)
    first = memory_probe.bytes_chunk(stage).num_tokens
    with_gradients = [(first + 4, 0, True), "backward", (first + 4, 3, True), "backward"]
    assert ran == [*with_gradients, (first, 0, False), (first + 4, 0, False)]
