"""Emulation of a plan: the real executor and real messages over gloo, with compute replaced by timed waits.

Every rank is a process of this machine. Nothing heavy runs, so a few cores suffice for many ranks. The rank sleeps for the
planned time of each action; the receiver of a message sleeps for its planned time from the moment the producer was done, which
the message carries. So order, messages and blocking are the runtime's own, and only the times are the plan's. Copies to the
host are timed waits overlapped with compute, one at a time if ranks share a link.
"""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.graph import build_graph
from megatron_epp.plan.operations import Message, Role, operation
from megatron_epp.runtime.attention.kv_cache import KVRelay
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.links.groups import Groups
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.program import prepare
from megatron_epp.runtime.tools.emulate_copies import Locks, WaitingOffload, host_locks

Events = list[tuple[str, float, float]]
_HEAD_START_S = 0.5
"""Seconds from the moment the ranks agree on a start to that start."""
_LEAVE_S = 10.0
"""Seconds that a rank which has finished has to exit."""
_SPIN_S = 100e-6
"""Seconds at the end of a wait that are spent spinning: sleeping overshoots by about this much."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Measurements of one emulation, in the plan's time: divided by the scale.

    Attributes:
        events: for every rank, ``(action, start_us, end_us)`` in order of start, copies included.
        late_us: mean overhead that this machine adds to a compute action, not divided by the scale: the time from when it could
            have started (rank free, message received, load complete) to its start, and from its due to its actual end.
    """

    events: tuple[tuple[tuple[str, float, float], ...], ...]
    late_us: float


@dataclass(slots=True)
class _Rank:
    """State shared by the stages of one rank: the clock and the recorded events."""

    plan: Plan
    scale: float
    origin_s: float = 0.0
    free_s: float = 0.0
    offload: WaitingOffload | None = None
    late_s: float = 0.0
    events: Events = field(default_factory=list)

    def perform(self, action: Action, time_us: float, arrived_s: float) -> float:
        """Wait for the planned time of an action, from the arrival of its input. Returns when it ended, in seconds."""
        if action.op is Op.B and self.offload is not None:
            arrived_s = max(arrived_s, self.offload.loaded_s)
        _wait_until(arrived_s)
        start_s = time.monotonic()
        _wait_until(start_s + time_us * self.scale * 1e-6)
        end_s = time.monotonic()
        self.late_s += end_s - max(arrived_s, self.free_s, self.origin_s) - time_us * self.scale * 1e-6
        self.free_s = end_s
        self.record(action, start_s, end_s)
        return end_s

    def record(self, action: Action, start_s: float, end_s: float) -> None:
        to_us = 1e6 / self.scale
        self.events.append((str(action), (start_s - self.origin_s) * to_us, (end_s - self.origin_s) * to_us))


class WaitingStage:
    """Implements `runtime.executor.Stage` by timed waits: its hidden states are the time at which they were produced."""

    def __init__(self, stage: int, rank: _Rank, times_us: dict[Action, float]) -> None:
        self.stage, self.rank, self.times_us = stage, rank, times_us
        self.relay = KVRelay()
        self._inputs: dict[int, Tensor] = {}

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        plan = self.rank.plan
        message_us = plan.messages.activation_us[self.stage - 1][context.chunk] if self.stage > 0 else 0.0
        if hidden is not None:
            self._inputs[context.chunk] = hidden
        return self._perform(Action(Op.F, self.stage, context.chunk), hidden, message_us)

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None, keep_weights: bool) -> None:
        message_us = self.rank.plan.messages.gradient_us[self.stage][context.chunk] if grad is not None else 0.0
        done = self._perform(Action(Op.B, self.stage, context.chunk), grad, message_us)
        if (hidden := self._inputs.pop(context.chunk, None)) is not None:
            hidden.backward(done)

    def _perform(self, action: Action, arrived: Tensor | None, message_us: float) -> Tensor:
        sent_s = self.rank.origin_s if arrived is None else float(arrived.detach()[0])
        end_s = self.rank.perform(action, self.times_us[action], sent_s + message_us * self.rank.scale * 1e-6)
        return torch.tensor([end_s], dtype=torch.float64)

    def weight(self, chunk: int) -> None:
        self._perform(Action(Op.W, self.stage, chunk), None, 0.0)

    def before_last_gradient(self) -> None:
        """Do nothing: there are no gradients to reduce."""

    reduce_gradients = before_last_gradient

    def release_output(self, output: Tensor) -> None:
        """Do nothing: the output is only eight bytes."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return (1,), torch.float64, torch.device("cpu")


def rehearse(plan: Plan, scale: float, timeout_s: float) -> Rehearsed:
    """Emulate a plan, with its ranks as processes.

    Args:
        plan: a checked plan.
        scale: seconds slept per planned second.
        timeout_s: limit in seconds for the whole emulation.

    Raises:
        EppError: a rank failed, or it took too long.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_epp.runtime.links.probe", "megatron_epp.runtime.tools.emulate"])
    results: Any = context.Queue()
    locks = host_locks(plan, context)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_enter, args=(plan, rank, scale, locks, folder, results), daemon=True)
            for rank in range(plan.num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            done = dict(_collect(results, plan.num_ranks, timeout_s))
            for process in ranks:
                process.join(_LEAVE_S)
        finally:
            for process in ranks:
                process.kill()
    late_s = sum(late for _, late in done.values())
    actions = sum(map(len, plan.ranks))
    return Rehearsed(tuple(tuple(done[rank][0]) for rank in range(plan.num_ranks)), late_s * 1e6 / max(1, actions))


def _collect(results: Any, num_ranks: int, timeout_s: float) -> list[tuple[int, tuple[Events, float]]]:
    deadline_s = time.monotonic() + timeout_s
    done: list[tuple[int, tuple[Events, float]]] = []
    for _ in range(num_ranks):
        try:
            rank, result = results.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise EppError(f"{num_ranks - len(done)} of {num_ranks} ranks have not ended after {timeout_s:.0f} s") from None
        if isinstance(result, str):
            raise EppError(f"rank {rank} failed: {result}")
        done.append((rank, result))
    return done


def _enter(plan: Plan, rank: int, scale: float, locks: Locks, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=rank, world_size=plan.num_ranks)
        results.put((rank, _run(plan, rank, scale, locks)))
        dist.barrier()  # a rank that left would break the others' links
    except Exception as error:
        results.put((rank, f"{error}" if isinstance(error, EppError) else traceback.format_exc()))


def _run(plan: Plan, rank: int, scale: float, locks: Locks) -> tuple[Events, float]:
    everyone = range(plan.num_ranks)
    links = Links.create(everyone, everyone, Groups()) if plan.num_ranks > 1 else None
    times_us = {action: step.time_us / len(step.actions) for step in plan.ranks[rank] for action in step.actions}
    shared = _Rank(plan, scale)
    stages = {stage: WaitingStage(stage, shared, times_us) for stage, on in enumerate(plan.placement) if on == rank}
    if plan.copies and plan.copies[rank]:
        shared.offload = WaitingOffload(plan, rank, locks, scale, shared.record)
    unstreamed = replace(plan, kv_offload=())  # what it takes to stream caches is in the steps' times
    prepare(unstreamed, rank)
    if links is not None:
        _first_messages(plan, rank, links)
    start = torch.tensor([time.monotonic() + _HEAD_START_S], dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX)
    executor = Executor(unstreamed, rank, stages, links, offload=shared.offload)
    shared.origin_s = shared.free_s = float(start[0])
    _wait_until(shared.origin_s)
    executor.run()
    return sorted(shared.events, key=itemgetter(1, 2)), shared.late_s


def _first_messages(plan: Plan, rank: int, links: Links) -> None:
    """Send one message in each direction on every link the plan uses, so that links are connected before the emulation."""
    used = {
        (plan.placement[sent.source.stage], plan.placement[sent.target.stage], operation(sent.target.op).role is Role.CLOSES)
        for sent in build_graph(plan).transfers
        if isinstance(sent.carries, Message)
    }
    waiting = []
    for source, target, gradient in sorted(used):
        if target == rank:
            waiting.append(links.post_receive((1,), torch.float64, torch.device("cpu"), peer=source, gradient=gradient))
        if source == rank:
            links.send(torch.zeros(1, dtype=torch.float64), target, gradient)
    for receive in waiting:
        receive.wait()
    links.finish_sends()


def _wait_until(when_s: float) -> None:
    if (left := when_s - time.monotonic()) > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.monotonic() < when_s:
        pass
