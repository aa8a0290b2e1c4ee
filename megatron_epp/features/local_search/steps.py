"""Steps of the local search (threshold accepting) over orders and limits of recompute."""

from __future__ import annotations

from typing import NamedTuple

from megatron_epp.features.split_weights.split import EAGER_GAP, Filled, Whole, split_off
from megatron_epp.features.vocabulary.shard_insertion import Shards, insert
from megatron_epp.planner.kernels.codes import BACKWARD, FORWARD, KIND_BITS, KIND_MASK
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, compiled
from megatron_epp.planner.kernels.live_bytes import fit_rank, trim
from megatron_epp.planner.kernels.pass_table import PassTable
from megatron_epp.planner.kernels.timing import CopyColumns, Room, durations, play

NEVER_US = 1e300


class StepChoice(NamedTuple):
    """State that the local search changes: orders (`Codes.actions`), recompute, and limits of it where that fits, by item."""

    actions: IntegerList
    recompute_steps: IntegerList
    limit: IntegerList


class Facts(NamedTuple):
    """Inputs of the local search that stay fixed."""

    starts: IntegerList
    columns: PassTable
    group_of: IntegerList  # the sequence of each chunk
    caps: IntegerList
    caps_at: IntegerList  # bytes of the caps, by position among the actions
    # dear, dear_starts: the items of every rank, dearest recompute first, and where each rank's start; all zero where recompute
    # is not to be trimmed
    dear: IntegerList
    dear_starts: IntegerList
    no_split: IntegerList  # zeros by item
    # copies, away: none
    copies: CopyColumns
    splits: int  # nonzero if a choice is judged with its weight gradients split off, too, where that is faster
    # whole, filled: storage for these; the actions of `whole` are the judged choice's
    whole: Whole
    filled: Filled
    away: IntegerList
    # full, shards: columns of orders with the vocabulary's shards, and storage for these; without, `shards.line` is empty
    full: PassTable
    shards: Shards


class Spare(NamedTuple):
    """Working storage of the local search."""

    numbers: IntegerList  # state of the random numbers, one integer
    leaves: IntegerList  # a number per item
    seen: IntegerList  # two numbers per item
    took_us: FloatList  # a time per node


@compiled
def search(
    now: StepChoice,
    best: StepChoice,
    trial: StepChoice,
    facts: Facts,
    room: Room,
    spare: Spare,
    steps: int,
    period: int,
    start_us: float,
    bound_us: float,
    allowance: float,
) -> float:
    """Take steps from `now`; leaves the best choice in `best` and returns its makespan.

    A step that is a little slower than what it starts from is taken too, at first by `allowance` at most, less and less until
    the search returns to the best, every `period` steps. It stops at `bound_us`.
    """
    now_us = best_us = start_us
    copy_choice(now, best)
    for step in range(steps):
        if best_us <= bound_us:
            break
        if step % period == 0:
            copy_choice(best, now)
            now_us = best_us
        allowed_us = now_us + allowance * (1.0 - (step % period) / period)
        copy_choice(now, trial)
        first, stop = change(trial, facts, spare)
        if first >= stop:
            continue
        took_us = judge(trial, facts, first, stop, room, spare)
        if took_us > allowed_us:
            continue
        copy_choice(trial, now)
        now_us = took_us
        if took_us < best_us:
            best_us = took_us
            copy_choice(trial, best)
    return best_us


@compiled
def copy_choice(source: StepChoice, target: StepChoice) -> None:
    for at in range(len(source.actions)):
        target.actions[at] = source.actions[at]
    for item in range(len(source.recompute_steps)):
        target.recompute_steps[item] = source.recompute_steps[item]
        target.limit[item] = source.limit[item]


@compiled
def below(numbers: IntegerList, count: int) -> int:
    """The next random number under `count`: a linear congruence, in integers that are the same everywhere."""
    numbers[0] = (numbers[0] * 1664525 + 1013904223) % 4294967296
    return (numbers[0] >> 8) * count >> 24  # the high bits: the low ones of such a generator repeat soon


@compiled
def change(trial: StepChoice, facts: Facts, spare: Spare) -> tuple[int, int]:
    """Change one thing in place; return the range of ranks concerned, empty where the change is not allowed."""
    ranks, numbers = len(facts.starts) - 1, spare.numbers
    kind = below(numbers, 8)
    if kind < 4:
        rank = below(numbers, ranks)
        moved = move(trial.actions, rank, facts, 1 if kind < 3 else 1 + below(numbers, 4), numbers)
        return (rank, rank + 1) if moved else (0, 0)
    if kind < 6:
        allowed = trade(trial.actions, facts, numbers)
        for rank in range(ranks):
            allowed = allowed and legal(trial.actions, rank, facts, spare.seen)
        return (0, ranks) if allowed else (0, 0)
    item = below(numbers, len(trial.limit))
    most = facts.columns.most[item]
    limit = below(numbers, most + 1) if kind == 6 else (0 if trial.limit[item] > 0 else most)
    if limit == trial.limit[item]:
        return 0, 0
    trial.limit[item] = limit
    rank = facts.columns.rank_of[item // facts.columns.num_chunks]
    return rank, rank + 1


@compiled
def move(actions: IntegerList, rank: int, facts: Facts, far: int, numbers: IntegerList) -> bool:
    """Move an action of a rank past its next neighbours, as far as that is allowed; return True if it moved."""
    begin, stop = facts.starts[rank], facts.starts[rank + 1]
    if stop - begin < 2:
        return False
    at = begin + below(numbers, stop - begin - 1)
    moved = False
    for position in range(at, min(at + far, stop - 1)):
        first, second = actions[position], actions[position + 1]
        if not may_swap(first, second, facts):
            break
        actions[position], actions[position + 1] = second, first
        moved = True
    return moved


@compiled
def may_swap(first: int, second: int, facts: Facts) -> bool:
    """Return True if an action may swap places with the next one of its rank.

    On one stage, two actions of the same kind may not, nor may a forward and a backward of its own sequence.
    """
    chunks, op = facts.columns.num_chunks, first & KIND_MASK
    if (first >> KIND_BITS) // chunks != (second >> KIND_BITS) // chunks:
        return True
    together = facts.group_of[(first >> KIND_BITS) % chunks] == facts.group_of[(second >> KIND_BITS) % chunks]
    return op != second & KIND_MASK and not (together and op == FORWARD)


@compiled
def trade(actions: IntegerList, facts: Facts, numbers: IntegerList) -> bool:
    """Trade two chunks of different sequences that follow each other in the forwards or backwards of stage 0, on all ranks."""
    chunks = facts.columns.num_chunks
    which = below(numbers, 3)  # forwards, backwards, both
    op = BACKWARD if which == 1 else FORWARD
    rank = facts.columns.rank_of[0]
    wanted = below(numbers, max(1, chunks - 1))
    first = second = -1
    count = 0
    for at in range(facts.starts[rank], facts.starts[rank + 1]):
        if (actions[at] & KIND_MASK) == op and (actions[at] >> KIND_BITS) < chunks:
            if count == wanted:
                first = actions[at] >> KIND_BITS
            elif count == wanted + 1:
                second = actions[at] >> KIND_BITS
                break
            count += 1
    if second < 0 or facts.group_of[first] == facts.group_of[second]:
        return False
    for at in range(len(actions)):
        chunk = (actions[at] >> KIND_BITS) % chunks
        if (which == 2 or (actions[at] & KIND_MASK) == op) and chunk in (first, second):
            actions[at] += (second - first if chunk == first else first - second) << KIND_BITS
    return True


@compiled
def legal(actions: IntegerList, rank: int, facts: Facts, seen: IntegerList) -> bool:
    """Return True if on every stage of a rank a sequence's forwards ascend, and its backwards follow them and descend."""
    chunks, group_of = facts.columns.num_chunks, facts.group_of
    begin, stop = facts.starts[rank], facts.starts[rank + 1]
    for at in range(begin, stop):
        item = actions[at] >> KIND_BITS
        cell = item // chunks * chunks + group_of[item % chunks]
        seen[2 * cell] = seen[2 * cell + 1] = -1
    for at in range(begin, stop):
        item, op = actions[at] >> KIND_BITS, actions[at] & KIND_MASK
        c = item % chunks
        cell = item // chunks * chunks + group_of[c]
        if op == FORWARD:
            if seen[2 * cell] >= c or seen[2 * cell + 1] >= 0:
                return False
            seen[2 * cell] = c
        elif op == BACKWARD:
            if 0 <= seen[2 * cell + 1] <= c:
                return False
            seen[2 * cell + 1] = c
    return True


@compiled
def judge(trial: StepChoice, facts: Facts, first: int, stop: int, room: Room, spare: Spare) -> float:
    """Fit recompute again on the ranks ``first`` to ``stop`` and time it all; `NEVER_US` where it does not fit or deadlocks."""
    columns, starts = facts.columns, facts.starts
    for rank in range(first, stop):
        cap, static = facts.caps[rank], columns.static[rank]
        a, b = starts[rank], starts[rank + 1]
        fits = fit_rank(
            trial.actions, a, b, columns, trial.limit, facts.caps_at, static, trial.recompute_steps, spare.leaves, 0
        )
        if not fits and not fit_rank(
            trial.actions, a, b, columns, columns.most, facts.caps_at, static, trial.recompute_steps, spare.leaves, 0
        ):
            return NEVER_US
        dear = facts.dear[facts.dear_starts[rank] : facts.dear_starts[rank + 1]]
        if len(dear) > 0:
            trim(trial.actions, a, b, columns, trial.recompute_steps, cap, static, dear)
    steps, split_us = trial.recompute_steps, NEVER_US
    if facts.splits != 0:
        split_us = split_off(facts.whole, columns, steps, facts.caps, facts.away, facts.filled, EAGER_GAP)
    if len(facts.shards.line) > 0:
        took_us = insert(trial.actions, starts[:-1], starts[1:], facts.full, steps, facts.shards)
        if facts.splits != 0 and split_us >= 0:
            filled = facts.filled
            split_us = insert(filled.actions, filled.starts, filled.ends, facts.full, steps, facts.shards)
    else:
        durations(columns, steps, facts.no_split, spare.took_us)
        took_us = play(trial.actions, starts, columns, spare.took_us, facts.copies, room)
    return min(took_us, split_us) if took_us >= 0 else NEVER_US
