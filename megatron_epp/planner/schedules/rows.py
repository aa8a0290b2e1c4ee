"""Parts of orders: a rank's forwards and backwards merged, and weight gradients put where they wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

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
