"""Gated delta nets and Mamba-2 layers on slices and packed sequences compute what they compute on each sequence by itself.

Slices hand on their state, and its gradient comes back.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_epp.features.offload.activations import OwnedTensors
from megatron_epp.plan import Chunk
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import KVCacheError, SegmentTable, SliceView
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.gated_delta import DeltaLayer
from megatron_epp.runtime.handover import Handover
from megatron_epp.runtime.state_space import StateSpaceLayer
from tests.support.plan.small_plans import chunk

LENGTHS = {0: 23, 1: 6, 2: 1, 3: 9, 4: 12, 5: 7}
"""Tokens of sequences by number."""
PADDING = 2
CHUNKS = [
    chunk((0, 0, 8)),
    chunk((0, 8, 9), (1, 0, 6)),
    chunk((0, 9, 11)),
    chunk((0, 11, 23), (2, 0, 1), (3, 0, 9), (4, 0, 5)),
    chunk((4, 5, 12), (5, 0, 2)),
    chunk((5, 2, 7)),
]
"""Slices, behind them whole sequences, and perhaps the beginning of another one that is cut."""


def context_of(own: Chunk, kv_cache: SlicedKVCache, *, forward_only: bool = False) -> ChunkContext:
    lengths = tuple(LENGTHS.values())
    view, begun = (
        None if part is None else SliceView(*part, lengths[part.sequence], 2 * lengths[part.sequence], len(CHUNKS))
        for part in (own.slice_of(lengths), own.begun_of(lengths))
    )
    if view is not None and view.is_last_slice:
        view = replace(view, capacity=view.start + own.num_tokens + PADDING)
    table = SegmentTable.build(own, own.num_tokens + PADDING)
    return ChunkContext(0, table, kv_cache, view, forward_only=forward_only, begun=begun)


def tokens_of(own: Chunk, sequences: dict[int, Tensor]) -> Tensor:
    parts = [sequences[number][start:end] for number, start, end in own.segments]
    return torch.cat([*parts, torch.ones_like(sequences[0][:PADDING])])


def check_slices(net: Any, whole: Callable[[int, Tensor], Tensor], run: Callable[..., Tensor]) -> None:
    """Compare outputs and gradients of a network on slices and packed sequences with those on each sequence by itself.
    Args:
        whole: the network on a sequence, by its number.
        run: the network on a chunk, given with its tokens and the cache.
    """
    inputs = {q: torch.randn(n, net.width, dtype=torch.float64, requires_grad=True) for q, n in LENGTHS.items()}
    factors = {q: torch.randn_like(x) for q, x in inputs.items()}
    wanted = {q: whole(q, x) for q, x in inputs.items()}
    for q, out in wanted.items():
        (out * factors[q]).sum().backward()
    tensors = [*inputs.values(), *net.parameters()]
    expected = gradients_of(tensors)
    kv_cache, outputs = SlicedKVCache(), []
    for mixed in CHUNKS:
        outputs.append(run(mixed, tokens_of(mixed, inputs), kv_cache))
        sizes = [*(part.num_tokens for part in mixed.segments), PADDING]
        for (q, start, end), out in zip(mixed.segments, outputs[-1].split(sizes)[:-1], strict=True):
            torch.testing.assert_close(out, wanted[q][start:end], rtol=1e-12, atol=1e-12)
    for mixed in reversed(CHUNKS):
        (outputs.pop()[:-PADDING] * tokens_of(mixed, factors)[:-PADDING]).sum().backward()
    kv_cache.assert_empty()
    for own, other in zip(gradients_of(tensors), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def gradients_of(tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients, which all tensors must have, and leave none."""
    copies = [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]
    assert len(copies) == len(tensors)
    for tensor in tensors:
        tensor.grad = None
    return copies


FILTER = 4
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 4, 3
DELTA_WIDTH, DELTA_CHANNELS = VALUE_HEADS * WIDTH, (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
HEADS, CHANNELS, STATE = 4, 3, 5
INNER, MIXED = HEADS * CHANNELS, HEADS * CHANNELS + 2 * STATE
WIDTHS = {"gate_width": INNER, "mixed_width": MIXED, "filter_width": FILTER}


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
    ahead = filters.shape[-1] - 1
    parts = [functional.pad(rows[0, start:end].t()[None], (ahead, 0)) for start, end in pairwise(offsets.tolist())]
    out = [functional.conv1d(part, filters[:, None], bias, groups=len(filters))[0].t() for part in parts]
    return functional.silu(torch.cat(out))[None]


class DeltaNet(torch.nn.Module):
    width = DELTA_WIDTH

    def __init__(self, packs: bool) -> None:
        super().__init__()
        make = partial(torch.randn, dtype=torch.float64)
        widths = KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH, VALUE_HEADS, VALUE_HEADS
        self.widths, self.packs = widths, packs
        self.weights = torch.nn.ParameterList()
        for _ in range(2):
            self.weights += 0.5 * make(DELTA_WIDTH, sum(widths)), 0.5 * make(DELTA_CHANNELS, 1, FILTER), 0.3 * make(VALUE_HEADS)

    def forward(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        into, filters, decay = self.weights[3 * number : 3 * number + 3]
        q, k, v, strength, gate = (x @ into).split(self.widths, dim=1)
        weights = {"number": number, "filters": filters, "bias": None, "decay": decay, "step": torch.zeros(VALUE_HEADS)}
        kernels = {"rule": rule, "convolve": convolve if self.packs else None, "activation": functional.silu}
        layer = DeltaLayer(**weights, **kernels, normalise=lambda heads: functional.normalize(heads, dim=-1))
        q, k, v = (part.unflatten(1, (-1, WIDTH)) for part in (q, k, v))
        return x + layer(q, (k, v, strength[..., None], gate[..., None]), context).flatten(1)


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


class StateSpaceNet(torch.nn.Module):
    width = INNER

    def __init__(self) -> None:
        super().__init__()
        make = partial(torch.randn, dtype=torch.float64)
        self.weights = torch.nn.ParameterList()
        for _ in range(2):
            self.weights += 0.2 * make(INNER, INNER + MIXED + HEADS), 0.5 * make(MIXED, FILTER), 0.3 * make(MIXED)
            self.weights += make(HEADS), -0.1 - make(HEADS).square()

    def forward(self, number: int, x: Tensor, context: ChunkContext) -> Tensor:
        into, *weights = self.weights[5 * number : 5 * number + 5]
        named = dict(zip(("filters", "bias", "step", "decay"), weights, strict=True))
        return x + StateSpaceLayer(number=number, scan=partial(scan, **named), **WIDTHS)(x @ into, context)


NETS: dict[str, Callable[[], Any]] = {
    "gated delta, kernels of packed sequences": lambda: DeltaNet(packs=True),
    "gated delta, sequence by sequence": lambda: DeltaNet(packs=False),
    "Mamba-2": StateSpaceNet,
}


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize("kind", NETS)
def test_slices_and_packed_sequences_have_the_gradients_of_each_sequence(kind: str, recomputed: int) -> None:
    torch.manual_seed(3)
    net = NETS[kind]()

    def whole(number: int, x: Tensor) -> Tensor:
        context = ChunkContext(0, SegmentTable.build(chunk((number, 0, len(x))), len(x)), SlicedKVCache())
        return net(1, net(0, x, context), context)

    def run(own: Chunk, x: Tensor, kv_cache: SlicedKVCache) -> Tensor:
        context = context_of(own, kv_cache)
        for number in range(2):
            x = checkpoint(net, number, x, context, use_reentrant=True) if number < recomputed else net(number, x, context)
        return x

    check_slices(net, whole, run)


@pytest.mark.parametrize("kind", NETS)
def test_an_evaluation_leaves_nothing(kind: str) -> None:
    net, kv_cache = NETS[kind](), SlicedKVCache()
    sequences = {q: torch.randn(n, net.width, dtype=torch.float64) for q, n in LENGTHS.items()}
    with torch.no_grad():
        for mixed in CHUNKS:
            net(0, tokens_of(mixed, sequences), context_of(mixed, kv_cache, forward_only=True))
    kv_cache.assert_empty()


def test_whole_sequences_are_packed_in_one_call_of_the_delta_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(*heads: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append(options["cu_seqlens"])
        return heads[2], None

    monkeypatch.setitem(globals(), "rule", noted)
    packed = chunk((1, 0, 6), (3, 0, 9))
    sequences = {q: torch.randn(n, DELTA_WIDTH, dtype=torch.float64) for q, n in LENGTHS.items()}
    DeltaNet(packs=True)(0, tokens_of(packed, sequences), context_of(packed, SlicedKVCache()))
    assert [offsets.tolist() for offsets in calls] == [[0, 6, 15, 17]]


def test_whole_sequences_are_packed_in_one_scan_and_a_slice_runs_apart_from_its_company() -> None:
    calls: list[dict[str, Any]] = []

    def noted(rows: Tensor, **options: Any) -> Any:
        calls.append({name: getattr(value, "tolist", lambda value=value: value)() for name, value in options.items()})
        return (rows[..., :INNER], torch.zeros(1)) if options.get("return_final_states") else rows[..., :INNER]

    layer = StateSpaceLayer(number=0, scan=noted, **WIDTHS)
    sequences = {q: torch.randn(n, INNER + MIXED + HEADS) for q, n in LENGTHS.items()}
    for packed in (chunk((1, 0, 6), (3, 0, 9)), chunk((0, 0, 8), (2, 0, 1))):
        layer(tokens_of(packed, sequences), context_of(packed, SlicedKVCache()))
    assert calls == [
        {"seq_idx": [[0] * 6 + [1] * 9 + [2] * 2]},
        {"initial_states": None, "return_final_states": True},
        {"seq_idx": [[0] + [1] * 2]},
    ]


FIRST, SECOND = (SliceView(7, start, start + 4, 8, 8, 2) for start in (0, 4))


def test_a_state_that_a_recomputing_layer_read_is_kept_by_autograd_for_its_slice() -> None:
    handover, x = Handover(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    state_bytes = 6 * 8

    def layer(x: Tensor, view: SliceView) -> Tensor:
        (before,) = handover.enter(0, view) or (torch.zeros_like(x[0]),)
        total = x.tanh().sum(0) + before
        return handover.leave(0, view, x * total, (total,))

    with OwnedTensors((), lambda: handover.num_bytes) as saved:
        for number, view in enumerate((FIRST, SECOND)):
            with saved.of((0, number)):
                checkpoint(layer, x, view, use_reentrant=True)
                assert handover.num_bytes == (state_bytes if number == 0 else 0)  # the second has read it
        first, second = (sum(one.num_bytes for one in saved.pop((0, number)) if one.is_ours) for number in (0, 1))
        assert second - first == state_bytes


def test_an_evaluation_keeps_a_state_until_the_next_slice() -> None:
    handover, state = Handover(), (torch.ones(2),)
    with torch.no_grad():
        output = handover.leave(0, FIRST, torch.ones(3), state, forward_only=True)
        assert handover.num_bytes == 8
        (read,) = handover.enter(0, SECOND, forward_only=True) or ()
        assert read.tolist() == [1.0, 1.0]
        handover.leave(0, SECOND, output, state, forward_only=True)
    handover.assert_empty()


def test_slices_out_of_order_are_refused() -> None:
    handover, state = Handover(), (torch.ones(2, requires_grad=True) * 1,)
    with pytest.raises(KVCacheError, match="layer 0, sequence 7: the slice at token 4 finds no state of the one before it"):
        handover.enter(0, SECOND)
    output = handover.leave(0, FIRST, torch.ones(3, requires_grad=True) * 1, state)
    with pytest.raises(KVCacheError, match="the backward of the slice before token 4 comes before that of the slice behind it"):
        output.sum().backward()
    with pytest.raises(KVCacheError, match="were never taken"):
        handover.assert_empty()
