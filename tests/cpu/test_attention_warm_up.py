"""Attention's kernel plans are built before an iteration, in both threads, and none in it. A library's cache is played."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from megatron_epp.features.warm_up import kernel_warm_up
from megatron_epp.features.warm_up.kernel_warm_up import Heads, KernelWarmUp
from megatron_epp.plan import shape_classes, sizing
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION
from megatron_epp.runtime.context import chunk_layouts
from tests.support.runtime.relay_chunks import CHANNELS, KV_HEADS, QUERY_HEADS, SCALE, ChunkedLayer

HEADS = Heads(QUERY_HEADS, KV_HEADS, CHANNELS, torch.float64, torch.device("cpu"), SCALE)
ROTATED, UNROTATED = 2, 3
LATENTS = {"kv_heads": 1, "widths": (6, ROTATED), "unrotated": UNROTATED}
EXPANDED = replace(HEADS, kv_heads=QUERY_HEADS, channels=UNROTATED + ROTATED, value_channels=CHANNELS + 1, is_expanded=True)
"""Heads whose keys and values are made of latents."""
LONGEST = 60


class PlayedLibrary:
    """Exact attention that builds a plan for every class of calls, in every thread; `built` has the keys of its plans."""

    def __init__(self):
        self.built = set()
        self.kernel = replace(EXACT_ATTENTION, name="played", forward=self.forward, backward=self.backward, builds_plans=True)

    def forward(self, q, k, v, table, scale):
        self.look_up("forward", k, table)
        return EXACT_ATTENTION.forward(q, k, v, table, scale)

    def backward(self, grad, q, k, v, out, saved, table, scale):
        self.look_up("backward", k, table)
        return EXACT_ATTENTION.backward(grad, q, k, v, out, saved, table, scale)

    def look_up(self, which, k, table):
        self.built.add((threading.get_ident(), which, (table.shape_class, table.window), k.shape[1]))


@pytest.fixture
def library(monkeypatch):
    """A played library, in which classes are as fine as the chunks here, and few heads' gradients fit at once."""
    played = PlayedLibrary()
    monkeypatch.setattr(kernels, "choose", lambda *_, **__: played.kernel)
    for name, value in (("_LEAST_TOKENS", 4), ("_MOST_DOUBLED", 16), ("LEAST_SEGMENTS", 2)):
        monkeypatch.setattr(shape_classes, name, value)
    monkeypatch.setattr(sizing, "MOST_TRANSIENT_BYTES", 32 * KV_HEADS * 2 * CHANNELS * 8 * 5)
    return played


@pytest.fixture
def autograd_thread(monkeypatch):
    """A thread of autograd's own, as a GPU has: on a CPU, backwards run in the thread that asks for them."""
    with ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(kernel_warm_up, "in_autograd", lambda run, device: thread.submit(run).result())
        yield thread


def random_batch(rng):
    """Lengths and chunks: a sequence cut into slices, of which some are followed by a short one, and packed short ones."""
    length = rng.randint(20, LONGEST)
    cuts = [0, *sorted(rng.sample(range(1, length), 3)), length]
    lengths, chunks = [length], [[(0, start, end)] for start, end in pairwise(cuts)]
    for chunk in (*rng.sample(chunks, 2), *([] for _ in range(2))):
        for _ in range(1 if chunk else rng.randint(1, 6)):
            chunk.append((len(lengths), 0, rng.randint(1, 9)))
            lengths.append(chunk[-1][2])
        if chunk not in chunks:
            chunks.append(chunk)
    return lengths, chunks


def run_batches(library, autograd_thread, heads, mode="kept", **options):
    """Run random batches, in which no plan is built; return the numbers of those that were built before each."""
    warm, rng, built = KernelWarmUp((heads,), LONGEST), random.Random(0), []
    for _ in range(20):
        layer = ChunkedLayer(*random_batch(rng), **options)
        built.append(warm.before(chunk_layouts(layer.plan), repeats=mode != "kept"))
        known = set(library.built)
        for chunk in range(len(layer.contexts)):
            layer.forward(chunk, mode)
        for chunk in reversed(range(len(layer.contexts))):
            autograd_thread.submit(layer.backward, chunk).result()
        assert library.built == known
    return built


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mode", ["kept", "recomputed, reentrant"])
def test_no_plan_is_built_in_an_iteration(library, autograd_thread, mode, window):
    batches = run_batches(library, autograd_thread, replace(HEADS, window=window), mode, window=window)
    threads = {thread for thread, *_ in library.built}
    assert threads == {threading.get_ident(), autograd_thread.submit(threading.get_ident).result()}
    assert {heads for _, which, _, heads in library.built if which == "backward"} == {1, 2}
    assert batches[0] > sum(batches[1:]), "most classes are known before the first iteration"


def test_groups_of_heads_of_latents_are_warm_too(library, autograd_thread):
    run_batches(library, autograd_thread, EXPANDED, **LATENTS)
    for which in ("forward", "backward"):
        assert {heads for _, kind, _, heads in library.built if kind == which} == {1, QUERY_HEADS}


def test_groups_of_heads_of_offloaded_caches_are_warm_too(library):
    layer = ChunkedLayer(*random_batch(random.Random(1)))
    assert KernelWarmUp((HEADS,), LONGEST, offloads_kv=True).before(chunk_layouts(layer.plan))
    assert {heads for _, which, _, heads in library.built if which == "forward"} == {1, 2}


@pytest.mark.parametrize(("choice", "builds", "runs"), [("auto", False, False), ("on", False, True), ("off", True, False)])
def test_it_runs_where_it_is_asked_for(library, choice, builds, runs):
    library.kernel = replace(library.kernel, builds_plans=builds)
    layer = ChunkedLayer(*random_batch(random.Random(2)))
    assert bool(KernelWarmUp((HEADS,), LONGEST, choice).before(chunk_layouts(layer.plan))) is runs
    assert bool(library.built) is runs


def test_nothing_runs_twice_but_where_forwards_are_recomputed_for_the_first_time(library):
    warm, layouts = KernelWarmUp((HEADS,), LONGEST), chunk_layouts(ChunkedLayer(*random_batch(random.Random(3))).plan)
    assert warm.before(layouts) > 0
    assert warm.before(layouts) == 0
    assert warm.before(layouts, repeats=True) == len({layout.table.shape_class for layout in layouts})
    assert warm.before(layouts, repeats=True) == warm.before(layouts) == 0


def test_a_device_that_is_full_is_left_to_the_iteration(library, caplog):
    library.kernel = replace(library.kernel, forward=Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with caplog.at_level("WARNING", logger="megatron_epp"):
        KernelWarmUp((HEADS,), LONGEST).before(chunk_layouts(ChunkedLayer(*random_batch(random.Random(4))).plan))
    assert "no memory to warm up attention" in caplog.text


def test_backwards_run_where_autograd_runs_them():
    seen = []
    kernel_warm_up.in_autograd(lambda: seen.append(torch._C._current_graph_task_id()), torch.device("cpu"))
    assert seen != [-1], "inside a backward"
