"""DualPipeV (DeepSeek-AI, DualPipe's repository, 2025): DualPipe folded in the middle, so that no weights are on two ranks.

Kept: the phases of the order. Changed: a forward and a backward that run as one there run one after the other here, and
microbatches are chunks; sequences with slices need as many more forwards in the warm-up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.planner.orders.patterns import descending
from megatron_epp.planner.orders.warm_up import Order
from megatron_epp.planner.schedules.fixed_order import Batch


def dualpipe_v(batch: Batch) -> Iterator[Order]:
    """Yield the order. Raises `PlanError` if there are fewer chunks than its phases have."""
    ranks, total, spare = batch.placement.num_ranks, batch.num_chunks, batch.most_slices - 1
    if total < 2 * ranks - 1 + spare:
        raise PlanError(
            f"DualPipeV needs at least {2 * ranks - 1 + spare} chunks on {ranks} ranks; there are {total}: give it more "
            "sequences or fewer ranks"
        )
    rows = []
    for rank in range(ranks):
        above, below = ranks - 1 - rank, rank + 1
        row = _Row(batch.placement.stages(rank), descending(batch.groups))
        row.run("f" * 2 * above + "fF" * (below + spare) + "BWF" * above)
        row.run("fXFx" * (total - ranks - above - spare) + "XFx" * above)
        row.run("Xx" * spare + "".join(("Xx" if at < below else "Bb")[at % 2] for at in range(2 * below)))
        row.run("Wb" * above + "W" * below)
        rows.append(tuple(row.made))
    yield tuple(rows)


class _Row:
    """Actions of a rank with two stages, written as letters.

    F is a forward, X a whole backward and B one whose weight gradient waits; lower-case letters are of the first stage, others
    of the second. W is the weight gradient that has waited longest.
    """

    def __init__(self, stages: Sequence[int], backwards: Sequence[int]) -> None:
        first, second = stages
        self.made: list[Action] = []
        self._stage = {"f": first, "x": first, "b": first, "F": second, "X": second, "B": second}
        self._forwards = {stage: iter(sorted(backwards)) for stage in stages}
        self._backwards = {stage: iter(backwards) for stage in stages}
        self._waiting: deque[Action] = deque()

    def run(self, letters: str) -> None:
        """Append the actions of some letters."""
        for letter in letters:
            if letter == "W":
                self.made.append(self._waiting.popleft())
                continue
            stage = self._stage[letter]
            is_forward = letter in "fF"
            c = next((self._forwards if is_forward else self._backwards)[stage])
            self.made.append(Action(Op.F if is_forward else Op.B, stage, c))
            if letter in "bB":
                self._waiting.append(Action(Op.W, stage, c))
