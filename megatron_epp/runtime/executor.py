"""Executor: runs one rank's lowered actions on its stages and links, in the order of the plan.

The dispatch table below is the only definition of what an op does at run time; an added kind of action brings its own handler.
The executor knows nothing of the model: a `Stage` runs forward and backward of one chunk, and `Links` carries tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from megatron_epp.plan import Action, EppError, Op, Plan, Remedy
from megatron_epp.plan.errors import reason_of
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.message_slots import slots_of
from megatron_epp.plan.operations import operation
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.context import ChunkContext, Program, Stage
from megatron_epp.runtime.links.links import Links, Receive
from megatron_epp.runtime.memory_use import OUT_OF_MEMORY
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.watchdog import Progress, ProgressPoint, Watchdog, device_mark

Handler = Callable[["Executor", Action], None]
"""Runs one action of an operation. It has the executor's plan, rank, stages, links and recorder."""


class RunError(EppError):
    """An action failed. The message holds the action, the rank and the grid."""


class OutOfMemoryRunError(RunError):
    """An action ran out of memory. The message holds the action, the rank, the planned bytes and the bytes in use."""


class Executor:
    """Run of one plan on one rank, once. Raises `RunError` if the plan or its actions are not for this rank or runtime.

    Args:
        links: communicators of the pipeline; None when it has a single rank.
        watchdog: ends the run when an action or a wait outlasts its limit.
        out_of_memory: describes an action of this plan and rank that an error has ended.
        handlers: of operations that `HANDLERS` has none for, collectives included, or in the place of one there.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        program: Program,
        links: Links | None = None,
        recorder: Recorder | None = None,
        watchdog: Watchdog | None = None,
        out_of_memory: Callable[[Plan, int, Action, Exception], str] = lambda *failed: str(failed[-1]),
        handlers: Mapping[Op, Handler] | None = None,
    ) -> None:
        self.plan, self.rank, self.stages, self.links = plan, rank, stages, links
        self.recorder = recorder or Recorder(enabled=False)
        self.watchdog, self.out_of_memory = watchdog, out_of_memory
        self._handlers = {**HANDLERS, **(handlers or {})}
        self._refuse_what_cannot_run(program.actions)
        self._actions, self.layouts, self._upload = program.actions, program.layouts, program.upload
        # A mark is an event on the device for each action: only a watchdog reads them.
        self._progress = Progress(device_mark if watchdog is not None else lambda: None)
        # Of a stage's actions the last in launch order stays: a backward is ahead of its own weight gradient.
        self._last_gradient = {a.stage: a for a in self._actions if a.op in (Op.B, Op.W)}
        self._short: Action | None = None
        """Action that found no memory; None if it was slots of messages."""
        # By stage and chunk, from a forward to its backward: what it ran with, its input, its output, and the output's gradient
        # where the next stage is on this rank.
        self._contexts: dict[tuple[int, int], ChunkContext] = {}
        self._leaves: dict[tuple[int, int], ReceiveLeaf] = {}
        self._outputs: dict[tuple[int, int], Tensor] = {}
        self._grads: dict[tuple[int, int], Tensor] = {}
        # By receive: messages that were asked for, and those that are here.
        self._arriving: dict[Action, Receive] = {}
        self._received: dict[Action, Tensor] = {}

    def _refuse_what_cannot_run(self, actions: Sequence[Action]) -> None:
        plan, rank = self.plan, self.rank
        if missing := sorted({action.op for action in actions} - set(self._handlers)):
            remedies = dict.fromkeys(Remedy("add", setting) for op in missing if (setting := operation(op).setting))
            raise RunError(f"this runtime has no handler for the plan's {', '.join(missing)} actions", *remedies)
        placed = [stage for stage, where in enumerate(plan.placement) if where == rank]
        if placed != sorted(self.stages):
            raise RunError(f"the plan places stages {placed} on pipeline rank {rank}, which has stages {sorted(self.stages)}")
        if plan.num_ranks > 1 and self.links is None:
            raise RunError(f"a plan over {plan.num_ranks} ranks needs links")
        if any(plan.kv_offload_on(number) and stage.kv_cache.offloaded is None for number, stage in self.stages.items()):
            raise RunError("the plan keeps keys and values in other memory than this run has", Remedy("add", "offload"))

    def run(self) -> None:
        """Execute every action of this rank in order, after which the stages hold their gradients. May be called once.

        Raises `RunError` if an action failed: `OutOfMemoryRunError`, which names flags that may help, if it ran out of memory.
        """
        self.recorder.begin()
        if self._upload is not None:
            self._upload.wait()  # on the device: offsets and tokens were uploaded on another stream
        watched = nullcontext() if self.watchdog is None else self.watchdog.watch(self._overdue, self._progress.point)
        with self._explained(), torch.set_grad_enabled(not self.plan.forward_only), watched:
            self._open_slots()  # here, where slots change between iterations: no message is under way
            for position, action in enumerate(self._actions):
                self._progress.reach(ProgressPoint(position))
                self.perform(action, self._handlers[action.op])
            self._progress.reach(ProgressPoint(len(self._actions)))
            if self.links is not None:
                self.links.finish_sends()
            for stage in self.stages.values():
                stage.kv_cache.assert_empty()
            # The host is done; the watch goes on until the device has passed all marks, the last sends among them.
            self._progress.reach(None)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise `RunError` with the action at which the body fails, and with bytes and advice if it finds no memory."""
        try:
            yield
        except OUT_OF_MEMORY as error:
            text = self.out_of_memory(self.plan, self.rank, self._short or self._actions[0], error)
            raise OutOfMemoryRunError(f"{self._where(self._progress.host)} failed: {text}") from None
        except Exception as error:
            raise RunError(self._describe(self._progress.host, f"failed: {reason_of(error)}")) from error
        finally:
            self._progress.close()

    def _open_slots(self) -> None:
        if self.links is None or not self._actions:
            return
        shape, dtype, device = next(iter(self.stages.values())).message(max(layout.message_tokens for layout in self.layouts))
        if self.links.slots_on_cpu or device.type != "cpu":
            self.links.open_slots(slots_of(self.plan, self.rank, self._actions), math.prod(shape) * dtype.itemsize, device)

    def perform(self, action: Action, handler: Handler) -> None:
        """Run an action, as a handler does that runs another one with its own."""
        try:
            handler(self, action)
        except OUT_OF_MEMORY:
            self._short = self._short or action  # an action that another one runs fails first
            raise

    # The handlers, one per op.

    def _forward(self, action: Action) -> None:
        _, stage, chunk = action
        hidden = self.message(action, Op.RECV_F) if stage > 0 else None
        no_graph = not self.differentiates(stage)
        if hidden is not None and not no_graph:
            leaf = self._leaves[stage, chunk] = ReceiveLeaf()
            hidden = leaf.enter(hidden)
        (table, view, group, begun, cache, shared, _), recompute = self.layouts[chunk], self.plan.recompute[stage][chunk]
        kv_cache = self.stages[stage].kv_cache
        if cache is not type(kv_cache):
            kv_cache = kv_cache.of_kind(cache)
        context = ChunkContext(chunk, table, kv_cache, view, recompute, no_graph, None, group, begun, shared)
        running = context.kv_cache.running(context.view, False)
        with self.recorder.action(action), running, torch.set_grad_enabled(not no_graph):
            output = self.stages[stage].forward(context, hidden)
        is_last = stage == self.plan.num_stages - 1
        is_local = not is_last and self._is_local(stage + 1)
        self._received.pop(action._replace(op=Op.RECV_F), None)  # the graph holds what it needs of the message
        if is_local:
            # Detached: the graphs of two stages are separate on one rank, too, so each backward ends at its own stage's input.
            self._received[Action(Op.RECV_F, stage + 1, chunk)] = output.detach()
            if not self.plan.forward_only:  # else what the next stage saves of it could not be offloaded
                self.stages[stage].release_output(output)
        if not self.plan.forward_only:
            self._contexts[stage, chunk] = context
        if not self.plan.forward_only or not (is_last or is_local):
            self._outputs[stage, chunk] = output

    def _backward(self, action: Action) -> None:
        _, stage, chunk = action
        grad = self.message(action, Op.RECV_B) if stage < self.plan.num_stages - 1 else None
        key = stage, chunk
        context, leaf, output = self._contexts[key], self._leaves.get(key), self._outputs[key]
        self.announce_last_gradient(action)  # ahead of the backward, in which hooks on the parameters' gradients run
        with self.recorder.action(action):
            if self.differentiates(stage):
                with context.kv_cache.running(context.view, True, context.recompute.attention_layers):
                    self.stages[stage].backward(context, output, grad)
        self._received.pop(action._replace(op=Op.RECV_B), None)
        del self._contexts[key], self._outputs[key]  # the graph goes with its backward, as plans count it
        if stage == 0:
            return
        if leaf is None:  # no stage before this one trains either: it waits for a message, and does not read it
            shape, dtype, device = self.stages[stage].message(self.layouts[chunk].message_tokens)
            gradient: Tensor | None = torch.zeros(shape, dtype=dtype, device=device)
        else:
            gradient = self._leaves.pop(key).gradient
        if gradient is None:
            raise RunError(f"stage {stage} gave its input no gradient")
        if self._is_local(stage - 1):
            self._received[Action(Op.RECV_B, stage - 1, chunk)] = gradient
        else:
            self._grads[key] = gradient

    def _send(self, action: Action) -> None:
        op, stage, chunk = action
        is_gradient = op is Op.SEND_B
        tensor = (self._grads if is_gradient else self._outputs)[stage, chunk]
        self._connected.send(tensor, self._peer(action), is_gradient)
        if is_gradient:  # the links hold what is still being sent
            del self._grads[stage, chunk]
            return
        # The output stays the root of its backward: only its storage is freed.
        self.stages[stage].release_output(tensor)
        if self.plan.forward_only:
            del self._outputs[stage, chunk]

    def _post_receive(self, action: Action) -> None:
        message = self.stages[action.stage].message(self.layouts[action.chunk].message_tokens)
        self._arriving[action] = self._connected.post_receive(*message, self._peer(action), action.op is Op.RECV_B)

    # What they share.

    def differentiates(self, stage: int) -> bool:
        """Return True if backwards of a stage compute gradients. Of a stage that does not train they are in the plan, too."""
        return not self.plan.forward_only and self.stages[stage].has_gradient

    def announce_last_gradient(self, action: Action) -> None:
        """Tell a stage if an action that is about to run gives it its last gradient."""
        if self._last_gradient[action.stage] == action:
            self.stages[action.stage].before_last_gradient()

    def message(self, action: Action, receive: Op) -> Tensor:
        """Return the message an action receives, from another rank or from this one. It is kept until the action is done."""
        key = action._replace(op=receive)
        if key not in self._received:
            here = self._progress.host
            assert here is not None  # an action runs
            self._progress.reach(here._replace(receiving=True))  # so that the watchdog tells a late message from slow compute
            with self.recorder.waiting(key):
                self._received[key] = self._arriving.pop(key).wait()
            self._progress.reach(here)
        return self._received[key]

    def _peer(self, message: Action) -> int:
        return self.plan.placement[message.stage + (1 if message.op in (Op.SEND_F, Op.RECV_B) else -1)]

    def _is_local(self, stage: int) -> bool:
        return self.plan.placement[stage] == self.rank

    @property
    def _connected(self) -> Links:
        assert self.links is not None  # checked at the start
        return self.links

    def _overdue(self) -> str:
        assert self.watchdog is not None
        point = self._progress.point()
        return self._describe(point, f"has not finished after {self.watchdog.limit()}, {self._waits_for(point)}")

    def _waits_for(self, point: ProgressPoint | None) -> str:
        if point is None or point.position == len(self._actions):
            return "waiting for other ranks to take its messages"
        action = self._actions[point.position]
        if action.op in (Op.SEND_F, Op.SEND_B):
            return f"waiting for rank {self._peer(action)} to take the message before this one"
        if not point.receiving:
            return "in compute or in a collective of its own"
        peer = action.stage + (-1 if action.op is Op.F else 1)
        return f"waiting for {action._replace(stage=peer)} of rank {self.plan.placement[peer]}"

    def _describe(self, point: ProgressPoint | None, what: str) -> str:
        return f"{self._where(point)} {what}\n{to_grid(self.plan)}"

    def _where(self, point: ProgressPoint | None) -> str:
        position = len(self._actions) if point is None else point.position
        step = f"action {self._actions[position]}" if position < len(self._actions) else "the end of the plan"
        return f"pipeline rank {self.rank}, step {position}, {step}"


HANDLERS: Mapping[Op, Handler] = {
    Op.F: Executor._forward,
    Op.B: Executor._backward,
    Op.SEND_F: Executor._send,
    Op.SEND_B: Executor._send,
    Op.RECV_F: Executor._post_receive,
    Op.RECV_B: Executor._post_receive,
    Op.REDUCE: lambda run, action: run.stages[action.stage].reduce_gradients(),
}
"""Handlers of the operations of every run; features have others, and some around these. A handler must keep no reference to the
executor: an executor in a cycle of references, and its tensors, would stay until the garbage collector runs."""
