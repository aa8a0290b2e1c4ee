"""A gated delta net on slices and packed sequences computes what it computes on each sequence by itself."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
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
from megatron_epp.runtime.gated_delta import DeltaLayer
from tests.support.runtime.mixed_slices import CUTS, LENGTHS, check_slices, context_of, tokens_of

KEY_HEADS, VALUE_HEADS, WIDTH, FILTER = 2, 4, 3, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH


def rule(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Apply the gated delta rule token by token, as flash-linear-attention's kernel takes its arguments."""
    g, beta, offsets = options["g"], options["beta"], options.get("cu_seqlens")
    ends = [0, q.shape[1]] if offsets is None else offsets.tolist()
    outs, state = [], options["initial_state"]
    assert state is None or len(ends) == 2
    for start, end in pairwise(ends):
        memory = q.new_zeros(VALUE_HEADS, WIDTH, WIDTH) if state is None else state[0]
        for t in range(start, end):
            memory = memory * g[0, t].exp()[:, None, None]
            written = beta[0, t][:, None] * (v[0, t] - torch.einsum("hkv,hk->hv", memory, k[0, t]))
            memory = memory + torch.einsum("hk,hv->hkv", k[0, t], written)
            outs.append(torch.einsum("hkv,hk->hv", memory, q[0, t]) / WIDTH**0.5)
    return torch.stack(outs)[None], memory[None] if options["output_final_state"] else None


def convolve(rows: Tensor, filters: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Convolve packed sequences, as flash-linear-attention's kernel does."""
    ahead = filters.shape[-1] - 1
    parts = [functional.pad(rows[0, start:end].t()[None], (ahead, 0)) for start, end in pairwise(offsets.tolist())]
    out = [functional.conv1d(part, filters[:, None], bias, groups=len(filters))[0].t() for part in parts]
    return functional.silu(torch.cat(out))[None]


class Net(torch.nn.Module):
    """Projections around two layers that mix tokens."""

    def __init__(self, packs: bool) -> None:
        super().__init__()
        make = partial(torch.randn, dtype=torch.float64)
        widths = KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH, VALUE_HEADS, VALUE_HEADS
        self.widths, self.packs = widths, packs
        for number in range(2):
            self.register_parameter(f"into_{number}", torch.nn.Parameter(0.5 * make(VALUE_HEADS * WIDTH, sum(widths))))
            self.register_parameter(f"filters_{number}", torch.nn.Parameter(0.5 * make(CHANNELS, 1, FILTER)))
            self.register_parameter(f"decay_{number}", torch.nn.Parameter(0.3 * make(VALUE_HEADS)))

    def forward(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        into, filters, decay = (getattr(self, f"{name}_{number}") for name in ("into", "filters", "decay"))
        q, k, v, strength, gate = (x @ into).split(self.widths, dim=1)
        layer = DeltaLayer(
            number=number,
            filters=filters,
            bias=None,
            decay=decay,
            step=torch.zeros(VALUE_HEADS),
            rule=rule,
            normalise=lambda heads: functional.normalize(heads, dim=-1),
            convolve=convolve if self.packs else None,
            activation=functional.silu,
        )
        q, k, v = (part.unflatten(1, (-1, WIDTH)) for part in (q, k, v))
        return x + layer(q, (k, v, strength[..., None], gate[..., None]), context).flatten(1)


def run(net: Net, chunk: Chunk, x: Tensor, kv_cache: SlicedKVCache, recomputed: int) -> Tensor:
    context = context_of(chunk, kv_cache)
    for number in range(2):
        x = checkpoint(net, number, x, context, use_reentrant=True) if number < recomputed else net(number, x, context)
    return x


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize("packs", [True, False], ids=("kernels of packed sequences", "sequence by sequence"))
def test_slices_and_packed_sequences_have_the_gradients_of_each_sequence(packs: bool, recomputed: int) -> None:
    torch.manual_seed(3)
    net = Net(packs)

    def whole(number: int, x: Tensor) -> Tensor:
        chunk = Chunk((Segment(number, 0, len(x)),))
        context = ChunkContext(0, SegmentTable.build(chunk, len(x)), SlicedKVCache())
        return net(1, net(0, x, context), context)

    weights = dict(net.named_parameters())
    check_slices(VALUE_HEADS * WIDTH, weights, whole, lambda *chunk: run(net, *chunk, recomputed=recomputed), 1e-12)


def test_whole_sequences_are_packed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(*heads: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options["cu_seqlens"])
        return heads[2], None

    monkeypatch.setitem(globals(), "rule", noted)
    chunk = Chunk((Segment(1, 0, 6), Segment(3, 0, 9)))
    sequences = {q: torch.randn(n, VALUE_HEADS * WIDTH, dtype=torch.float64) for q, n in LENGTHS.items()}
    Net(packs=True)(0, tokens_of(chunk, sequences), context_of(chunk, SlicedKVCache()))
    assert [offsets.tolist() for offsets in calls] == [[0, 6, 15, 17]]


def test_an_evaluation_leaves_nothing() -> None:
    net, kv_cache = Net(packs=True), SlicedKVCache()
    sequences = {q: torch.randn(n, VALUE_HEADS * WIDTH, dtype=torch.float64) for q, n in LENGTHS.items()}
    with torch.no_grad():
        for ends in CUTS:
            chunk = Chunk((Segment(0, *ends),))
            net(0, tokens_of(chunk, sequences), context_of(chunk, kv_cache, forward_only=True))
    kv_cache.assert_empty()
