"""A Mamba-2 layer on slices and packed sequences computes what it computes on each sequence by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.state_space import StateSpaceLayer
from tests.support.runtime.mixed_slices import CUTS, LENGTHS, check_slices, context_of, tokens_of

HEADS, CHANNELS, STATE, FILTER = 4, 3, 5, 4
INNER, MIXED = HEADS * CHANNELS, HEADS * CHANNELS + 2 * STATE


def scan(
    rows: Tensor,
    filters: Tensor,
    bias: Tensor,
    step: Tensor,
    decay: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
) -> Any:
    """Convolve, recur token by token and gate, as mamba-ssm's kernel does: the convolution always begins with zeros."""
    assert rows.shape[0] == 1
    assert seq_idx is None or initial_states is None
    numbers = torch.zeros(rows.shape[1], dtype=torch.int32) if seq_idx is None else seq_idx[0]
    outs, state = [], rows.new_zeros(HEADS, CHANNELS, STATE)
    for number in range(int(numbers.max()) + 1):
        gate, mixed, steps = rows[0][numbers == number].split([INNER, MIXED, HEADS], dim=1)
        padded = functional.pad(mixed.t()[None], (FILTER - 1, 0))
        mixed = functional.silu(functional.conv1d(padded, filters[:, None], bias, groups=MIXED))[0].t()
        x, into, out_of = mixed.split([INNER, STATE, STATE], dim=1)
        x, dt = x.unflatten(1, (HEADS, CHANNELS)), functional.softplus(steps + step)
        state = torch.zeros_like(state) if initial_states is None else initial_states[0]
        for t in range(len(x)):
            state = state * (dt[t] * decay).exp()[:, None, None]
            state = state + torch.einsum("h,hp,n->hpn", dt[t], x[t], into[t])
            outs.append((state @ out_of[t] + x[t]).flatten() * functional.silu(gate[t]))
    out = torch.stack(outs)[None]
    return (out, state[None]) if return_final_states else out


class Net(torch.nn.Module):
    """Projections around two layers that mix tokens."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(torch.randn, dtype=torch.float64)
        for number in range(2):
            self.register_parameter(f"into_{number}", torch.nn.Parameter(0.2 * make(INNER, INNER + MIXED + HEADS)))
            self.register_parameter(f"filters_{number}", torch.nn.Parameter(0.5 * make(MIXED, FILTER)))
            self.register_parameter(f"bias_{number}", torch.nn.Parameter(0.3 * make(MIXED)))
            self.register_parameter(f"step_{number}", torch.nn.Parameter(make(HEADS)))
            self.register_parameter(f"decay_{number}", torch.nn.Parameter(-0.1 - make(HEADS).square()))

    def forward(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        into, *weights = (getattr(self, f"{name}_{number}") for name in ("into", "filters", "bias", "step", "decay"))
        named = dict(zip(("filters", "bias", "step", "decay"), weights, strict=True))
        layer = StateSpaceLayer(
            number=number, scan=partial(scan, **named), gate_width=INNER, mixed_width=MIXED, filter_width=FILTER
        )
        return x + layer(x @ into, context)


def run(net: Net, chunk: Chunk, x: Tensor, kv_cache: SlicedKVCache, recomputed: int) -> Tensor:
    context = context_of(chunk, kv_cache)
    for number in range(2):
        x = checkpoint(net, number, x, context, use_reentrant=True) if number < recomputed else net(number, x, context)
    return x


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_slices_and_packed_sequences_have_the_gradients_of_each_sequence(recomputed: int) -> None:
    torch.manual_seed(3)
    net = Net()

    def whole(number: int, x: Tensor) -> Tensor:
        chunk = Chunk((Segment(number, 0, len(x)),))
        context = ChunkContext(0, SegmentTable.build(chunk, len(x)), SlicedKVCache())
        return net(1, net(0, x, context), context)

    weights = dict(net.named_parameters())
    check_slices(INNER, weights, whole, lambda *chunk: run(net, *chunk, recomputed=recomputed), 1e-12)


def test_whole_sequences_are_packed_in_one_call_and_a_slice_runs_apart_from_its_company() -> None:
    calls: list[dict[str, Any]] = []

    def noted(rows: Tensor, **options: Any) -> Any:
        calls.append({name: getattr(value, "tolist", lambda value=value: value)() for name, value in options.items()})
        return (rows[..., :INNER], torch.zeros(1)) if options.get("return_final_states") else rows[..., :INNER]

    layer = StateSpaceLayer(number=0, scan=noted, gate_width=INNER, mixed_width=MIXED, filter_width=FILTER)
    sequences = {q: torch.randn(n, INNER + MIXED + HEADS) for q, n in LENGTHS.items()}
    for segments in ((Segment(1, 0, 6), Segment(3, 0, 9)), (Segment(0, 0, 8), Segment(2, 0, 1))):
        chunk = Chunk(segments)
        layer(tokens_of(chunk, sequences), context_of(chunk, SlicedKVCache()))
    assert calls == [
        {"seq_idx": [[0] * 6 + [1] * 9 + [2] * 2]},
        {"initial_states": None, "return_final_states": True},
        {"seq_idx": [[0] + [1] * 2]},
    ]


def test_an_evaluation_leaves_nothing() -> None:
    net, kv_cache = Net(), SlicedKVCache()
    sequences = {q: torch.randn(n, INNER, dtype=torch.float64) for q, n in LENGTHS.items()}
    with torch.no_grad():
        for ends in CUTS:
            chunk = Chunk((Segment(0, *ends),))
            net(0, tokens_of(chunk, sequences), context_of(chunk, kv_cache, forward_only=True))
    kv_cache.assert_empty()
