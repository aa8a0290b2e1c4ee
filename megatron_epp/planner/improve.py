"""Local search: small changes to finished decisions, kept when they are faster. Counted in steps, never in seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

from megatron_epp.planner.assemble import Decisions
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.evaluate import Layers, play
from megatron_epp.planner.ledger import Ledger
from megatron_epp.planner.memory import fit_rank, peak_bytes
from megatron_epp.planner.order import Order, slice_groups
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.tables import Tables
from megatron_epp.schedule import Action, Op, PlanError

SMALL = 64
"""Stages times chunks up to which the search runs unasked, because it takes no time."""
SMALL_STEPS = 2500
RESTARTS = 5
"""Times the search returns to the best found."""
ALLOWANCE = 0.05
"""A step may be slower than where it starts from by this share of the best at first, and by nothing before each return."""
ACTION_US = 2.0
"""What one action of one step is taken to cost when a time is translated into steps: a convention, the same everywhere."""


def steps_of(options: Options, num_stages: int, num_chunks: int) -> int:
    """How many steps to take."""
    size = num_stages * num_chunks
    if options.steps:
        return options.steps
    if options.budget_ms is not None:
        return int(options.budget_ms * 1000 / (2 * size * ACTION_US))
    return SMALL_STEPS if size <= SMALL else 0


def improve(made: Decisions, tables: Tables, problem: Problem, options: Options) -> Decisions:
    """Take steps from decisions that fit the caps. Equal arguments take equal steps.

    A step changes one thing: two neighbouring actions of one rank trade places, two neighbouring backwards (or forwards, or
    both) of different sequences trade places on all ranks, or one chunk of one rank may not recompute. Recompute is fitted
    again on the ranks concerned. A step that is a little slower is taken too, less and less so (threshold accepting).
    """
    steps = steps_of(options, problem.num_stages, len(made.chunks))
    if not steps or made.copies or problem.forward_only or options.recompute != "auto":
        return made
    bound_us = lower_bound_us(tables, made.chunks, problem, replace(options, offload=False, split_weight=False))
    return _Search(made, tables, problem.cap_bytes, Random(options.seed)).run(steps, bound_us)


class _Search:
    def __init__(self, made: Decisions, tables: Tables, caps: tuple[int, ...], random: Random) -> None:
        self.tables, self.caps, self.random = tables, caps, random
        self.made = made
        groups = slice_groups(made.chunks)
        self.group_of = [number for number, group in enumerate(groups) for _ in group]
        self.group_size = [len(group) for group in groups]
        self.order = made.order
        self.layers = made.layers
        self.plain: tuple[frozenset[int], ...] = (frozenset(),) * len(made.order)
        self.now_us = play(made.order, tables, made.layers).makespan_us
        self.best_us = self.allowed_us = self.now_us
        self.best: tuple[Order, Layers, tuple[frozenset[int], ...]] = self.order, self.layers, self.plain

    def run(self, steps: int, bound_us: float) -> Decisions:
        moves = (self._swap_neighbours, self._swap_neighbours, self._swap_everywhere, self._forbid)
        for step in range(steps):
            if self.best_us <= bound_us * (1 + 1e-9):
                break
            if step % max(1, steps // RESTARTS) == 0:
                self.order, self.layers, self.plain, self.now_us = *self.best, self.best_us
            self.allowed_us = self.now_us + ALLOWANCE * self.best_us * (1 - (step * RESTARTS / steps) % 1.0)
            self.random.choice(moves)()
        return replace(self.made, order=self.best[0], layers=self.best[1])

    def _swap_neighbours(self) -> None:
        rank = self.random.randrange(len(self.order))
        row = list(self.order[rank])
        if len(row) < 2:
            return
        at = self.random.randrange(len(row) - 1)
        if row[at].op is row[at + 1].op and row[at].stage == row[at + 1].stage:
            return
        row[at], row[at + 1] = row[at + 1], row[at]
        self._try((*self.order[:rank], tuple(row), *self.order[rank + 1 :]), [rank], self.plain)

    def _swap_everywhere(self) -> None:
        """Two chunks that follow each other in the forwards or backwards of stage 0 and are of different sequences."""
        op = self.random.choice((Op.F, Op.B, None))
        sequence = [
            action.chunk for action in self.order[self.tables.rank_of[0]] if action.stage == 0 and action.op is (op or Op.F)
        ]
        if len(sequence) < 2:
            return
        at = self.random.randrange(len(sequence) - 1)
        one, two = sequence[at], sequence[at + 1]
        if self.group_of[one] == self.group_of[two]:
            return
        trade = {one: two, two: one}
        order = tuple(
            tuple(a if a.chunk not in trade or op not in (None, a.op) else a._replace(chunk=trade[a.chunk]) for a in row)
            for row in self.order
        )
        self._try(order, list(range(len(order))), self.plain)

    def _forbid(self) -> None:
        rank = self.random.randrange(len(self.order))
        item = self.random.randrange(len(self.made.chunks) * len(self.tables.stages_of[rank]))
        plain = list(self.plain)
        plain[rank] = plain[rank] ^ {item}
        self._try(self.order, [rank], tuple(plain))

    def _try(self, order: Order, ranks: list[int], plain: tuple[frozenset[int], ...]) -> None:
        if not all(self._legal(order[rank]) for rank in ranks):
            return
        layers = list(self.layers)
        for rank in ranks:
            row = fit_rank(order[rank], self.tables, rank, self.caps[rank], plain[rank])
            if row is None:
                return
            row = self._trimmed(order[rank], rank, row)
            chunks = len(self.made.chunks)
            for at, stage in enumerate(self.tables.stages_of[rank]):
                layers[stage] = row[at * chunks : (at + 1) * chunks]
        try:
            took_us = play(order, self.tables, layers).makespan_us
        except PlanError:  # a deadlock
            return
        if took_us > self.allowed_us:
            return
        self.order, self.layers, self.plain, self.now_us = order, layers, plain, took_us
        if took_us < self.best_us:
            self.best_us = took_us
            self.best = order, layers, plain

    def _legal(self, actions: tuple[Action, ...]) -> bool:
        """Forwards of a sequence ascending, all before its backwards, and those descending; on every stage of a rank."""
        seen: dict[tuple[int, int], list[Action]] = {}
        for action in actions:
            seen.setdefault((action.stage, self.group_of[action.chunk]), []).append(action)
        for (_, group), own in seen.items():
            half = self.group_size[group]
            forward, backward = own[:half], own[half:]
            if any(action.op is not Op.F for action in forward) or any(a.chunk > b.chunk for a, b in _pairs(forward)):
                return False
            if any(a.chunk < b.chunk for a, b in _pairs(backward)):
                return False
        return True

    def _trimmed(self, actions: tuple[Action, ...], rank: int, row: list[int]) -> list[int]:
        """Take back recompute that is not needed after all, dearest first."""
        if not any(row) or len(row) > SMALL:
            return row
        layer_us = Ledger.of(self.tables, rank).layer_us
        for item in sorted((item for item, count in enumerate(row) if count), key=lambda item: (-layer_us[item], item)):
            while row[item]:
                fewer = [*row[:item], row[item] - 1, *row[item + 1 :]]
                if peak_bytes(actions, self.tables, rank, fewer) > self.caps[rank]:
                    break
                row = fewer
        return row


def _pairs(actions: list[Action]) -> Iterator[tuple[Action, Action]]:
    return pairwise(actions)
