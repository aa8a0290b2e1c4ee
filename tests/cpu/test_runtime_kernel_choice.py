"""Core attention runs on the first kernel that serves and proves itself, with plans built ahead. Libraries are played."""

import random
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock, patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_epp.features.cascade import common_rows, tree_cascade
from megatron_epp.features.cascade.tree_layouts import tree_layouts
from megatron_epp.features.trees.tree_cache import TreeCache
from megatron_epp.features.warm_up import kernel_warm_up
from megatron_epp.features.warm_up.kernel_warm_up import Heads, KernelWarmUp
from megatron_epp.plan import EppError, shape_classes, sizing
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kernels import EXACT_ATTENTION, PREFERENCES, AttentionCase, flash, transformer_engine
from megatron_epp.runtime.attention.kernels.base import backward_by_heads
from megatron_epp.runtime.attention.kernels.flash import FLASH_ATTN, FLASH_ATTN_3, TORCH_FLASH
from megatron_epp.runtime.attention.kernels.transformer_engine import TRANSFORMER_ENGINE
from megatron_epp.runtime.context import ChunkContext, chunk_layouts
from tests.support.plan.random_forests import forest, forest_plan
from tests.support.runtime.attention_libraries import LIBRARIES, install
from tests.support.runtime.relay_chunks import CHANNELS, KV_HEADS, QUERY_HEADS, SCALE, ChunkedLayer

ON_GPU = AttentionCase("cuda", torch.bfloat16, 128, 8, 2)
FUSED = (TRANSFORMER_ENGINE, FLASH_ATTN_3, FLASH_ATTN, TORCH_FLASH)


@pytest.fixture
def played(monkeypatch):
    """A GPU on which the named kernels are installed and right; all others have an obstacle."""

    def play(*names, wrong=()):
        kernels._choose.cache_clear()
        monkeypatch.setattr(kernels, "_relative_error", lambda kernel, case, *_: 0.5 if kernel.name in wrong else 1e-3)
        chosen = {
            preference: tuple(
                replace(k, obstacle=lambda case, k=k: None if k is EXACT_ATTENTION or k.name in names else "not here")
                for k in kernels.kernels_of(preference)
            )
            for preference in PREFERENCES
        }
        monkeypatch.setattr(kernels, "kernels_of", chosen.get)

    yield play
    kernels._choose.cache_clear()


@pytest.mark.parametrize("count", range(5))
def test_transformer_engine_goes_before_flash_attn_before_torch_before_exact_blocks(played, count):
    played(*(kernel.name for kernel in FUSED[count:]))
    chosen, obstacles = kernels.explain(ON_GPU)
    assert chosen.name == (*FUSED, EXACT_ATTENTION)[count].name
    assert obstacles == [f"{kernel.name}: not here" for kernel in FUSED[:count]]


def test_a_kernel_whose_results_are_wrong_is_passed_over_and_says_so(played):
    played(*(kernel.name for kernel in FUSED), wrong=[TRANSFORMER_ENGINE.name])
    chosen, obstacles = kernels.explain(ON_GPU)
    assert chosen.name == FLASH_ATTN_3.name
    assert obstacles == [f"{TRANSFORMER_ENGINE.name}: its results are 50.0% from exact ones"]


def test_a_kernel_that_raises_is_passed_over_and_says_so(played, monkeypatch):
    played(*(kernel.name for kernel in FUSED[1:]))

    monkeypatch.setattr(kernels, "_relative_error", Mock(side_effect=RuntimeError("no kernel image")))
    fails = [f"{kernel.name}: it fails (RuntimeError: no kernel image)" for kernel in FUSED[1:]]
    assert kernels.explain(ON_GPU, "flash") == (None, fails)


def test_a_proof_that_finds_no_memory_says_nothing_of_the_kernel(played):
    """Else exact attention, whose scores take far more, would run on this rank for good."""
    played(FLASH_ATTN.name)
    no_memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    with patch.object(kernels, "_relative_error", side_effect=no_memory), pytest.raises(torch.OutOfMemoryError):
        kernels._choose(ON_GPU, "auto")
    assert kernels._choose(ON_GPU, "auto").name == FLASH_ATTN.name


@pytest.mark.parametrize(("rank", "wrong", "lines"), [("0", [], 1), ("3", [], 0), ("3", [FLASH_ATTN.name], 1)])
def test_a_rank_on_which_a_kernel_fails_says_so(played, monkeypatch, caplog, rank, wrong, lines):
    monkeypatch.setenv("RANK", rank)
    played(FLASH_ATTN.name, wrong=wrong)
    with caplog.at_level("INFO", logger="megatron_epp"):
        kernels._choose(ON_GPU, "auto")
    assert len(caplog.records) == lines
    assert all(f"rank {rank}: attention in" in line for line in caplog.messages)
    assert [record.levelname for record in caplog.records] == [("WARNING" if wrong else "INFO")] * lines


def test_what_the_user_asks_for_and_is_not_there_is_refused_with_every_reason(played):
    played(FLASH_ATTN.name)
    says = r"--attention-backend fused: cuDNN through Transformer Engine: not here\. Leave it at auto"
    with pytest.raises(EppError, match=says):
        kernels._choose(ON_GPU, "fused")
    assert kernels._choose(ON_GPU, "flash").name == FLASH_ATTN.name
    assert kernels._choose(ON_GPU, "unfused").name == EXACT_ATTENTION.name


@pytest.mark.parametrize("preference", [name for name in PREFERENCES if [*kernels.kernels_of(name)] != [EXACT_ATTENTION]])
def test_on_a_cpu_everything_runs_in_exact_blocks_and_no_other_kernel_is_tried(preference):
    q, k = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    assert kernels.choose(q, k, k, preference) is EXACT_ATTENTION
    assert kernels.explain(ON_GPU._replace(device="cpu"), preference) == (EXACT_ATTENTION, [])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (ON_GPU._replace(dtype=torch.float32), "bf16 and fp16"),
        (ON_GPU._replace(channels=100), "multiples of 8"),
        (ON_GPU._replace(channels=512), "up to 256"),
        (ON_GPU._replace(device="cpu"), "runs on GPUs"),
    ],
)
@pytest.mark.parametrize("kernel", FUSED, ids=lambda kernel: kernel.name)
def test_every_fused_kernel_names_what_it_cannot_do(kernel, case, reason):
    assert reason in kernel.obstacle(case)


def test_a_library_that_is_not_installed_is_named_with_what_to_install(monkeypatch):
    for name in ("flash_attn", "flash_attn_interface", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    for imported in (flash._flash_attn, flash._flash_attn_3, transformer_engine._fused):
        imported.cache_clear()
    assert "pip install flash-attn" in FLASH_ATTN.obstacle(ON_GPU)
    assert "in the folder hopper" in FLASH_ATTN_3.obstacle(ON_GPU)
    assert "pip install 'megatron-epp[te]'" in TRANSFORMER_ENGINE.obstacle(ON_GPU)


TABLE = kernels._SAMPLE


def test_empty_segments_change_no_bit(monkeypatch):
    _, calls = install(monkeypatch, "transformer-engine")
    q, grad = (torch.randn(104, 4, 16) for _ in range(2))
    k, v = (torch.randn(174, 2, 16) for _ in range(2))
    found, exact = (
        (out, *kernel.backward(grad, q, k, v, out, saved, TABLE, 0.25))
        for kernel in (TRANSFORMER_ENGINE, EXACT_ATTENTION)
        for out, saved in [kernel.forward(q, k, v, TABLE, 0.25)]
    )
    assert all(map(torch.equal, found, exact))
    assert len(calls[0]["cu_seqlens_q"]) == 32 + 1


@pytest.mark.parametrize(
    ("capability", "cudnn", "reason"),
    [
        ((9, 0), 92400, None), ((10, 0), 90600, None), ((8, 0), 92400, "9.0 and newer"),
        ((12, 0), 92400, "a plan for every chunk"), ((9, 0), 90501, "a plan for every chunk: 9.6 is needed"),
        ((9, 0), 91000, "refuses cuDNN 91000 (9.10.0 and 9.10.1) for packed sequences: 9.10.2 is needed"),
        ((9, 0), 91001, "9.10.2 is needed"), ((9, 0), 91002, None),
    ],
)  # fmt: skip
def test_cudnn_serves_where_plans_are_for_classes_of_chunks(monkeypatch, capability, cudnn, reason):
    install(monkeypatch, "transformer-engine")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    found = TRANSFORMER_ENGINE.obstacle(ON_GPU)
    assert (reason in found) if reason else found is None


def test_flash_attn_is_recognised_where_its_functions_are_torch_operators(monkeypatch):
    @torch.library.custom_op("played::_flash_attn_varlen_forward", mutates_args=(), device_types="cpu")
    def forward(q: torch.Tensor, window_size_left: int = -1) -> torch.Tensor:
        return q.clone()

    module = types.ModuleType("flash_attn_interface")
    module._flash_attn_varlen_forward = forward
    monkeypatch.setattr(flash, "_flash_attn", lambda: module)
    assert FLASH_ATTN.obstacle(ON_GPU) is None


@pytest.mark.parametrize(("capability", "serves"), [((8, 0), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_flash_attention_3_serves_hopper_alone(monkeypatch, capability, serves):
    install(monkeypatch, "flash-attn-3")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (FLASH_ATTN_3.obstacle(ON_GPU) is None) is serves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exact_blocks_run_on_a_gpu_in_every_type(monkeypatch, dtype):
    """Shapes and types only: tensors without memory."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    with FakeTensorMode():
        q, k = (torch.empty(n, heads, 16, dtype=dtype, device="cuda") for n, heads in ((104, 4), (174, 2)))
        out, saved = EXACT_ATTENTION.forward(q, k, k, TABLE, 0.25)
        found = EXACT_ATTENTION.backward(out, q, k, k, out, saved, TABLE, 0.25)
    assert [(x.shape, x.dtype, x.device.type) for x in found] == [(x.shape, dtype, "cuda") for x in (q, k, k)]


@pytest.mark.parametrize(("count", "heads_at_once"), [(4, [4]), (3, [3, 1]), (2, [2, 2]), (1, [1] * 4)])
@pytest.mark.parametrize("kernel", [*FUSED[:3], EXACT_ATTENTION], ids=lambda kernel: kernel.name)
def test_a_backward_by_groups_of_key_heads_gives_the_same_bits(monkeypatch, kernel, count, heads_at_once):
    for library in LIBRARIES:
        install(monkeypatch, library)
    q, grad = (torch.randn(104, 8, 16) for _ in range(2))
    k, v = (torch.randn(174, 4, 16) for _ in range(2))
    out, saved = kernel.forward(q, k, v, TABLE, 0.25)
    seen = []

    def counted(grad, q, k, *rest):
        assert q.shape[1] == grad.shape[1] == 2 * k.shape[1]
        seen.append(k.shape[1])
        return kernel.backward(grad, q, k, *rest)

    inputs = grad, q, k, v, out, saved, TABLE, 0.25
    made = [torch.empty_like(x) for x in (k, v)]

    def take(dk, dv, heads):
        for target, value in zip(made, (dk, dv), strict=True):
            target[:, slice(None) if heads is None else heads] = value
        return dk[-104:], dv[-104:]

    dq, *own = backward_by_heads(replace(kernel, backward=counted), *inputs, take, count)
    assert all(map(torch.equal, (dq, *made), kernel.backward(*inputs)))
    assert all(map(torch.equal, own, (x[-104:] for x in made)))
    assert seen == heads_at_once


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_torch_flash_attention_takes_the_arguments_it_is_given(monkeypatch, kv_heads, window):
    """Shapes and types only; keys are a view of a larger cache."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    table = replace(TABLE, window=window)  # which keeps offsets on the devices it was used on
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, cache = (torch.empty(n, heads, 64, dtype=torch.bfloat16, device="cuda") for n, heads in ((104, 4), (256, kv_heads)))
        k = cache[:174]
        out, saved = TORCH_FLASH.forward(q, k, k, table, 0.125)
        inputs = out, q, k, k, out, saved, table, 0.125
        found = TORCH_FLASH.backward(*inputs)
        groups = []

        def take(dk, dv, heads):
            groups.append((heads, dk.shape, dv.shape))
            return dk[:104], dv[:104]

        own = backward_by_heads(TORCH_FLASH, *inputs, take, count=1)
    assert out.shape == q.shape
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, torch.bfloat16) for x in (q, k, k)]
    assert groups == [(slice(i, i + 1), (174, 1, 64), (174, 1, 64)) for i in range(kv_heads)]
    assert [(x.shape, x.dtype) for x in own] == [(x.shape, torch.bfloat16) for x in (q, k[:104], k[:104])]


def aligned_to_the_top_left(q, k, v, table, scale):
    starts = (0, *table.query_starts[1:])
    own = [slice(a, a + s.num_tokens) for a, s in zip(table.key_starts, table.segments, strict=False)]
    wrong = kernels.SegmentTable(tuple(s._replace(start=0, end=s.num_tokens) for s in table.segments), starts, starts)
    return EXACT_ATTENTION.forward(q, torch.cat([k[i] for i in own]), torch.cat([v[i] for i in own]), wrong, scale)


def without_a_number(which):
    return lambda *inputs: [x * float("nan") if i == which else x for i, x in enumerate(EXACT_ATTENTION.backward(*inputs))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"forward": aligned_to_the_top_left}, "its results are"),
        # Which a backward of all heads at once never sees.
        ({"of_heads": lambda saved, own: (saved[0].roll(1, 0)[own],)}, "its results are"),
        *(({"backward": without_a_number(which)}, "its results are nan") for which in range(3)),
    ],
    ids=["mask", "log-sum-exp of other heads", "nan of q", "nan of k", "nan of v"],
)
def test_the_proof_notices_what_is_wrong(change, said):
    case = AttentionCase("cpu", torch.float32, 16, 4, 2)
    assert said in kernels.failed_verification(replace(EXACT_ATTENTION, **change), case)


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
        self.built.add((threading.get_ident(), which, (table.shape_class, table.window, table.causal), k.shape[1]))


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


def test_calls_on_rows_in_common_are_warm_too(library, autograd_thread, monkeypatch):
    monkeypatch.setattr(common_rows, "LEAST_ROWS", 4)
    monkeypatch.setattr(common_rows, "ROWS_PER_TOKEN", 0)
    monkeypatch.setattr(tree_cascade, "_serves", lambda *_: True)
    warm = KernelWarmUp((HEADS,), LONGEST)
    for seed in range(6):
        rng = random.Random(seed)
        layouts, cache, outs = tree_layouts(forest_plan(rng, forest(rng), joins=0.9)), TreeCache(), []
        warm.before(layouts)
        known = set(library.built)
        for c, layout in enumerate(layouts):
            q, k = (HEADS.ones(layout.table.num_tokens, heads).requires_grad_() for heads in (QUERY_HEADS, KV_HEADS))
            context = ChunkContext(c, layout.table, cache, layout.view)
            outs.append(chunk_attention(q, (k, HEADS.values(k)), context, 0, SCALE))
        for out in reversed(outs):
            autograd_thread.submit(out.sum().backward).result()
        assert library.built == known
    assert {causal for _, _, (_, _, causal), _ in known} == {True, False}


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
