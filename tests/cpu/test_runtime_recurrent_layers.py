"""Gated delta nets and Mamba-2 layers on slices and packed sequences compute what they compute on each sequence by itself.

Slices hand on their state, and its gradient comes back.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_epp.features.offload.activations import OwnedTensors
from megatron_epp.plan import Chunk
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import KVCacheError, SegmentTable, SliceView
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover, Stretch, Stretches
from megatron_epp.runtime.state_space import StateSpaceLayer
from tests.support.plan.small_plans import chunk
from tests.support.runtime import recurrent_nets
from tests.support.runtime.recurrent_nets import DELTA_WIDTH, HEADS, INNER, MIXED, WIDTHS, DeltaNet, StateSpaceNet

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

    monkeypatch.setattr(recurrent_nets, "rule", noted)
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


FIRST, SECOND = (
    ChunkContext(
        c, SegmentTable.build(chunk((7, start, start + 4)), 4), SlicedKVCache(), SliceView(7, start, start + 4, 8, 8, 2)
    )
    for c, start in enumerate((0, 4))
)
BETWEEN = (7, 4)
"""The cut between the two."""


def test_a_state_that_a_recomputing_layer_read_is_kept_by_autograd_for_its_slice() -> None:
    handover, x = Handover(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    state_bytes = 6 * 8

    def layer(x: Tensor, context: ChunkContext) -> Tensor:
        (before,) = handover.enter(0, context).get(BETWEEN, (torch.zeros_like(x[0]),))
        total = x.tanh().sum(0) + before
        return handover.leave(0, context, x * total, {BETWEEN: (total,)})

    with OwnedTensors((), lambda: handover.num_bytes) as saved:
        for number, context in enumerate((FIRST, SECOND)):
            with saved.of((0, number)):
                checkpoint(layer, x, context, use_reentrant=True)
                assert handover.num_bytes == (state_bytes if number == 0 else 0)  # the second has read it
        first, second = (sum(one.num_bytes for one in saved.pop((0, number)) if one.is_ours) for number in (0, 1))
        assert second - first == state_bytes


def test_an_evaluation_keeps_a_state_until_the_next_slice() -> None:
    handover, (first, second) = Handover(), (replace(context, forward_only=True) for context in (FIRST, SECOND))
    with torch.no_grad():
        output = handover.leave(0, first, torch.ones(3), {BETWEEN: (torch.ones(2),)})
        assert handover.num_bytes == 8
        (read,) = handover.enter(0, second)[BETWEEN]
        assert read.tolist() == [1.0, 1.0]
        handover.leave(0, second, output, {})
    handover.assert_empty()


def test_slices_out_of_order_are_refused() -> None:
    handover, states = Handover(), {BETWEEN: (torch.ones(2, requires_grad=True) * 1,)}
    with pytest.raises(KVCacheError, match="layer 0, sequence 7: the slice at token 4 finds no state of the one before it"):
        handover.enter(0, SECOND)
    output = handover.leave(0, FIRST, torch.ones(3, requires_grad=True) * 1, states)
    with pytest.raises(KVCacheError, match="the backward of the slice before token 4 comes before that of the slice behind it"):
        output.sum().backward()
    with pytest.raises(KVCacheError, match="were never taken"):
        handover.assert_empty()


def test_a_state_is_there_until_all_who_go_on_from_it_have_read_it_and_has_the_sum_of_their_gradients() -> None:
    handover, state = Handover(), torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    table, entering = SECOND.table, Stretches(SECOND.table, (Stretch(0, BETWEEN, None),), (BETWEEN,))
    leaving = Stretches(table, (Stretch(0, None, BETWEEN),), left={BETWEEN: 3})
    views = [SliceView(7, 0, 4, 4, 4, handed=handed) for handed in (leaving, *[entering] * 3)]
    contexts = [ChunkContext(c, table, SlicedKVCache(), view) for c, view in enumerate(views)]
    output = handover.leave(0, contexts[0], torch.ones(3, requires_grad=True) * 1, {BETWEEN: (state * 1,)})
    read = [handover.enter(0, context)[BETWEEN][0] for context in contexts[1:]]
    assert handover.num_bytes == 0
    with pytest.raises(KVCacheError, match="finds no state of the one before it"):
        handover.enter(0, contexts[1])
    for number, factor in enumerate((1.0, 2**-8, 2**-8)):  # in half precision the sum would be 1
        (read[number] * factor).sum().backward()
        assert handover.num_bytes == (8 if number else 4)
    output.sum().backward()
    assert state.grad is not None
    assert state.grad.tolist() == [1 + 2**-7] * 2
    handover.assert_empty()
