"""Parts of orders: a rank's forwards and backwards merged, and weight gradients put where they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from megatron_epp.plan import Action, Op

Row = Sequence[Action]


def actions(op: Op, stage: int, chunks: Sequence[int]) -> list[Action]:
    """Return an operation of one stage for several chunks.

    Args:
        op: the operation.
        stage: where it runs.
        chunks: in the order in which they run.
    """
    return [Action(op, stage, c) for c in chunks]


def one_each(forwards: Row, backwards: Row, warm_up: int) -> tuple[Action, ...]:
    """Run the warm-up, then one forward and one backward in turn, then what is left.

    Args:
        forwards, backwards: of a rank, in order.
        warm_up: number of forwards before the first backward is due.
    """
    pairs = zip_longest(forwards[warm_up:], backwards)
    return (*forwards[:warm_up], *(action for pair in pairs for action in pair if action is not None))


def with_waiting(row: Row, waiting: int) -> Iterator[Action]:
    """Put each weight gradient behind the backwards of the next `waiting` chunks.

    Args:
        row: actions of a rank without weight gradients.
        waiting: number of weight gradients that wait.
    """
    left: deque[Action] = deque()
    for action in row:
        yield action
        if action.op is Op.B:
            left.append(action._replace(op=Op.W))
            if len(left) > waiting:
                yield left.popleft()
    yield from left
