"""Compares a framework's whole microbatches with and without shared prefixes, on 8 GPUs of 72 GiB, on paper.

    python -m scripts.bench.microbatch_prefixes               all cases of Llama 3 8B at PP 8

separate    microbatches by plans, as without shared prefixes
inside      shared inside each microbatch alone, as other systems do
all         shared with all microbatches; losses read the logits of all tokens
responses   the same, where losses read those of responses alone

Samples are those of `scripts.bench.trees`. A framework deals them out by work, the most first, to as few microbatches as a
budget of tokens needs, so groups are scattered. Times are by formulas for H100s, means of draws, as multiples of `responses`.
"""

from __future__ import annotations

import heapq
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from statistics import fmean

from megatron_epp.cost.whole_microbatches import of_whole_microbatches
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.planner import Options
from megatron_epp.planner.microbatches import plan_microbatches
from scripts.bench.frame import Bench, Figures
from scripts.bench.trees import CASES, Batch, Ways
from scripts.tables import table

WAYS = "separate", "inside", "all", "responses"
_PAIRS_PER_TOKEN = 24576
"""Pairs of a query and a key that take as long as all else of a token, as frameworks assume for an 8B model."""

Case = tuple[Callable[[Random], Batch], int]


def balanced(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Deal sequences out to microbatches of equal work, as few as keep to a budget of tokens, or have a sequence above it."""
    for count in range(min(-(-sum(lengths) // budget), len(lengths)), len(lengths) + 1):
        least = [(0, number, list[int]()) for number in range(count)]
        for q in sorted(range(len(lengths)), key=lambda q: -lengths[q]):
            work, number, members = heapq.heappop(least)
            heapq.heappush(least, (work + lengths[q] * (_PAIRS_PER_TOKEN + lengths[q]), number, [*members, q]))
        if max(sum(lengths[q] for q in members) for _, _, members in least) <= budget:
            break
    return sorted(sorted(members) for _, _, members in least if members)


def row(args: Namespace, case: Case) -> Figures:
    drawn = [makespans_us(case[0](Random(seed)), case[1]) for seed in range(args.draws)]
    return {name: fmean(each[name] for each in drawn) for name in WAYS}


def makespans_us(batch: Batch, budget: int) -> dict[str, float]:
    ways = Ways(batch)
    microbatches, costs = balanced(batch.lengths, budget), of_whole_microbatches(ways.costs)
    order, lengths = [q for members in microbatches for q in members], batch.lengths
    flat = tuple((lengths[q],) for q in order)

    def makespan_us(borrowed: tuple[Borrowed, ...], reads_all: bool = True) -> float:
        problem = replace(ways.separate, borrowed=borrowed, trained=() if reads_all else flat)
        sizes = tuple(tuple(lengths[q] for q in members) for members in microbatches)
        return plan_microbatches(sizes, problem, costs, Options())[0].predicted.makespan_us

    of_all, inside = (in_groups(batch, groups) for groups in ([order], microbatches))
    times_us = makespan_us(()), makespan_us(inside), makespan_us(of_all), makespan_us(of_all, reads_all=False)
    return dict(zip(WAYS, times_us, strict=True))


def in_groups(batch: Batch, groups: Sequence[Sequence[int]]) -> tuple[Borrowed, ...]:
    """Return what sequences, in the order of the groups, borrow of the first of their tree in their group."""
    borrowed = list[Borrowed]()
    for members in groups:
        first: dict[int, int] = {}
        for q in members:
            root, tokens = batch.borrowed[q] if batch.borrowed[q].tokens else (q, 0)
            tokens = tokens or max((each.tokens for each in batch.borrowed if each.sequence == q), default=0)
            borrowed.append(Borrowed(first[root], tokens) if root in first else NOTHING_BORROWED)
            first.setdefault(root, len(borrowed) - 1)
    return tuple(borrowed) if any(tokens for _, tokens in borrowed) else ()


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    lines = [[each["case"], *(f"{each[name] / each['responses']:.2f}" for name in WAYS[:3])] for each in rows]
    return table(["microbatches", *WAYS[:3]], lines)


_OF_GROUPS = "DPO, 32 pairs, 1.5K + 500", "GRPO 8 x 8, 2K + 4K", "GRPO 4 x 16, 2K + 4K", "GRPO 4 x 8, 16K + 4K"


def _budgets(name: str) -> tuple[int, ...]:
    """Return most tokens of a microbatch, less where samples are short: about a dozen to two dozen microbatches."""
    return (4096, 8192) if "DPO" in name else (16384, 32768)


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {
        f"{name}, of {budget // 1024}K": (CASES[name], budget) for name in _OF_GROUPS for budget in _budgets(name)
    },
    row=row,
    text=text,
    flags={"draws": {"type": int, "default": 3, "help": "batches of each case (default 3)"}},
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
