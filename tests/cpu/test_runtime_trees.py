"""Sequences that share prefixes: tokens in common run once, with the loss and gradients of every sequence on its own."""

import random
from collections import Counter
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.data.batch import ChunkArrays
from megatron_epp.features.cascade import common_rows
from megatron_epp.features.cascade.tree_layouts import tree_layouts
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.offload.host_rows import HostRows
from megatron_epp.features.trees.tree_cache import Node, Piece, TreeCache, TreeView
from megatron_epp.plan.chunk import path_of
from megatron_epp.plan.proof import check
from megatron_epp.runtime.attention.segments import KVCacheError
from megatron_epp.runtime.lowered import executor_of
from tests.support.plan.random_forests import forest, forest_plan
from tests.support.runtime.late_host import LATE_HOSTS
from tests.support.runtime.layer_kinds import KINDS, KindStage
from tests.support.runtime.plain_stage import build_part
from tests.support.runtime.runtime_plans import offloading_kv, planned

LAYERS = (2, 2)
HOSTS = {"at once": lambda: HostMemory(torch.device("cpu"), 1 << 30), **LATE_HOSTS}


class ForestBatch:
    """Inputs of chunks; the weight of a token that several sequences have is the sum of theirs."""

    def __init__(self, plan, texts, weights):
        self.plan, self.texts, self.weights = plan, texts, [[0.0] * len(own) for own in weights]
        for sequence, own in enumerate(weights):
            for holder, start, end in path_of(sequence, len(own), plan.borrowed):
                for token in range(start, end):
                    self.weights[holder][token] += own[token]

    def chunk(self, c):
        rows = [
            (self.texts[sequence][t], t, self.texts[sequence][t + 1], self.weights[sequence][t])
            for sequence, start, end in self.plan.chunks[c].segments
            for t in range(start, end)
        ]
        rows += [(0, 0, 0, 0.0)] * (self.plan.padded_tokens(c) - len(rows))
        *numbers, weights = zip(*rows, strict=True)
        tokens, positions, labels = map(torch.tensor, numbers)
        return ChunkArrays(tokens, labels, torch.tensor(weights, dtype=torch.float64), positions)


def each_alone(texts, weights, kind):
    """Loss and gradients of every sequence through all stages by dense computation."""
    parts, total = [build_part(LAYERS, stage, torch.float64, KINDS[kind]) for stage in range(2)], 0.0
    for text, own in zip(texts, weights, strict=True):
        arrays = SimpleNamespace(
            tokens=torch.tensor(text[:-1]),
            position_ids=torch.arange(len(text) - 1),
            labels=torch.tensor(text[1:]),
            loss_mask=torch.tensor(own, dtype=torch.float64),
        )
        x = None
        for part in parts:
            x = part(x, arrays, lambda number, x, part=part: part.layers[number].alone(number, x))
        x.backward()
        total += x.item()
    return total, [dict(part.named_parameters()) for part in parts]


def assert_equals_each_alone(plan, grown, rng, kind="full attention", host=None):
    """Run a plan of two stages on one rank, with KV offload of all that it lists to a host, and compare loss and gradients."""
    weights = [[rng.choice([0.0, rng.uniform(-1, 1)]) for _ in range(length)] for length in grown.lengths]
    batch = ForestBatch(plan, grown.texts, weights)
    stages = {stage: KindStage(build_part(LAYERS, stage, torch.float64, KINDS[kind]), batch) for stage in range(2)}
    for number, stage in stages.items() if host is not None else ():
        stage.kv_cache.offloaded = HostRows(host, plan.kv_offload_on(number), not plan.forward_only)
    executor_of(plan, 0, stages).run()
    loss, wanted = each_alone(grown.texts, weights, kind)
    assert stages[1].loss == pytest.approx(loss, abs=1e-11)
    assert all(stage.kv_cache.num_bytes == 0 for stage in stages.values())
    for stage, own in stages.items():
        for name, parameter in own.part.named_parameters() if not plan.forward_only else ():
            if parameter.grad is not None or wanted[stage][name].grad is not None:
                torch.testing.assert_close(parameter.grad, wanted[stage][name].grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), multiple=st.sampled_from([1, 4]), forward_only=st.booleans())
def test_any_forest_gives_the_loss_and_the_gradients_of_its_sequences(kind, seed, multiple, forward_only):
    rng = random.Random(seed)
    grown = forest(rng)
    plan = forest_plan(rng, grown, multiple, forward_only)
    assert check(plan) == []
    assert_equals_each_alone(plan, grown, rng, kind)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([{}, {"recompute": 1}, {"chunk_tokens": 6}, {"slices": 3}]),
    st.sampled_from([1, 4]),
    st.sampled_from([*KINDS]),
)
def test_what_the_planner_makes_of_a_forest_runs_with_the_loss_and_the_gradients_of_its_sequences(
    seed, options, multiple, kind
):
    rng = random.Random(seed)
    grown = forest(rng)
    plan = planned(grown.lengths, LAYERS, multiple, placement=(0, 0), borrowed=grown.borrowed, **options)
    assert plan.borrowed == grown.borrowed
    assert_equals_each_alone(plan, grown, rng, kind)


@pytest.mark.parametrize("kind", ["full attention", "latents"])
@pytest.mark.parametrize("when", HOSTS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([{}, {"recompute": 1}, {"slices": 3}, {"forward_only": True}]),
    st.sampled_from([1, 4]),
)
def test_prefixes_in_host_memory_give_the_same_whenever_copies_happen(when, kind, seed, options, multiple):
    rng = random.Random(seed)
    grown, host = forest(rng), HOSTS[when]()
    plan = planned(grown.lengths, LAYERS, multiple, placement=(0, 0), borrowed=grown.borrowed, **options)
    at_host = offloading_kv(plan)
    assert at_host.kv_offload
    with patch.multiple(common_rows, LEAST_ROWS=rng.choice([0, 10**6]), ROWS_PER_TOKEN=0):
        assert_equals_each_alone(at_host, grown, rng, kind, host)
    assert host.held_bytes == 0 < host.held_peak_bytes


def test_a_forest_runs_as_many_tokens_fewer_as_are_borrowed():
    grown = forest(random.Random(5))
    plan = forest_plan(random.Random(5), grown)
    own = sum(chunk.num_tokens for chunk in plan.chunks)
    assert own == sum(grown.lengths) - sum(tokens for _, tokens in grown.borrowed) < sum(grown.lengths)


def two_readers():
    """A prompt of three tokens in one chunk and two responses, each in a chunk of its own."""
    prompt = Node(0, 0, 3, 2)
    reads = (Piece(prompt, 3),)
    return TreeView.of((((), prompt),), 2), *(TreeView.of(((reads, Node(q, 3, 5, 0)),), 2) for q in (0, 1))


def rows(num_tokens):
    return [torch.ones(num_tokens, 1, 2) for _ in "kv"]


def test_a_prompt_is_refused_backward_ahead_of_a_response_and_a_forward_without_its_prompt():
    cache, (prompt, *responses) = TreeCache(), two_readers()
    with pytest.raises(KVCacheError, match="layer 7, sequence 0: the tokens from 0 to 3 are not in the cache"):
        cache.append(7, responses[1], rows(2))
    cache = TreeCache()
    cache.append(7, prompt, rows(3))
    for response in responses:
        assert [len(x) for x in cache.append(7, response, rows(2))] == [5, 5]
    cache.fetch(7, responses[1], rows(0))
    cache.take_gradient(7, responses[1], rows(5))
    with pytest.raises(KVCacheError, match="backward of tokens 0 to 3 is ahead of that of 1 readers"):
        cache.fetch(7, prompt, rows(0))
    with pytest.raises(KVCacheError, match=r"caches of \(layer, sequence\) \[\(7, 0\)\] were never freed"):
        cache.assert_empty()
    cache.take_gradient(7, responses[0], rows(5))
    assert [x.sum() for x in cache.take_gradient(7, prompt, rows(3))] == [3 * 3 * 2] * 2  # its own, and those of two
    cache.assert_empty()


def test_two_layers_with_one_number_are_told_and_a_recomputed_forward_is_not():
    cache, (prompt, *_) = TreeCache(), two_readers()
    with cache.running(prompt, False):
        cache.append(0, prompt, rows(3))
        with pytest.raises(KVCacheError, match="layer 0, sequence 0: attention runs twice in the forward"):
            cache.append(0, prompt, rows(3))
    with cache.running(prompt, True):
        cache.append(0, prompt, rows(3))


def test_a_segment_reads_parts_of_those_that_hold_its_prefix():
    plan = forest_plan(random.Random(5), forest(random.Random(5)))
    for layout, chunk in zip(tree_layouts(plan), plan.chunks, strict=True):
        for (pieces, node), segment in zip(layout.view.parts, chunk.segments, strict=True):
            assert node[:3] == segment
            assert sum(piece.num_rows for piece in pieces) == segment.start
        assert layout.table.key_starts[-1] == layout.view.num_keys


@given(st.integers(0, 10**6))
def test_a_state_is_left_at_each_cut_for_the_chunks_that_begin_there(seed):
    plan = forest_plan(random.Random(seed), forest(random.Random(seed)), multiple=4)
    layouts, readers = tree_layouts(plan), Counter()
    for layout in layouts:
        own = layout.view.handed
        readers.update(own.entered)
        assert own.table.num_tokens == layout.table.num_tokens
        behind = {part.behind for part in own.parts if part.behind is not None}
        for number, before, cut in own.parts:
            sequence, start, end = own.table.segments[number]
            assert (before is not None) == (start > 0)
            assert cut in (None, (sequence, end))
            if before is not None:
                assert before == (path_of(sequence, start, plan.borrowed)[-1].sequence, start)
                assert (before in behind) != (before in own.entered)
        whole = Counter(s.sequence for s in own.table.segments for _ in range(s.num_tokens))
        assert whole == Counter(s.sequence for s in layout.table.segments for _ in range(s.num_tokens))
    assert readers == Counter({cut: count for layout in layouts for cut, count in layout.view.handed.left.items()})
