"""Check of links and of the premise of every plan: messages posted in the plan's order complete, and arrive as they were sent.

Ranks of this machine, on a GPU each or over gloo, open every communicator of a pipeline with training's options, and run whole
plans with the runtime's own executor and links. Compute is a small matrix product, so that the host runs ahead as in training;
a message has the size that training gives it and carries the number of its chunk. Where pipelines run side by side, ranks that
share stages sum a tensor after each action: collectives and waiting messages hold multiprocessors at the same time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.plan import EppError, Plan
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner import plan as make_plan
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.nccl import link_defaults, options_of, smallest_device, uses_nccl
from megatron_epp.runtime.links.objects import Groups
from megatron_epp.runtime.links.processes import run_ranks
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.watchdog import EXIT_CODE, Watchdog
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs

_LENGTHS = (2048, 700, 300, 300, 160, 90, 60, 40)  # tokens of the sequences of every plan: a long one in slices, and short ones
_GRADIENT = 0.5  # offset of the values of gradients, so that none passes for an activation
_EXCHANGED = 1 << 16  # values that ranks which share a stage sum after each action
_REPEATS = 3  # runs of every plan: the fastest is reported, and wrong values are counted in all
_START_S = 60.0
"""Seconds in which ranks have to start: to import torch and to make communicators. Not measured; a busy machine takes tens."""


@dataclass(frozen=True, slots=True)
class QueueRun:
    name: str
    num_messages: int  # messages of one run, over all ranks
    message_bytes: int  # size of the largest
    time_us: float  # of the fastest run on the slowest rank
    num_wrong: int  # values that did not arrive as they were sent, in all runs


def queue_plans(num_ranks: int) -> dict[str, Plan]:
    """Return plans by name: one stage per rank, two per rank looped and in a V, over `num_ranks` ranks."""
    plans = {}
    for name, placement in (
        ("one stage per rank", Placement("looped", num_ranks, 1)),
        ("two stages per rank, looped", Placement("looped", num_ranks, 2)),
        ("two stages per rank, v", Placement("v", num_ranks, 2)),
    ):
        ranks = placement.rank_of
        shape = ModelShape(num_layers=len(ranks), hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=256)
        problem = Problem(_LENGTHS, ranks, (UNLIMITED_BYTES,) * num_ranks)
        options = Options(slices=4, context=max(_LENGTHS), steps=0)
        plans[name] = make_plan(problem, analytic_costs(shape, CPU, [1] * len(ranks)), options)
    return plans


def check_queues(
    plans: Mapping[str, Plan], width: int, gpus: bool, limit_s: float, pipelines: int = 1, run: Callable[..., Any] | None = None
) -> list[QueueRun]:
    """Run plans, `pipelines` side by side, on GPUs or over gloo, in messages of `width` fp32 values of a token.

    Raises `EppError` if a rank failed, or an action made no progress for `limit_s`, with what it waits for.
    """
    ranks, backend = next(iter(plans.values())).num_ranks * pipelines, "nccl" if gpus else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        arguments = ([*plans.values()], width, gpus, limit_s, folder)
        try:
            results = run_ranks(run or run_rank, ranks, *arguments, backend=backend, timeout_s=_START_S + 10 * limit_s)
        except EppError as error:
            lines = [path.read_text(encoding="utf-8").partition("\n")[0] for path in sorted(Path(folder).iterdir())]
            raise EppError("; ".join([str(error), *lines])) from error
    return [
        QueueRun(
            name,
            num_messages=2 * len(plan.chunks) * pipelines * sum(a != b for a, b in pairwise(plan.placement)),
            message_bytes=4 * width * max(map(plan.padded_tokens, range(len(plan.chunks)))),
            time_us=max(time_us for time_us, _ in of_ranks),
            num_wrong=sum(wrong for _, wrong in of_ranks),
        )
        for (name, plan), of_ranks in zip(plans.items(), zip(*results, strict=True), strict=True)
    ]


class EchoStage:
    """A `runtime.context.Stage` of messages that carry the number of their chunk, which it compares on arrival."""

    def __init__(self, stage: int, width: int, device: torch.device, exchanging: dist.ProcessGroup | None = None) -> None:
        self.stage, self.kv_cache, self._exchanging = stage, SlicedKVCache(), exchanging
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self._width, self._inputs = width, dict[int, Tensor]()
        self._square = torch.full((2048 if device.type == "cuda" else 64,) * 2, 1e-3, device=device)

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        if hidden is not None:
            self._compare(hidden, context.chunk)
            self._inputs[context.chunk] = hidden
        return self._message(context, 0.0)

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            self._compare(grad, context.chunk + _GRADIENT)
        if (hidden := self._inputs.pop(context.chunk, None)) is not None:
            hidden.backward(self._message(context, _GRADIENT))

    def _message(self, context: ChunkContext, offset: float) -> Tensor:
        """Compute for a while, longer for some chunks than for others, and return what is sent."""
        for _ in range(1 + context.chunk % 3):
            self._square = (self._square @ self._square).clamp_(1e-4, 1e-3)
        self._exchange()
        shape, dtype, device = self.message(context.table.num_tokens)
        return torch.full(shape, context.chunk + offset, dtype=dtype, device=device)

    def _exchange(self) -> None:
        if self._exchanging is not None:
            total = torch.ones(_EXCHANGED, device=self.wrong.device)
            dist.all_reduce(total, group=self._exchanging)
            self._compare(total, float(dist.get_world_size(self._exchanging)))

    def _compare(self, values: Tensor, value: float) -> None:
        self.wrong += (values.detach() != value).sum()

    has_gradient = True

    # There are no weights, and the next stage may be on this rank and share the storage of an output.
    def before_last_gradient(self) -> None: ...
    def release_output(self, output: Tensor) -> None: ...

    def reduce_gradients(self) -> None:
        self._exchange()

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return (num_tokens, self._width), torch.float32, self.wrong.device


def run_rank(rank: int, plans: Sequence[Plan], width: int, gpus: bool, limit_s: float, folder: str) -> list[tuple[float, int]]:
    """Run every plan as one rank; return the time of the fastest run in microseconds, and the number of wrong values."""
    device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
    world, limit = dist.get_world_size(), timedelta(seconds=2 * limit_s)
    pipelines = world // plans[0].num_ranks
    groups, used = Groups(limit), directions(*(plan.placement for plan in plans))
    position, first = divmod(rank, pipelines)
    options = options_of(link_defaults(*smallest_device(used)), limit) if uses_nccl() else None
    links = Links.create(range(first, world, pipelines), range(world), groups, used, options)
    exchanging = groups.of(tuple(range(rank - first, rank - first + pipelines))) if pipelines > 1 else None
    links.connect(device)
    if exchanging is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=exchanging)  # makes the communicator, before any plan needs it
    watchdog = Watchdog(limit_s, on_expiry=partial(_leave, Path(folder, f"rank{rank}")), limit_name="")
    entries = []
    for plan in plans:
        times_us, wrong = [], 0
        for _ in range(_REPEATS):
            here = [stage for stage, on in enumerate(plan.placement) if on == position]
            stages = {stage: EchoStage(stage, width, device, exchanging) for stage in here}
            executor = executor_of(plan, position, stages, links, watchdog=watchdog)
            links.control.from_each(None)  # ranks start together
            start_s = time.perf_counter()
            executor.run()
            wrong += sum(int(stage.wrong) for stage in stages.values())  # waits for the device
            times_us.append(1e6 * (time.perf_counter() - start_s))
        entries.append((min(times_us), wrong))
    return entries


def _leave(note: Path, message: str) -> None:
    """Leave a note that says what this rank waits for, and end its process: what hangs in native code takes no exception."""
    note.write_text(message, encoding="utf-8")
    os._exit(EXIT_CODE)
