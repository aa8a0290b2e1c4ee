"""Two actions in one step: each runs while the other exchanges activations between tensor-parallel ranks.

The two run in a thread each, but only one at a time. One launches work until its exchange has begun, then it is the other's
turn; when its turn comes again, its stream waits for the exchange and it goes on. So, on one compute stream, parts of a forward
alternate with parts of a backward, each from one exchange to the next, and the exchange of each is overlapped with the compute
of the other. All tensor-parallel ranks change turns at the same exchanges, so they launch them in the same order.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from megatron_epp.features.split_weights import deferred_gradients
from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.attributes import having
from megatron_epp.runtime.autograd.saved import tracking_in_this_thread
from megatron_epp.runtime.executor import Executor, Handler
from megatron_epp.runtime.side_thread import SideThread

_BACKWARDS = {Op.B, Op.W}
"""Operations that cannot take turns with each other: autograd runs both in its one thread of a device, which would wait for
itself."""
PairRunner = Callable[[Callable[[], None], Callable[[], None]], int]
"""Runs two actions of a step that need nothing of each other; returns how often it changed between them."""


class AbandonedError(EppError):
    """The other action of the step has failed, so this one ends too."""


class Turns:
    """Turns of two threads, of which the first begins.

    The action that runs is the one whose turn it is, and not known by its thread: autograd runs parts of a backward in threads
    of its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._whose, self._ended, self._failed = 0, [False, False], False
        self.num_changes = 0

    def hand_over(self) -> None:
        """Let the other run until it hands over or ends. Raises `AbandonedError` if it has failed."""
        with self._changed:
            me = self._whose
            if not self._ended[1 - me]:
                self._give(1 - me)
                self._wait(me)
            if self._failed:
                raise AbandonedError("the other action of its step failed")

    def run(self, number: int, body: Callable[[], None]) -> None:
        """Run one of the two, 0 or 1, when its turn comes, and leave the rest to the other."""
        with self._changed:
            self._wait(number)
        try:
            if not self._failed:
                body()
        except BaseException:
            self._failed = True
            raise
        finally:
            with self._changed:
                self._ended[number] = True
                self._give(1 - number)

    def _give(self, number: int) -> None:
        self._whose = number
        self.num_changes += 1
        self._changed.notify_all()

    def _wait(self, number: int) -> None:
        self._changed.wait_for(lambda: self._whose == number)


_current: Turns | None = None


def hand_over() -> None:
    """Let the other action of the step run, if there is one: for actions without exchange, between two parts of them."""
    if _current is not None:
        _current.hand_over()


Exchanges = Callable[[Turns], AbstractContextManager[None]]
"""Makes a context manager in which every exchange between tensor-parallel ranks hands over the turn once it has begun."""


def run_together(first: Callable[[], None], second: Callable[[], None], exchanges: Exchanges) -> int:
    """Run two actions that need nothing of each other, the first in this thread. Raises what the one that failed first raised.
    Returns the number of times that the turn changed; 2 if the second ran when the first had ended.
    """
    global _current
    turns, errors = Turns(), list[BaseException]()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def in_thread() -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream), tracking_in_this_thread():
            _catch(lambda: turns.run(1, second), errors)

    with exchanges(turns):
        _current, deferred_gradients.after_each = turns, hand_over
        second_ended = _second_thread().submit(in_thread)
        _catch(lambda: turns.run(0, first), errors)
        second_ended.result()
        _current = deferred_gradients.after_each = None
    if errors:
        raise next((error for error in errors if not isinstance(error, AbandonedError)), errors[0])
    return turns.num_changes


@cache
def _second_thread() -> SideThread:
    """Return the thread of second actions, one for all steps: attention's library keeps its kernel plans by thread."""
    return SideThread("epp-second-action")


os.register_at_fork(after_in_child=_second_thread.cache_clear)  # a forked process has no thread of its parent's


def _catch(body: Callable[[], None], errors: list[BaseException]) -> None:
    try:
        body()
    except BaseException as error:
        errors.append(error)


class Collective(NamedTuple):
    """Function of a module that launches a collective, with the signature that it has in `torch.distributed`."""

    module: Any
    name: str


def exchanges_of(collectives: Sequence[Collective], group: Any) -> Exchanges:
    """Return the exchanges that are collectives of a group. Collectives of other groups run as they are.

    A call that waits for its end hands over between the launch and the wait, and so does the wait for one that does not.
    """

    def handing_over(original: Callable[..., Any], turns: Turns) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            if named.get("group") is not group:
                return original(*args, **named)
            is_async = named.pop("async_op", False)
            work = _Work(original(*args, **named, async_op=True), turns)
            return work if is_async else work.wait()

        return launch

    @contextmanager
    def exchanging(turns: Turns) -> Iterator[None]:
        with ExitStack() as held:
            for module, name in collectives:
                held.enter_context(having(module, **{name: handing_over(getattr(module, name), turns)}))
            yield

    return exchanging


class _Work:
    """Handle of a collective that has begun, as `torch.distributed` returns it; its wait hands over first."""

    def __init__(self, work: Any, turns: Turns) -> None:
        self._work, self._turns = work, turns

    def wait(self) -> None:
        self._turns.hand_over()
        self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class StepsOfTwo:
    """Handlers that run the other action of a step with the first, if they can take turns, and not once more by itself."""

    def __init__(self, plan: Plan, rank: int, run_pair: PairRunner, handlers: Mapping[Op, Handler]) -> None:
        self._run_pair, self._inner, self.num_turns = run_pair, handlers, 0
        streams_kv = any(plan.placement[entry.stage] == rank for entry in plan.kv_offload)  # for one action at a time
        self._pairs = {
            step.action: step.also[0]
            for step in plan.ranks[rank]
            if len(step.also) == 1 and not streams_kv and not {action.op for action in step.actions} <= _BACKWARDS
        }
        self._done = set[Action]()

    def handlers(self) -> dict[Op, Handler]:
        return dict.fromkeys({action.op for pair in self._pairs.items() for action in pair}, self._run)

    def _run(self, executor: Executor, action: Action) -> None:
        handler, other = self._inner[action.op], self._pairs.get(action)
        if action in self._done:
            self._done.remove(action)
        elif other is None:
            handler(executor, action)
        else:
            self._done.add(other)
            second = partial(executor.perform, other, self._inner[other.op])
            self.num_turns += self._run_pair(partial(handler, executor, action), second)
