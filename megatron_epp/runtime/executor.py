"""Interprets one rank's part of a plan.

The dispatch table below is the only place that says what an op does at run time. The executor knows nothing of the model: a
`Stage` runs forward and backward of one chunk, `Links` carries tensors, and the plan says everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from megatron_epp.runtime.context import ChunkContext, chunk_context
from megatron_epp.runtime.links import Links, Receive
from megatron_epp.runtime.relay import KVRelay
from megatron_epp.runtime.trace import Recorder
from megatron_epp.runtime.watchdog import Watchdog
from megatron_epp.schedule import Action, EppError, Op, Plan
from megatron_epp.schedule.lowering import lower
from megatron_epp.schedule.text import to_grid


class RunError(EppError):
    """An action failed. The message holds the action, the rank and the grid."""


class Stage(Protocol):
    """A pipeline stage as the executor needs it."""

    relay: KVRelay

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        """Run a chunk. Returns the hidden states to hand on, or on the last stage the loss (a scalar)."""

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        """Differentiate `output`; `grad` is None on the last stage."""

    def before_last_backward(self) -> None:
        """Called once per iteration, ahead of the stage's last backward: gradient reduction may start."""

    def release_output(self, output: Tensor) -> None:
        """The output has been sent; its storage is no longer needed."""

    def message(self, num_tokens: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
        """Shape, dtype and device of the hidden states of a chunk with so many (padded) tokens."""


class Executor:
    """Runs one plan on one rank.

    Args:
        plan: a checked plan.
        rank: this rank's index in the pipeline.
        stages: the stages placed on this rank.
        links: communicators of the pipeline; None when it has a single rank.
        recorder: where the times go.
        watchdog: ends the run when an action or a wait outlasts its limit.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        links: Links | None = None,
        recorder: Recorder | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.plan, self.rank, self.stages, self.links = plan, rank, stages, links
        self.recorder = recorder or Recorder(enabled=False)
        self.watchdog = watchdog
        self._handlers: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.SEND_F: self._send_activation,
            Op.RECV_F: self._post_activation,
            Op.SEND_B: self._send_gradient,
            Op.RECV_B: self._post_gradient,
        }
        self._contexts: dict[tuple[int, int], ChunkContext] = {}
        self._inputs: dict[tuple[int, int], Tensor | None] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._grads: dict[tuple[int, int], Tensor] = {}
        self._arriving: dict[tuple[Op, int, int], Receive] = {}
        self._local: dict[tuple[Op, int, int], Tensor] = {}
        self._last_backward = {a.stage: a for a in plan.actions(rank) if a.op is Op.B}

    def run(self) -> None:
        """Execute every action of this rank in order. Raises `RunError` naming the action that failed."""
        actions = lower(self.plan)[self.rank]
        missing = sorted({a.op.value for a in actions if a.op not in self._handlers})
        if missing:
            raise RunError(f"this runtime has no handler for the plan's {', '.join(missing)} actions")
        self.recorder.begin()
        for position, action in enumerate(actions):
            try:
                with self._watched(action, position):
                    self._handlers[action.op](action)
            except EppError:
                raise
            except Exception as error:
                raise RunError(self._describe(action, position, f"failed: {type(error).__name__}: {error}")) from error
        if self.links is not None:
            self.links.finish_sends()
        for stage in self.stages.values():
            stage.relay.assert_empty()

    # The handlers, one per op.

    def _forward(self, action: Action) -> None:
        _, stage, chunk = action
        context = chunk_context(self.plan, stage, chunk, self.stages[stage].relay)
        hidden = self._take(Op.RECV_F, action) if stage > 0 else None
        if hidden is not None and not self.plan.forward_only:
            hidden.requires_grad_()
        with self.recorder.action(action):
            output = self.stages[stage].forward(context, hidden)
        is_last = stage == self.plan.num_stages - 1
        is_local = not is_last and self._is_local(stage + 1)
        if is_local:
            self._local[Op.RECV_F, stage + 1, chunk] = output.detach()
        if not self.plan.forward_only:
            self._contexts[stage, chunk], self._inputs[stage, chunk] = context, hidden
        if not self.plan.forward_only or not (is_last or is_local):
            self._outputs[stage, chunk] = output

    def _backward(self, action: Action) -> None:
        _, stage, chunk = action
        key = stage, chunk
        grad = self._take(Op.RECV_B, action) if stage < self.plan.num_stages - 1 else None
        if self._last_backward[stage] == action:
            self.stages[stage].before_last_backward()
        output, hidden = self._outputs.pop(key), self._inputs.pop(key)
        with self.recorder.action(action):
            self.stages[stage].backward(self._contexts.pop(key), output, grad)
        if hidden is None:
            return
        assert hidden.grad is not None
        if self._is_local(stage - 1):
            self._local[Op.RECV_B, stage - 1, chunk] = hidden.grad
        else:
            self._grads[key] = hidden.grad

    def _send_activation(self, action: Action) -> None:
        key = action.stage, action.chunk
        output = self._outputs.pop(key) if self.plan.forward_only else self._outputs[key]
        self._links.send(output, self.plan.placement[action.stage + 1], gradient=False)
        self.stages[action.stage].release_output(output)

    def _send_gradient(self, action: Action) -> None:
        grad = self._grads.pop((action.stage, action.chunk))
        self._links.send(grad, self.plan.placement[action.stage - 1], gradient=True)

    def _post_activation(self, action: Action) -> None:
        self._post(action, peer=self.plan.placement[action.stage - 1], gradient=False)

    def _post_gradient(self, action: Action) -> None:
        self._post(action, peer=self.plan.placement[action.stage + 1], gradient=True)

    # What they share.

    def _post(self, action: Action, peer: int, gradient: bool) -> None:
        message = self.stages[action.stage].message(self.plan.padded_tokens(action.chunk))
        self._arriving[action] = self._links.post_receive(*message, peer=peer, gradient=gradient)

    def _take(self, op: Op, action: Action) -> Tensor:
        key = (op, action.stage, action.chunk)
        local = self._local.pop(key, None)
        if local is not None:
            return local
        with self.recorder.waiting():
            return self._arriving.pop(Action(*key)).wait()

    def _is_local(self, stage: int) -> bool:
        return self.plan.placement[stage] == self.rank

    @property
    def _links(self) -> Links:
        assert self.links is not None, "a plan over several ranks needs links"
        return self.links

    def _watched(self, action: Action, position: int) -> nullcontext[None]:
        if self.watchdog is None:
            return nullcontext()
        limit = self.watchdog.limit_s
        text = f"has not finished after {limit:.0f} s (--epp-wait-limit-seconds), {self._waits_for(action)}"
        return self.watchdog.watch(lambda: self._describe(action, position, text))  # type: ignore[return-value]

    def _waits_for(self, action: Action) -> str:
        source = {Op.F: Op.RECV_F, Op.B: Op.RECV_B}.get(action.op)
        pending = source is not None and Action(source, action.stage, action.chunk) in self._arriving
        if not pending:
            return "in compute or in a collective of its own"
        peer = action.stage + (-1 if action.op is Op.F else 1)
        return f"waiting for {Action(action.op, peer, action.chunk)} of rank {self.plan.placement[peer]}"

    def _describe(self, action: Action, position: int, what: str) -> str:
        return f"pipeline rank {self.rank}, step {position}, action {action} {what}\n{to_grid(self.plan)}"
