"""Handlers of the operations of vocabulary shards (`plan.vocabulary_operations`) on one rank: S, N, T and their collectives.

The asynchronous broadcast, and reductions on a side stream (on CPU, a thread), have communicators of their own, to overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.features.vocabulary.shards import Logits, Shard, ShardSummary, logits_pass, scale_part, weight_gradient
from megatron_epp.plan import Action, Op
from megatron_epp.runtime.executor import Executor, Handler
from megatron_epp.runtime.side_thread import Background


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """Communicators of a pipeline's vocabulary shards."""

    root: int  # global rank of the last stage
    spread: dist.ProcessGroup  # ranks of the pipeline, for broadcasts
    gather: dist.ProcessGroup  # the same ranks, for the reduction of gradients
    statistics: dist.ProcessGroup  # all ranks that hold rows of the vocabulary: the pipeline's and the tensor-parallel group's


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens of a chunk that pass the output layer."""

    shape: tuple[int, int]  # of the broadcast, this rank's part of the last stage's output ``[rows, in]``
    # labels, weights: ``[tokens]``; a weight is the gradient of a token's loss
    labels: Tensor
    weights: Tensor
    whole: Callable[[Tensor], Tensor]  # returns the input of the output layer, ``[tokens, in]``, given the broadcast


class LastStage(Protocol):
    """The last stage as the shards need it."""

    def spread(self, chunk: int) -> Tensor:
        """Return what is broadcast of a chunk's output, of shape `Targets.shape`."""

    def finish(self, chunk: int, losses: Tensor, gradient: Tensor | None) -> None:
        """Take the losses of a chunk's tokens, and the gradient of the output layer's input for tokens of weight one."""


class Rank(Protocol):
    """Interface of the model of this rank to the shards."""

    def targets(self, chunk: int) -> Targets: ...
    def message(self) -> tuple[torch.dtype, torch.device]:
        """Return dtype and device of broadcasts."""

    def shard(self) -> Shard: ...
    def take_gradient(self, compute: Callable[[], Tensor]) -> None:
        """Compute the gradient of the shard's weight and pass it on as any gradient of the weight."""


@dataclass(slots=True)
class _State:
    targets: Targets
    x: Tensor  # what is broadcast; from `S` on the input of the output layer
    work: dist.Work | None  # the broadcast, until `S`
    # Called where `S` has waited for the broadcast, to end its time; None where a callback does
    timed: Callable[[], None] | None = None
    logits: Logits | None = None
    log_sum: Tensor | None = None
    losses: Tensor | None = None
    ready: Callable[[], None] | None = None  # waits for the end of the reductions; None once it has been called
    num_uses: int = 0  # operations of this rank that still need it, after the reductions


class PipelineShards:
    """Operations of one rank's shard during an iteration; reductions run in the background."""

    def __init__(self, rank: Rank, groups: ShardGroups, last: LastStage | None, background: Background) -> None:
        self._rank, self._groups, self._last, self._background = rank, groups, last, background
        self._states: dict[int, _State] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of chunks from their broadcast to their last operation on this rank, without statistics of the logits."""
        states = list(self._states.values())
        held = ((state.x, *((state.logits.part, state.logits.exponentials) if state.logits else ())) for state in states)
        return sum(tensor.nbytes for tensors in held for tensor in tensors if tensor is not None)

    def handlers(self) -> Mapping[Op, Handler]:
        return {
            Op.SPREAD: self._spread,
            Op.S: self._logits,
            Op.GATHER: self._gather,
            Op.N: self._loss,
            Op.T: self._weight,
        }

    @torch.no_grad()
    def _spread(self, executor: Executor, action: Action) -> None:
        targets = self._rank.targets(action.chunk)
        dtype, device = self._rank.message()
        if self._last is None:
            x = torch.empty(targets.shape, dtype=dtype, device=device)
        else:
            x = self._last.spread(action.chunk)
        ended = executor.recorder.collective(action)
        work = dist.broadcast(x, self._groups.root, group=self._groups.spread, async_op=True)
        # On a GPU a callback runs on a stream that waits for the broadcast, and with one hardware queue all that is launched
        # later would wait behind it. There the time ends where S has waited for it.
        by_callback = x.device.type == "cpu"
        if executor.recorder.enabled and by_callback:
            work.get_future().add_done_callback(lambda _: ended())
        uses = (self._last is not None) + (not executor.plan.forward_only)
        self._states[action.chunk] = _State(targets, x, work, None if by_callback else ended, num_uses=uses)

    @torch.no_grad()
    def _logits(self, executor: Executor, action: Action) -> None:
        state = self._states[action.chunk]
        assert state.work is not None  # it was started
        with executor.recorder.waiting(action._replace(op=Op.SPREAD)):
            state.work.wait()
        if state.timed is not None:
            state.timed()
        with executor.recorder.action(action):
            state.x = state.targets.whole(state.x)
            state.work = None
            state.logits = logits_pass(state.x, state.targets.labels, self._rank.shard(), not executor.plan.forward_only)

    def _gather(self, executor: Executor, action: Action) -> None:
        state = self._states[action.chunk]
        # In the background only: nothing else uses `gather` and `statistics`, so all ranks launch their collectives in the
        # order of the plan.
        state.ready = self._background.start(partial(self._reduce, state, partial(executor.recorder.collective, action)))
        if state.num_uses == 0:
            self._wait(executor, action)
            del self._states[action.chunk]

    @torch.no_grad()
    def _reduce(self, state: _State, begin: Callable[[], Callable[[], None]]) -> None:
        """Combine ranks' statistics, and reduce the input's gradient in fp32; `begin` starts to time that."""
        logits, groups, ended = state.logits, self._groups, begin()
        assert logits is not None  # S has run
        summary, most = logits.summary, logits.summary.most.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=groups.statistics)
        dist.all_reduce(added := summary.addends(most), group=groups.statistics)
        state.losses, state.log_sum = ShardSummary.combined(most, added)
        if logits.part is not None:
            part = scale_part(logits, state.log_sum, state.targets.labels, self._rank.shard())
            dist.reduce(part, groups.root, group=groups.gather)
        ended()

    def _loss(self, executor: Executor, action: Action) -> None:
        state = self._wait(executor, action)
        assert self._last is not None  # N is on the last stage's rank
        assert state.losses is not None
        assert state.logits is not None
        with executor.recorder.action(action):
            self._last.finish(action.chunk, state.losses, state.logits.part)
        state.logits.part = None
        self._used(action.chunk)

    def _weight(self, executor: Executor, action: Action) -> None:
        state = self._wait(executor, action)
        x, logits, log_sum, targets = state.x, state.logits, state.log_sum, state.targets
        assert logits is not None
        assert log_sum is not None
        with executor.recorder.action(action):
            shard = self._rank.shard()
            self._rank.take_gradient(lambda: weight_gradient(x, targets.labels, logits, log_sum, targets.weights, shard))
        logits.exponentials = None
        self._used(action.chunk)

    def _used(self, chunk: int) -> None:
        self._states[chunk].num_uses -= 1
        if self._states[chunk].num_uses == 0:
            del self._states[chunk]

    def _wait(self, executor: Executor, action: Action) -> _State:
        """Return a chunk's state, after the rank (on a GPU, its current stream) has waited for the reductions of the chunk."""
        state = self._states[action.chunk]
        if state.ready is None:
            return state
        with executor.recorder.waiting(action._replace(op=Op.GATHER)):
            state.ready()
        state.ready = None
        for result in (state.losses, state.log_sum):
            if result is not None and result.is_cuda:  # allocated on the side stream
                result.record_stream(torch.cuda.current_stream())
        return state
