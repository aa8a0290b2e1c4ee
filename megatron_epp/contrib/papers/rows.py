"""Parts of orders: weight gradients put where they wait, and a rank's actions written as letters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_epp.plan import Action, Op

Row = Sequence[Action]


def with_waiting(row: Row, waiting: int) -> Iterator[Action]:
    """Put each weight gradient behind the backwards of the next `waiting` chunks.

    Args:
        row: actions of a rank without weight gradients.
    """
    left: deque[Action] = deque()
    for action in row:
        yield action
        if action.op is Op.B:
            left.append(action._replace(op=Op.W))
            if len(left) > waiting:
                yield left.popleft()
    yield from left


class LetterRow:
    """Actions of a rank with two stages, written as letters.

    F is a forward, X a whole backward and B one whose weight gradient waits; lower-case letters are of the first stage, others
    of the second. W is the weight gradient that has waited longest. Two letters in parentheses run in one step.

    Attributes:
        actions: in their order.
        joined: pairs of them that run in one step.

    Args:
        stages: of the rank, first and second.
    """

    def __init__(self, stages: Sequence[int], backwards: Sequence[int]) -> None:
        first, second = stages
        self.actions: list[Action] = []
        self.joined: set[tuple[Action, Action]] = set()
        self._stage = {"f": first, "x": first, "b": first, "F": second, "X": second, "B": second}
        self._forwards = {stage: iter(sorted(backwards)) for stage in stages}
        self._backwards = {stage: iter(backwards) for stage in stages}
        self._waiting: deque[Action] = deque()

    def run(self, letters: str) -> None:
        """Append the actions of some letters."""
        for letter in letters:
            if letter == ")":
                self.joined.add((self.actions[-2], self.actions[-1]))
            elif letter == "W":
                self.actions.append(self._waiting.popleft())
            elif letter != "(":
                stage, is_forward = self._stage[letter], letter in "fF"
                chunk = next((self._forwards if is_forward else self._backwards)[stage])
                self.actions.append(Action(Op.F if is_forward else Op.B, stage, chunk))
                if letter in "bB":
                    self._waiting.append(Action(Op.W, stage, chunk))
