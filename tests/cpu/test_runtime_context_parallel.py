"""Ranks that share a chunk's tokens attend as one rank would, each with its own heads and its own part of the cache."""

import functools

import pytest
import torch
import torch.distributed as dist

from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.offload.host_store import HostStore
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.rank_processes import Ranks
from tests.support.runtime.relay_chunks import CHANNELS, ChunkedLayer, slices
from tests.support.seeds import spread_by_default


def differences(rank, links, lengths, chunks, token_multiple, mode, offloads=False, **options):
    """Run a layer's chunks with their tokens shared by the ranks; the largest difference from whole sequences on one rank.

    `offloads`: caches of sliced sequences are in host memory between uses. `options`: as `ChunkedLayer` takes them.
    """
    layer = ChunkedLayer(lengths, chunks, token_multiple, layers=2, group=links.activations, **options)
    begun = {context.begun.sequence for context in layer.contexts if context.begun is not None}  # these stay on the device
    if offloads:
        layer.kv_cache.offloaded = HostStore(HostMemory(torch.device("cpu"), 1 << 30), set(range(len(lengths))) - begun)
    num_whole = 0 if mode == "kept" else layer.layers
    whole = layer.whole()
    worst = []
    for c, chunk in enumerate(layer.plan.chunks):
        with layer.kv_cache.running(layer.contexts[c].view, False):
            out = layer.forward(c, mode).detach()
        parts = [torch.empty_like(out) for _ in links.ranks]
        dist.all_gather(parts, out, group=links.activations)
        rows = torch.cat([whole[s.sequence][0][s.start : s.end] for s in chunk.segments])
        worst.append(relative_difference(torch.cat(parts)[: len(rows)], rows))
    for c in reversed(range(len(layer.plan.chunks))):
        with layer.kv_cache.running(layer.contexts[c].view, True, num_whole):
            layer.backward(c)
    layer.kv_cache.assert_empty()
    for expected, grads in zip(whole, layer.chunked(), strict=True):
        for wanted, grad in zip(expected[1:], grads, strict=True):
            dist.all_reduce(grad, group=links.activations)
            worst.append(relative_difference(grad, wanted))
    for weight, wanted in ((layer.expansion, layer.expansion_gradient), (layer.sinks, layer.sinks_gradient)):
        if weight is not None:
            dist.all_reduce(weight.grad, group=links.activations)
            worst.append(relative_difference(weight.grad, wanted))
    return max(worst)


def cache_bytes(rank, links, kv_heads, query_heads):
    """Key heads in the cache of one rank after the first slice, where ranks share the heads."""
    sizes = []
    for group in (None, links.activations):
        layer = ChunkedLayer(
            (16,), [[(0, 0, 8)], [(0, 8, 16)]], len(links.ranks), group=group, kv_heads=kv_heads, query_heads=query_heads
        )
        layer.forward(0)
        sizes.append(layer.kv_cache.num_bytes)
    assert sizes[0] == 2 * 16 * kv_heads * CHANNELS * 8
    return sizes[1] // (2 * 16 * CHANNELS * 8)


CASES = {
    "packed": ((5, 1, 8), [[(0, 0, 5), (1, 0, 1), (2, 0, 8)]]),
    "split": ((23,), slices(0, 0, 9, 16, 22, 23)),
    "hybrid tail": ((13, 4, 1), [[(0, 0, 7)], [(0, 7, 13), (1, 0, 4), (2, 0, 1)]]),
    "hybrid middle": ((13, 4, 2), [[(0, 0, 5), (1, 0, 4)], [(0, 5, 9), (2, 0, 2)], [(0, 9, 13)]]),
    "begun behind an end": ((13, 12, 3), [[(0, 0, 8)], [(0, 8, 13), (2, 0, 3), (1, 0, 4)], [(1, 4, 12)]]),
    "a rank with nothing but padding": ((1,), [[(0, 0, 1)]]),
}


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request, tmp_path_factory):
    with Ranks(request.param, tmp_path_factory.mktemp("ulysses")) as started:
        yield started, request.param


@spread_by_default(2, case=CASES, kv_heads=(4, 2, 1), mode=("kept", "recomputed"))
def test_chunks_shared_by_ranks_give_outputs_and_gradients_of_whole_sequences(ranks, case, kv_heads, mode):
    started, size = ranks
    assert max(started.run(functools.partial(differences, kv_heads=kv_heads), *CASES[case], size, mode)) < 1e-12


UNEVEN = {
    "24 heads at TP 4": {"query_heads": 6, "kv_heads": 1},
    "28 heads at TP 4, window": {"query_heads": 7, "kv_heads": 1, "window": 3, "has_sinks": True},
    "40 heads at TP 4, sinks": {"query_heads": 10, "kv_heads": 2, "has_sinks": True},
    "a key head each": {"query_heads": 5, "kv_heads": 5, "has_sinks": True},
    "fewer heads than ranks": {"query_heads": 3, "kv_heads": 1},
    "latents": {"query_heads": 6, "kv_heads": 1, "widths": (6, 3), "unrotated": 5},
}
"""Heads that 4 ranks do not divide, nor 2 ranks some of them."""


@spread_by_default(3, case=CASES, heads=UNEVEN, mode=("kept", "recomputed, reentrant"), offloads=(False, True))
def test_heads_that_ranks_do_not_divide_give_outputs_and_gradients_of_whole_sequences(ranks, case, heads, mode, offloads):
    started, size = ranks
    program = functools.partial(differences, offloads=offloads, **UNEVEN[heads])
    assert max(started.run(program, *CASES[case], size, mode)) < 1e-12


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "cached"),
    [(4, 4, {2: 2, 4: 1}), (4, 2, {2: 1, 4: 1}), (4, 1, {2: 1, 4: 1}), (6, 1, {2: 1, 4: 1}), (5, 5, {2: 3, 4: 2})],
)
def test_a_ranks_cache_holds_its_own_heads(ranks, query_heads, kv_heads, cached):
    started, size = ranks
    assert started.run(cache_bytes, kv_heads, query_heads) == [cached[size]] * size
