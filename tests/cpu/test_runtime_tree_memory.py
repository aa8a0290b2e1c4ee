"""Layers that hand on states keep, where sequences share prefixes, as many bytes as plans count."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_epp.cost.blocks import HANDOVER, BlockCosts
from megatron_epp.features.trees.readers import groups_of
from megatron_epp.features.trees.state_cuts import cut_chunks
from megatron_epp.features.trees.tree_work import work_of_tree
from megatron_epp.plan import Plan
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.planner.order import descending
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import ChunkContext, chunk_layouts
from tests.support.runtime.layer_kinds import KINDS
from tests.support.runtime.plain_stage import HIDDEN
from tests.support.runtime.synthetic_sequences import plan_of

LENGTHS = (20, 19, 23, 14, 20)
BORROWED = (NOTHING_BORROWED, Borrowed(0, 9), Borrowed(0, 14), Borrowed(1, 12), Borrowed(0, 17))
CHUNKS = [
    [(0, 0, 14)],
    [(0, 14, 20), (1, 9, 15), (4, 17, 20)],
    [(2, 14, 18), (2, 18, 23)],
    [(1, 15, 19), (3, 12, 14)],
]
"""Sequences that begin at the end of a chunk, in its middle, and where another segment of their own chunk is cut."""
PLAN = replace(plan_of(LENGTHS, CHUNKS), borrowed=BORROWED)
BACKWARDS = descending(groups_of(PLAN.chunks, PLAN))


def held(kind: str, plan: Plan, backwards: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes that autograd has saved, and of the cache, behind each forward and then each backward."""
    torch.manual_seed(0)
    layer, kv_cache, runs, found = KINDS[kind]().float(), SlicedKVCache(), list[Any](), list[tuple[int, int]]()
    with SavedTensors(layer.parameters(), lambda: kv_cache.num_bytes) as saved:
        for c, (table, view, _, begun, cache, *_) in enumerate(chunk_layouts(plan)):
            own = kv_cache if cache is SlicedKVCache else kv_cache.of_kind(cache)
            x = torch.randn(table.num_tokens, HIDDEN, requires_grad=True)
            runs.append(layer.in_chunk(0, x, ChunkContext(c, table, own, view, begun=begun)))
            found.append((saved.live_bytes, kv_cache.num_bytes))
        for c in backwards:
            runs[c].sum().backward()
            runs[c] = None
            found.append((saved.live_bytes, kv_cache.num_bytes))
    return found


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "window" in kind or "gated" in kind or "Mamba" in kind])
def test_states_take_what_is_counted_for_trees_by_the_bytes_of_slices(kind: str) -> None:
    (one, _), (two, _) = (held(kind, plan_of((tokens,), [[(0, 0, tokens)]]), [0])[0] for tokens in (8, 16))
    slices = held(kind, plan_of((24,), [[(0, start, start + 8)] for start in (0, 8, 16)]), [2, 1, 0])
    window = {"a window of 1, sinks": 1, "a window of 6, sinks": 6}.get(kind, 0)
    state = slices[0][1]
    tails = max(0, slices[1][0] - 2 * slices[0][0] - state)  # as `handover_probe` finds them
    block = BlockCosts(kind=HANDOVER, state_bytes=state, state_tokens=window, tail_bytes=tails)
    work, parts = work_of_tree(PLAN.chunks, PLAN, LENGTHS), [len(own) for own in cut_chunks(PLAN.chunks, BORROWED)[0]]
    kept = block.kept_bytes(work) + (two - one) // 8 * work.tokens + (2 * one - two) * np.array(parts)
    planned = np.cumsum([*kept, *-kept[BACKWARDS]])
    measured = [sum(each) for each in held(kind, PLAN, BACKWARDS)]
    assert all(ours <= theirs for ours, theirs in zip(measured, planned, strict=True))
    assert max(measured) >= 0.93 * max(planned)


@pytest.mark.parametrize(("kind", "per_token"), [("full attention", 64), ("latents", 32)])
def test_rows_and_sums_of_gradients_take_what_is_counted_for_trees(kind: str, per_token: int) -> None:
    work = work_of_tree(PLAN.chunks, PLAN, LENGTHS)
    opened, sums, closed = (
        column(lambda tokens: per_token * tokens)
        for column in (work.opened_cache, work.opened_gradients, work.closed_gradients)
    )
    planned = np.cumsum([*opened, *(sums - closed - opened)[BACKWARDS]])
    assert [cached for _, cached in held(kind, PLAN, BACKWARDS)] == planned.tolist()


def test_sums_of_gradients_are_seen_though_the_backward_that_makes_them_ends_them() -> None:
    """No tensor is saved or released between a node's sums and their end, where all of its readers are in its own chunk."""
    plan = replace(plan_of((8, 8), [[(0, 0, 8), (1, 4, 8)]]), borrowed=(NOTHING_BORROWED, Borrowed(0, 4)))
    sums = work_of_tree(plan.chunks, plan, plan.lengths).opened_gradients(lambda tokens: 64 * tokens)
    seen, layer, kv_cache = list[int](), KINDS["full attention"]().float(), SlicedKVCache()
    table, view, _, begun, cache, *_ = chunk_layouts(plan)[0]
    own = kv_cache if cache is SlicedKVCache else kv_cache.of_kind(cache)
    with SavedTensors(layer.parameters(), lambda: seen.append(kv_cache.num_bytes) or kv_cache.num_bytes):
        x = torch.randn(table.num_tokens, HIDDEN, requires_grad=True)
        run = layer.in_chunk(0, x, ChunkContext(0, table, own, view, begun=begun))
        rows = kv_cache.num_bytes
        run.sum().backward()
    assert max(seen) == rows + sums[0] > rows
