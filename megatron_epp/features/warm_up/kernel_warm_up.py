"""Warm-up of attention: plans that libraries build for a class of shapes are built between iterations, on all ranks at once.

In an iteration a rank that builds a plan keeps the next ranks waiting, which then build theirs. Libraries keep plans for the
thread that asked, so every class runs in the computing thread and in autograd's, which runs backwards and recomputes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.core_attention import relay_of
from megatron_epp.mcore.training.caps import offloads
from megatron_epp.plan.kv_offload import head_parts
from megatron_epp.plan.shape_classes import ShapeClass, all_classes
from megatron_epp.plan.sizing import expanded_at_once
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.kernels.base import backward_by_heads, heads_of_backward
from megatron_epp.runtime.attention.segments import SegmentTable, Tensors
from megatron_epp.runtime.context import ChunkLayout
from megatron_epp.runtime.handover import stretches_of

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.data.batch import GlobalBatch
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

_PROGRESS_S = 5.0
"""Seconds between lines of progress in the log; for the reader's patience, not measured."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Properties of a stage's attention calls that its chunks share."""

    # query_heads, kv_heads: numbers of heads on this rank, inside attention
    query_heads: int
    kv_heads: int
    channels: int  # width of a head of queries and keys
    dtype: torch.dtype
    device: torch.device
    scale: float
    preference: str = "auto"  # of kernels, a key of `kernels.PREFERENCES`
    value_channels: int = 0  # width of a head of values; 0 if it is the same
    is_expanded: bool = False  # keys and values are made of latents, by groups of heads (`latents`)
    window: int | None = None  # of the layer's attention; None for all tokens
    has_sinks: bool = False  # softmaxes of the layer have one more score

    def parts(self, num_keys: int, offloads_kv: bool) -> set[int]:
        if self.window is not None:
            return {1}  # its keys and values are not cached
        if self.is_expanded:
            head_bytes = (self.channels + (self.value_channels or self.channels)) * self.dtype.itemsize
            return {self.kv_heads // expanded_at_once(num_keys, self.kv_heads, head_bytes)}
        return {1, head_parts(self.kv_heads)} if offloads_kv else {1}

    def ones(self, tokens: int, heads: int) -> Tensor:
        return torch.ones(tokens, heads, self.channels, dtype=self.dtype, device=self.device)

    def values(self, keys: Tensor) -> Tensor:
        return keys[..., : self.value_channels or self.channels].contiguous()

    @property
    def like(self) -> Tensors:
        k = self.ones(0, self.kv_heads)
        return self.ones(0, self.query_heads), k, self.values(k)

    @property
    def kernel(self) -> kernels.Kernel:
        (q, k, v), has_window = self.like, self.window is not None
        return kernels.choose(q, k, v, self.preference, has_window=has_window, has_sinks=self.has_sinks)

    def calls(self, layout: ChunkLayout) -> tuple[tuple[SegmentTable, int], ...]:
        """Return the layouts of a layer's calls, and of each how many key heads run backward at once; 0 if its keys tell."""
        if self.window is not None:
            table = stretches_of(layout.table, layout.view, layout.begun).table
            return ((table.within(self.window), 0),)
        if layout.view is None or self.is_expanded:
            return ((layout.table, 0),)
        _, _, table = layout.view.call(self.kernel, layout.table, self.like)
        if table.calls == (table,):
            return ((table, 0),)
        k = self.ones(1, self.kv_heads).expand(sum(call.key_starts[-1] for call in table.calls), -1, -1)
        return tuple((call, heads_of_backward(self.query_heads, k, k)) for call in table.calls)


class _Call(NamedTuple):
    shape: ShapeClass
    at: int  # position of its heads among those that are active
    causal: bool = True
    heads_at_once: int = 0  # key heads of a backward; 0 if its keys say how many


@dataclass(slots=True)
class KernelWarmUp:
    """Attention of a rank's stages, and the classes of shapes that have run."""

    heads: Sequence[Heads]  # distinct properties of the stages' attention calls
    longest: int  # tokens of the longest sequence
    choice: str = "auto"  # one of `WARM_UPS`
    offloads_kv: bool = False  # KV offload may be planned, with which attention runs by groups of heads
    _warm: set[_Call] = field(default_factory=set)
    _repeated: set[_Call] = field(default_factory=set)
    _active: Sequence[Heads] = field(init=False)

    def __post_init__(self) -> None:
        """Choose the calls to warm up: none on most devices, and then nothing is done between iterations."""
        wanted = () if self.choice == "off" else self.heads
        self._active = [heads for heads in wanted if self.choice == "on" or heads.kernel.builds_plans]

    @property
    def is_active(self) -> bool:
        return bool(self._active)

    def before(self, layouts: Iterable[ChunkLayout], repeats: bool = False) -> int:
        """Run the classes of an iteration's chunks that have not run yet, and return their number.

        The first time, these are chunks with as many tokens as any of them or fewer, behind prefixes of any length.
        """
        if not self._active:
            return 0
        calls = [(at, *call) for layout in layouts for at, heads in enumerate(self._active) for call in heads.calls(layout)]
        wanted = {_Call(table.shape_class, at, table.causal, count) for at, table, count in calls}
        if not self._warm and calls:
            most = max(table.num_tokens for _, table, _ in calls)
            for at, heads in enumerate(self._active):
                seen = self.longest if heads.window is None else min(self.longest, most + heads.window)
                wanted |= {_Call(shape, at) for shape in all_classes(most, seen)}
        missing = sorted(wanted - (self._repeated if repeats else self._warm))
        self._warm |= wanted
        self._repeated |= wanted if repeats else set()
        if missing:
            self._run(missing, repeats)
        return len(missing)

    def _run(self, missing: Sequence[_Call], repeats: bool) -> None:
        active = self._active
        names = ", ".join(sorted({heads.kernel.name for heads in active}))
        begin_s = told_s = time.perf_counter()
        logger.info("warming up %s for %d classes of shapes", names, len(missing))
        for number, call in enumerate(missing, 1):
            heads = active[call.at]
            try:
                for parts in sorted(heads.parts(call.shape.keys, self.offloads_kv)):
                    run_class(call, heads, parts, repeats)
            except torch.OutOfMemoryError:
                logger.warning("no memory to warm up attention for %s: its plans are built in an iteration", call.shape)
            if time.perf_counter() - told_s >= _PROGRESS_S:
                told_s = time.perf_counter()
                logger.info("%d of %d classes of shapes are warm", number, len(missing))
        if any(heads.device.type == "cuda" for heads in active):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # blocks of these sizes would stay reserved, beyond what plans count
        logger.info("warmed up in %.1f s", time.perf_counter() - begin_s)


class AttentionWarmUp(RunFeature):
    """Warm-up of attention in a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._warm_up: KernelWarmUp | None = None

    def settled(self, costs: PipelineCosts) -> None:
        run, heads = self._run, dict[Heads, None]()
        for number, stage in run.stages.items():
            kv = costs.stages[number].kv
            kv_heads = kv.expanded_heads or kv.heads
            for part in filter(None, map(relay_of, stage.decoder.modules())):
                sizes = kv_heads * kv.queries_per_key, kv_heads, part.channels, part.config.params_dtype, run.device, part.scale
                more = part.preference, part.value_channels, kv.expanded_heads > 0, part.window, part.has_sinks
                heads[Heads(*sizes, *more)] = None
        self._warm_up = KernelWarmUp(tuple(heads), run.args.seq_length, run.args.epp_warm_up, offloads(run.args))

    def before(self, batch: GlobalBatch) -> None:
        if self._warm_up is not None and self._warm_up.is_active and batch.plan is not None:
            with self._run.watching("warms up attention"):
                attends_again = any(recompute.attention_layers for row in batch.plan.recompute for recompute in row)
                self._warm_up.before(batch.prepared.program.layouts, attends_again)


def attention_warm_up(run: Run) -> AttentionWarmUp | None:
    """Return the feature of a run in slices: a caller's own microbatches have few shapes."""
    return AttentionWarmUp(run) if run.makes_chunks else None


def run_class(call: _Call, heads: Heads, parts: int, repeats: bool) -> None:
    """Run a forward in this thread and a backward in autograd's thread of the device, in so many groups of heads."""
    chunk = call.shape.smallest()
    table = replace(SegmentTable.build(chunk, chunk.num_tokens), window=heads.window, causal=call.causal)
    kernel = heads.kernel
    q = heads.ones(table.num_tokens, heads.query_heads // parts)
    k = heads.ones(table.key_starts[-1], heads.kv_heads // parts)
    v, grad = heads.values(k), heads.values(q)
    with torch.no_grad():
        out, saved = kernel.forward(q, k, v, table, heads.scale)

    def backward() -> None:
        if repeats:
            kernel.forward(q, k, v, table, heads.scale)
        count = k.shape[1] if heads.is_expanded else call.heads_at_once or None
        backward_by_heads(kernel, grad, q, k, v, out, saved, table, heads.scale, take, count)

    def take(dk: Tensor, dv: Tensor, heads: slice | None) -> Tensors:
        return dk[: len(q)], dv[: len(q)]

    in_autograd(backward, heads.device)


def in_autograd(run: Callable[[], None], device: torch.device) -> None:
    """Call a function in the thread in which autograd runs backwards on a device, and wait for it."""
    with torch.enable_grad():
        _Called.apply(torch.zeros(1, device=device, requires_grad=True), run).backward()


class _Called(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.run()
        return grads[0], None
