"""Emulation of a plan: the real executor and real messages over gloo, with compute replaced by timed waits.

Every rank is a process of this machine. Nothing heavy runs, so a few cores suffice for many ranks. The rank sleeps for the
planned time of each action; the receiver of a message sleeps for its planned time from the moment the producer was done, which
the message carries. So order, messages and blocking are the runtime's own, and only the times are the plan's. Copies to the
host are timed waits overlapped with compute, one at a time if ranks share a link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.contrib.helix.attention_messages import AttentionMessages, attention_links
from megatron_epp.contrib.helix.attention_operations import INPUTS, INPUTS_GRADIENT, RESULT, RESULT_GRADIENT, A, G
from megatron_epp.plan import Action, Op, Plan
from megatron_epp.plan.communicators import directions
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.executor import HANDLERS, Executor, Handler
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import Groups
from megatron_epp.runtime.links.processes import CONTEXT, run_ranks
from megatron_epp.runtime.lowered import executor_of, prepare

Events = list[tuple[str, float, float]]
Locks = Mapping[tuple[int, Op], Any]
"""Locks by host link and direction (offload or load), each held by the rank that is copying."""

_HEAD_START_S = 0.5
"""Seconds from the moment the ranks agree on a start to that start."""
_SPIN_S = 100e-6
"""Seconds at the end of a wait that are spent spinning: sleeping overshoots by about this much."""


@dataclass(slots=True)
class EmulatedRank:
    """State shared by the stages of one rank: the clock and the recorded events."""

    plan: Plan
    rank: int
    scale: float
    origin_s: float = 0.0
    copies: dict[Action, Future[float]] = field(default_factory=dict)
    """Ends of the copies that were issued, in seconds."""
    events: Events = field(default_factory=list)
    ended_s: dict[Action, float] = field(default_factory=dict)
    times_us: dict[Action, float] = field(init=False)

    def __post_init__(self) -> None:
        self.times_us = {
            action: step.time_us / len(step.actions) for step in self.plan.ranks[self.rank] for action in step.actions
        }

    def perform(self, action: Action, arrived_s: float) -> float:
        """Wait for the planned time of an action, from the arrival of its input. Returns when it ended, in seconds."""
        if action.op is Op.B and (loaded := self.copies.get(action._replace(op=Op.L))) is not None:
            arrived_s = max(arrived_s, loaded.result())
        _wait_until(arrived_s)
        start_s = time.monotonic()
        _wait_until(start_s + self.times_us[action] * self.scale * 1e-6)
        end_s = time.monotonic()
        self.ended_s[action] = end_s
        self.record(action, start_s, end_s)
        return end_s

    def record(self, action: Action, start_s: float, end_s: float) -> None:
        to_us = 1e6 / self.scale
        self.events.append((str(action), (start_s - self.origin_s) * to_us, (end_s - self.origin_s) * to_us))


class WaitingStage:
    """Implements `runtime.context.Stage` by timed waits: its hidden states are the time at which they were produced."""

    has_gradient = True

    def __init__(self, stage: int, rank: EmulatedRank) -> None:
        self.stage, self.rank, self.kv_cache = stage, rank, SlicedKVCache()
        self._inputs: dict[int, Tensor] = {}

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        plan = self.rank.plan
        message_us = plan.messages.activation_us[self.stage - 1][context.chunk] if self.stage > 0 else 0.0
        if hidden is not None:
            self._inputs[context.chunk] = hidden
        return self._perform(Action(Op.F, self.stage, context.chunk), hidden, message_us)

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        message_us = self.rank.plan.messages.gradient_us[self.stage][context.chunk] if grad is not None else 0.0
        done = self._perform(Action(Op.B, self.stage, context.chunk), grad, message_us)
        if (hidden := self._inputs.pop(context.chunk, None)) is not None:
            hidden.backward(done)

    def _perform(self, action: Action, arrived: Tensor | None, message_us: float) -> Tensor:
        sent_s = self.rank.origin_s if arrived is None else float(arrived.detach()[0])
        end_s = self.rank.perform(action, sent_s + message_us * self.rank.scale * 1e-6)
        return torch.tensor([end_s], dtype=torch.float64)

    def weight(self, action: Action) -> None:
        self._perform(action, None, 0.0)

    def before_last_gradient(self) -> None:
        """Do nothing: there are no gradients to reduce."""

    reduce_gradients = before_last_gradient

    def release_output(self, output: Tensor) -> None:
        """Do nothing: the output is only eight bytes."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        return (1,), torch.float64, torch.device("cpu")


class WaitingCopies:
    """Handlers of copies by timed waits: each copy waits for its link, then for its planned time.

    Copies run in a thread of their own, one at a time among ranks that share a link.
    """

    def __init__(self, rank: EmulatedRank, locks: Locks) -> None:
        plan, self._rank, self._locks = rank.plan, rank, locks
        self._times_us = {copy.action: copy.time_us for copy in plan.copies[rank.rank]}
        self._link = plan.host_links[rank.rank] if plan.host_links else rank.rank
        self._thread = ThreadPoolExecutor(max_workers=1)

    def handlers(self) -> Mapping[Op, Handler]:
        return {Op.O: self._issue, Op.L: self._issue, Op.FREE: self._wait}

    def _issue(self, executor: Executor, action: Action) -> None:
        self._rank.copies[action] = self._thread.submit(self._copy, action)

    def _wait(self, executor: Executor, action: Action) -> None:
        self._rank.copies[action._replace(op=Op.O)].result()

    def _copy(self, action: Action) -> float:
        with self._locks.get((self._link, action.op), nullcontext()):
            start_s = time.monotonic()
            time.sleep(self._times_us[action] * self._rank.scale * 1e-6)
            end_s = time.monotonic()
        self._rank.record(action, start_s, end_s)
        return end_s


def host_locks(plan: Plan, context: Any) -> Locks:
    """Return locks, from a multiprocessing context, for both directions of all host links that several ranks share."""
    links = plan.host_links
    return {(link, op): context.Lock() for link in set(links) if links.count(link) > 1 for op in (Op.O, Op.L)}


class WaitingShards:
    """Handlers of `S`, `N`, `T` and their collectives by timed waits: collectives carry the times at which inputs were ready.

    Args:
        spread, gather: communicators of all ranks, one for each collective.
    """

    def __init__(self, rank: EmulatedRank, spread: dist.ProcessGroup, gather: dist.ProcessGroup) -> None:
        self._rank, self._groups = rank, {Op.SPREAD: spread, Op.GATHER: gather}
        self._moving: dict[tuple[Op, int], tuple[dist.Work | None, Tensor]] = {}

    def handlers(self) -> Mapping[Op, Handler]:
        return dict.fromkeys(self._groups, self._send) | dict.fromkeys((Op.S, Op.N, Op.T), self._after)

    def _send(self, executor: Executor, action: Action) -> None:
        plan, chunk = self._rank.plan, action.chunk
        last, own = Action(Op.F, plan.num_stages - 1, chunk), Action(Op.S, self._rank.rank, chunk)
        source = last if action.op is Op.SPREAD else own
        when = torch.tensor([self._rank.ended_s.get(source, 0.0)], dtype=torch.float64)
        work = dist.all_reduce(when, dist.ReduceOp.MAX, group=self._groups[action.op], async_op=True)
        self._moving[action.op, chunk] = work, when

    def _after(self, executor: Executor, action: Action) -> None:
        """Run an action when the collective before it has brought its input."""
        carried = Op.SPREAD if action.op is Op.S else Op.GATHER
        work, when = self._moving[carried, action.chunk]
        if work is not None:
            work.wait()
            self._moving[carried, action.chunk] = None, when
        times_us = dict(self._rank.plan.messages.collective_us).get(carried)
        moved_us = times_us[action.chunk] if times_us else 0.0
        self._rank.perform(action, float(when[0]) + moved_us * self._rank.scale * 1e-6)


class WaitingAttention:
    """Handlers of attention on ranks of its own, and around those of stages, by timed waits: messages carry times."""

    def __init__(self, rank: EmulatedRank, links: Links | None, new_group: Callable[[], dist.ProcessGroup]) -> None:
        message = (1,), torch.float64, torch.device("cpu")
        self._rank, self._times_us = rank, dict(rank.plan.messages.message_us)
        own = None if links is None else attention_links(links, new_group)
        self._between = AttentionMessages(rank.plan, own, lambda kind, chunk: message)

    def handlers(self) -> Mapping[Op, Handler]:
        return {**self._between.handlers(), **dict.fromkeys(_GIVES, self._run)}

    def _run(self, executor: Executor, action: Action) -> None:
        op, number, chunk = action
        (takes, behind), (gives, ahead) = _TAKES[op], _GIVES[op]
        sites, arrived_s = range(self._rank.plan.num_stages - 1), self._rank.origin_s
        if number - behind in sites:
            key = takes, number - behind, chunk
            source, target = self._between.ranks(*key)
            moved_us = self._times_us[takes.send][chunk] if source != target else 0.0
            arrived_s = float(self._between.take(*key)[0]) + moved_us * self._rank.scale * 1e-6
        if op in HANDLERS:
            _wait_until(arrived_s)
            HANDLERS[op](executor, action)
        else:
            self._rank.perform(action, arrived_s)
        if number - ahead in sites:
            ended = torch.tensor([self._rank.ended_s[action]], dtype=torch.float64)
            self._between.put(gives, number - ahead, chunk, ended)


_TAKES = {Op.F: (RESULT, 1), A: (INPUTS, 0), Op.B: (INPUTS_GRADIENT, 0), G: (RESULT_GRADIENT, 0)}
_GIVES = {Op.F: (INPUTS, 0), A: (RESULT, 0), Op.B: (RESULT_GRADIENT, 1), G: (INPUTS_GRADIENT, 0)}
"""Messages that actions take from attention and give to it, and how far its site is below theirs."""


def emulate(plan: Plan, scale: float, timeout_s: float) -> list[Events]:
    """Emulate a checked plan, with its ranks as processes that sleep `scale` seconds per planned second.

    Returns:
        for every rank, ``(action, start_us, end_us)`` in order of start, copies included, divided by `scale`.

    Raises:
        EppError: a rank failed, or the whole emulation took longer than `timeout_s`.
    """
    events: list[Events] = run_ranks(_run, plan.num_ranks, plan, scale, host_locks(plan, CONTEXT), timeout_s=timeout_s)
    return events


def _run(rank: int, plan: Plan, scale: float, locks: Locks) -> Events:
    everyone, placement = range(plan.num_ranks), plan.placement
    links = None
    if plan.num_ranks > 1:
        links = Links.create(everyone, everyone, Groups(), directions(placement))
        links.connect(torch.device("cpu"))
    shared = EmulatedRank(plan, rank, scale)
    stages = {stage: WaitingStage(stage, shared) for stage, on in enumerate(placement) if on == rank}
    handlers: dict[Op, Handler] = {}
    if plan.copies and plan.copies[rank]:
        handlers |= WaitingCopies(shared, locks).handlers()
    unstreamed = replace(plan, kv_offload=())  # what it takes to stream caches is in the steps' times
    prepare(unstreamed, rank)
    handlers[Op.W] = lambda _, action: stages[action.stage].weight(action)
    if plan.num_ranks > 1:
        handlers |= WaitingShards(shared, *(dist.new_group(everyone) for _ in range(2))).handlers()
    if any(step.action.op is A for row in plan.ranks for step in row):
        handlers |= WaitingAttention(shared, links, lambda: dist.new_group(everyone)).handlers()
    executor = executor_of(unstreamed, rank, stages, links, handlers=handlers)
    torch.zeros(1, requires_grad=True).exp().backward(torch.ones(1))  # torch imports in a process's first one
    # Behind that, and behind all that connects ranks: both take seconds, in which others would wait.
    start = torch.tensor([time.monotonic() + _HEAD_START_S], dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX)
    shared.origin_s = float(start[0])
    _wait_until(shared.origin_s)
    executor.run()
    return sorted(shared.events, key=itemgetter(1, 2))


def _wait_until(when_s: float) -> None:
    if (left := when_s - time.monotonic()) > _SPIN_S:
        time.sleep(left - _SPIN_S)
    while time.monotonic() < when_s:
        pass
