"""Orders of other papers, for any chunk table: from the table and the number of ranks to every rank's actions.

All take the forwards in the order of the table, and the backwards sequence by sequence with descending slices. Their windows
are fixed by the sequence with the most slices, as papers with equal microbatches fix them by the number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, zip_longest
from typing import Literal

from megatron_epp.plan import Action, Chunk, Op, Segment
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, ListScheduling, Problem, slice_groups, tabulate
from megatron_epp.planner.orders.patterns import by_laps, descending, in_blocks
from megatron_epp.planner.orders.warm_up import Order
from scripts.bench.orders.unit import unit_costs

Groups = Sequence[range]
Row = list[Action]


def one_f_one_b(groups: Groups, placement: Placement) -> Order:
    """1F1B (over slices: Seq1F1B, 2406.03488)."""
    total, most, ranks = groups[-1].stop, max(map(len, groups)), placement.num_ranks
    rows = []
    for rank in range(ranks):
        forwards = [Action(Op.F, rank, c) for c in range(total)]
        backwards = [Action(Op.B, rank, c) for c in descending(groups)]
        rows.append(_one_each(forwards, backwards, ranks - rank - 2 + most))
    return tuple(rows)


def interleaved(groups: Groups, placement: Placement) -> Order:
    """Megatron's interleaved 1F1B (2104.04473): as many chunks as there are ranks on one stage, then on the next.

    Where slices need more forwards before the first backward than the warm-up has, it is longer by as many.
    """
    ranks, laps, total = placement.num_ranks, placement.num_chunks, groups[-1].stop
    ahead = list(range(laps))
    forwards = by_laps(range(total), ranks, ahead)
    backwards = by_laps(descending(groups), ranks, ahead[::-1])
    position = {unit: at for at, unit in enumerate(forwards)}
    late = max(position[laps - 1, c] - at for at, (_, c) in enumerate(backwards))
    rows = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        f = [Action(Op.F, stages[lap], c) for lap, c in forwards]
        b = [Action(Op.B, stages[lap], c) for lap, c in backwards]
        rows.append(_one_each(f, b, 2 * (ranks - rank - 1) + max(late, (laps - 1) * ranks)))
    return tuple(rows)


def slimpipe(groups: Groups, placement: Placement) -> Order:
    """SlimPipe's order (2504.14519): all stages of a rank within a sequence, its backwards in the reverse order.

    The paper's sequences have at least as many slices as there are ranks. Of shorter ones, as many together as it takes stand
    for one.
    """
    ranks, laps = placement.num_ranks, list(range(placement.num_chunks))
    each = [by_laps(run, _slim_group(len(run), ranks), laps) for run in _runs(groups, ranks)]
    alive = max(map(len, each))
    forwards, backwards = list(chain.from_iterable(each)), [unit for units in each for unit in reversed(units)]
    rows = []
    for rank in range(ranks):
        stages = placement.stages(rank)
        f = [Action(Op.F, stages[lap], c) for lap, c in forwards]
        b = [Action(Op.B, stages[lap], c) for lap, c in backwards]
        rows.append(_one_each(f, b, alive + 2 * (ranks - 1 - rank) - 1))
    return tuple(rows)


def zb_h1(groups: Groups, placement: Placement) -> Order:
    """ZB-H1 (2401.10241): 1F1B in which a rank's weight gradients wait for as many backwards as there are ranks before it."""
    return tuple(tuple(_with_waiting(row, rank)) for rank, row in enumerate(one_f_one_b(groups, placement)))


def v_block(name: str, groups: Groups, placement: Placement) -> Order:
    """V-Min, V-Half or V-ZB (2405.15362): a block for every chunk, each weight gradient in the first free unit of time."""
    late = max(map(len, groups)) - 1  # the first backward follows the forwards of all slices of its sequence
    blocks = range(groups[-1].stop)
    rows = []
    for rank in range(placement.num_ranks):
        taken = in_blocks(name, placement, rank, groups, blocks, [block + late for block in blocks])
        for unit, action in sorted(taken.items()):
            if action.op is Op.B:
                free = next(later for later in count(unit + 1) if later not in taken)
                taken[free] = action._replace(op=Op.W)
        rows.append(tuple(taken[unit] for unit in sorted(taken)))
    return tuple(rows)


def dualpipe_v(groups: Groups, placement: Placement) -> Order:
    """DualPipeV (DeepSeek): DualPipe folded in the middle, so that no weights are there twice. F and B do not overlap here.

    Raises:
        ValueError: there are fewer chunks than its phases have.
    """
    ranks, total, spare = placement.num_ranks, groups[-1].stop, max(map(len, groups)) - 1
    if total < 2 * ranks - 1 + spare:
        raise ValueError(f"DualPipeV needs at least {2 * ranks - 1 + spare} chunks; there are {total}")
    rows = []
    for rank in range(ranks):
        above, below = ranks - 1 - rank, rank + 1
        row = _Row(placement.stages(rank), descending(groups))
        row.run("f" * 2 * above + "fF" * (below + spare) + "BWF" * above)
        row.run("fXFx" * (total - ranks - above - spare) + "XFx" * above)
        row.run("Xx" * spare + "".join(("Xx" if at < below else "Bb")[at % 2] for at in range(2 * below)))
        row.run("Wb" * above + "W" * below)
        rows.append(tuple(row.made))
    return tuple(rows)


def hanayo(groups: Groups, placement: Placement) -> Order:
    """Hanayo's order (2308.15762) of one wave: what is ready runs, with as many chunks alive as ranks."""
    chunks = tuple(Chunk((Segment(number, at, at + 1),)) for number, group in enumerate(groups) for at in range(len(group)))
    problem = Problem(tuple(map(len, groups)), placement.rank_of, (UNLIMITED_BYTES,) * placement.num_ranks)
    return ListScheduling(1, alternating=True).order(
        chunks, tabulate(chunks, problem, unit_costs(placement.num_stages)), problem
    )


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


def _one_each(forwards: Row, backwards: Row, warm_up: int) -> tuple[Action, ...]:
    """Run the warm-up, then one forward and one backward in turn, then what is left."""
    pairs = zip_longest(forwards[warm_up:], backwards)
    return (*forwards[:warm_up], *(action for pair in pairs for action in pair if action is not None))


def _runs(groups: Groups, least: int) -> list[range]:
    """Join neighbours so that none but a single one has fewer than `least` chunks."""
    runs: list[range] = []
    for group in groups:
        if runs and (len(runs[-1]) < least or (group.stop == groups[-1].stop and len(group) < least)):
            runs[-1] = range(runs[-1].start, group.stop)
        else:
            runs.append(group)
    return runs


def _slim_group(slices: int, ranks: int) -> int:
    """Return the smallest divisor of a number of slices that is at least the number of ranks; all slices if there is none."""
    return next((size for size in range(ranks, slices) if slices % size == 0), slices)


def _with_waiting(row: Sequence[Action], waiting: int) -> Iterator[Action]:
    """Put each weight gradient behind the backwards of the next `waiting` chunks."""
    left: deque[Action] = deque()
    for action in row:
        yield action
        if action.op is Op.B:
            left.append(action._replace(op=Op.W))
            if len(left) > waiting:
                yield left.popleft()
    yield from left


@dataclass(frozen=True, slots=True)
class Builder:
    """An order of another paper.

    Attributes:
        build: from `slice_groups` of a chunk table and the placement to the order.
        kind: of the placement.
        num_chunks: stages of each rank.
        splits: the order has weight gradients of its own.
    """

    build: Callable[[Groups, Placement], Order]
    kind: Literal["looped", "v"]
    num_chunks: int
    splits: bool = False

    def placement(self, num_ranks: int) -> Placement:
        return Placement(self.kind, num_ranks, self.num_chunks)

    def order(self, chunks: Sequence[Chunk], num_ranks: int) -> Order:
        return self.build(slice_groups(chunks), self.placement(num_ranks))


BUILDERS: dict[str, Builder] = {
    "1F1B": Builder(one_f_one_b, "looped", 1),
    "ZB-H1": Builder(zb_h1, "looped", 1, splits=True),
    "interleaved, 2": Builder(interleaved, "looped", 2),
    "interleaved, 4": Builder(interleaved, "looped", 4),
    "SlimPipe": Builder(slimpipe, "looped", 2),
    "Hanayo": Builder(hanayo, "v", 2),
    "V-Min": Builder(partial(v_block, "V-Min"), "v", 2, splits=True),
    "V-Half": Builder(partial(v_block, "V-Half"), "v", 2, splits=True),
    "V-ZB": Builder(partial(v_block, "V-ZB"), "v", 2, splits=True),
    "DualPipeV": Builder(dualpipe_v, "v", 2, splits=True),
}
"""The orders by name; a number at the end is that of the stages of each rank."""
