"""Slices of a recurrence hand on their state, and its gradient comes back: as if the sequence had run whole."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_epp.runtime.attention.segments import KVCacheError, SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.handover import Handover

WIDTH, TAIL, NUM_LAYERS = 6, 3, 2
STATE_BYTES = (TAIL + 1) * WIDTH * 8
CUTS = {"even": (8, 8, 8), "uneven": (5, 1, 1, 17), "whole": (24,)}


class Layer(torch.nn.Module):
    """A causal convolution over the last rows, and a decaying state behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Linear((TAIL + 1) * WIDTH, WIDTH, dtype=torch.float64)
        self.decay = torch.nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def scan(self, x: Tensor, tail: Tensor, state: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        rows = torch.cat([tail, x])
        mixed = torch.tanh(self.mix(torch.cat([rows[at : at + len(x)] for at in range(TAIL + 1)], dim=1)))
        states = []
        for row in mixed:
            state = state * self.decay.sigmoid() + row
            states.append(state)
        return x + torch.stack(states), (rows[len(rows) - TAIL :], state)

    def forward(self, x: Tensor, number: int, view: SliceView | None = None, handover: Handover | None = None) -> Tensor:
        nothing = x.new_zeros(TAIL, WIDTH), x.new_zeros(WIDTH)
        if view is None or handover is None:
            return self.scan(x, *nothing)[0]
        output, state = self.scan(x, *(handover.enter(number, view) or nothing))
        return handover.leave(number, view, output, state)


@pytest.fixture
def layers() -> torch.nn.ModuleList:
    torch.manual_seed(1)
    return torch.nn.ModuleList(Layer() for _ in range(NUM_LAYERS))


def gradients(layers: torch.nn.ModuleList, x: Tensor) -> list[Tensor]:
    """Return copies of all gradients, and zero them."""
    assert x.grad is not None
    copies = [x.grad, *(parameter.grad for parameter in layers.parameters())]
    layers.zero_grad()
    x.grad = None
    return [copy.clone() for copy in copies if copy is not None]


def views(cuts: tuple[int, ...]) -> list[SliceView]:
    length = sum(cuts)
    return [SliceView(7, start, end, length, length, len(cuts)) for start, end in pairwise(accumulate(cuts, initial=0))]


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize("name", CUTS)
def test_slices_have_the_gradients_of_a_whole_sequence(layers: torch.nn.ModuleList, name: str, recomputed: int) -> None:
    cuts = CUTS[name]
    x, weights = torch.randn(2, sum(cuts), WIDTH, dtype=torch.float64)
    x.requires_grad_()
    hidden = x
    for number, layer in enumerate(layers):
        hidden = layer(hidden, number)
    (hidden * weights).sum().backward()
    whole = gradients(layers, x)

    handover, outputs, meter = Handover(), [], SavedTensors(layers.parameters(), lambda: handover.num_bytes)
    with meter:
        for part, view in zip(x.split(cuts), views(cuts), strict=True):
            for number, layer in enumerate(layers):
                call = layer, part, number, view, handover
                part = checkpoint(*call, use_reentrant=True) if number < recomputed else layer(*call[1:])
            outputs.append(part)
        for output, weight in reversed([*zip(outputs, weights.split(cuts), strict=True)]):
            (output * weight).sum().backward(retain_graph=False)
            outputs.pop()
    handover.assert_empty()
    assert handover.num_bytes == 0
    for own, wanted in zip(gradients(layers, x), whole, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


def test_what_a_recomputing_layer_read_is_kept_by_autograd_for_its_slice(layers: torch.nn.ModuleList) -> None:
    first, second = views((4, 4))
    handover, x = Handover(), torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    with SavedTensors(layers.parameters(), lambda: handover.num_bytes) as saved:
        for chunk, view in enumerate((first, second)):
            with saved.of((0, chunk)):
                checkpoint(layers[0], x, 0, view, handover, use_reentrant=True)
                assert handover.num_bytes == (STATE_BYTES if chunk == 0 else 0)  # the second has read it
        first_bytes, second_bytes = (
            sum(storage.num_bytes for storage in saved.pop((0, chunk)) if storage.is_ours) for chunk in (0, 1)
        )
        assert second_bytes - first_bytes == STATE_BYTES


def test_an_evaluation_keeps_nothing(layers: torch.nn.ModuleList) -> None:
    first, second = views((4, 4))
    handover, state = Handover(), (torch.ones(2),)
    with torch.no_grad():
        output = handover.leave(0, first, torch.ones(3), state, forward_only=True)
        assert handover.num_bytes == 8
        assert handover.enter(0, second, forward_only=True)[0].tolist() == [1.0, 1.0]
        handover.leave(0, second, output, state, forward_only=True)
    handover.assert_empty()


def test_slices_out_of_order_are_refused() -> None:
    first, second = views((4, 4))
    handover, state = Handover(), (torch.ones(2, requires_grad=True) * 1,)
    with pytest.raises(KVCacheError, match="layer 0, sequence 7: the slice at token 4 finds no state of the one before it"):
        handover.enter(0, second)
    output = handover.leave(0, first, torch.ones(3, requires_grad=True) * 1, state)
    with pytest.raises(KVCacheError, match="the backward of the slice before token 4 comes before that of the slice behind it"):
        output.sum().backward()
    with pytest.raises(KVCacheError, match="were never taken"):
        handover.assert_empty()
