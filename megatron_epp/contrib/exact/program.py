"""Constraint program of the exact planner: when every action of a chunk table runs, in whole ticks (OR-tools' CP-SAT).

Compute actions of a rank are intervals that do not overlap; so are the copies of a rank, and the copies over a link to the host
in one direction. What a rank holds is a set of intervals with demands, whose sum stays within the cap (`memory_intervals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from megatron_epp.contrib.exact.added import profile_of, rank_of
from megatron_epp.contrib.exact.choices import Choice, Clock
from megatron_epp.cost.work import IntColumn, TimeColumn
from megatron_epp.plan import Action, Chunk, Op, PlanError, Remedy
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.operations import Collective, Of, needs_of, operation
from megatron_epp.plan.relations import resolve
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.tables import Tables

Choices = list[list[list[Choice]]]
"""``[stage][chunk]``, the choices of each."""


class Span(NamedTuple):
    """An action in the program."""

    # start, end: its times
    start: Any
    end: Any
    # Its time on its rank. A backward that may leave its weight gradient to a `W` has only the rest; the `W` has that part
    # whether the plan has the `W` or not.
    interval: Any
    whole: Any  # from start to end
    present: Any  # a literal that the plan has it, or True


@dataclass(slots=True)
class Program:
    """Variables and constraints of one case, without memory."""

    chunks: Sequence[Chunk]  # the chunk table
    tables: Tables  # times and sizes of the chunk table
    choices: Choices  # of every stage and chunk
    clock: Clock  # of all times
    horizon: int  # ticks by which everything ends
    model: Any  # CP-SAT's model
    chosen: list[list[list[Any]]] = field(default_factory=list)  # ``[stage][chunk][choice]``, literals of which one is true
    spans: dict[Action, Span] = field(default_factory=dict)  # of every action, copies included
    makespan: Any = None  # the objective, in ticks

    @property
    def stages(self) -> range:
        return range(len(self.tables.rank_of))

    def write(self, least: int) -> None:
        self.makespan = self.model.new_int_var(least, self.horizon, "makespan")
        for stage in self.stages:
            self.chosen.append([self._literals(stage, c) for c in range(len(self.chunks))])
            for c in range(len(self.chunks)):
                self._add_compute(stage, c)
                self._add_copies(stage, c)
        self._add_chains()
        self._add_added()
        self._add_tracks()
        for leg in legs(self.tables.rank_of):
            self._add_turns(leg)
        for action, span in self.spans.items():
            if action.op in (Op.W, *self.tables.added) or (action.op is Op.B and action.stage == 0):
                self.model.add(self.makespan >= span.end).only_enforce_if(span.present)
        self.model.minimize(self.makespan)

    def weighed(self, stage: int, c: int, values: Sequence[int]) -> Any:
        """Return the expression that is the value of the choice made for a stage and chunk.

        Args:
            values: of each choice.
        """
        least = min(values)
        terms = zip(self.chosen[stage][c], values, strict=True)
        return least + sum((value - least) * literal for literal, value in terms if value != least)

    def any_of(self, stage: int, c: int, holds: Sequence[bool]) -> Any:
        """Return a literal that the choice made is one that holds; True or False where that is known.

        Args:
            holds: of each choice.
        """
        if all(holds) or not any(holds):
            return all(holds)
        members = [literal for literal, is_one in zip(self.chosen[stage][c], holds, strict=True) if is_one]
        if len(members) == 1:
            return members[0]
        any_chosen = self.model.new_bool_var("")
        self.model.add(sum(members) == any_chosen)
        return any_chosen

    def _literals(self, stage: int, c: int) -> list[Any]:
        count = len(self.choices[stage][c])
        literals = [self.model.new_bool_var(f"choice {n} of {stage} {c}") for n in range(count)]
        self.model.add_exactly_one(literals)
        return literals

    def add_span(self, action: Action, values: Sequence[int], present: Any = True) -> None:
        """Add an action whose time depends on the choice made.

        Args:
            values: ticks with each choice.
        """
        start, end = (self.model.new_int_var(0, self.horizon, f"{name} of {action}") for name in ("start", "end"))
        size: Any = values[0]
        if min(values) < max(values):
            size = self.model.new_int_var(min(values), max(values), f"time of {action}")
            self.model.add(size == self.weighed(action.stage, action.chunk, values))
        interval = self.interval(start, size, end, present)
        self.spans[action] = Span(start, end, interval, interval, present)

    def interval(self, start: Any, size: Any, end: Any, present: Any = True) -> Any:
        """Add an interval.

        Args:
            present: a literal that there is such a time, or True.
        """
        if present is True:
            return self.model.new_interval_var(start, size, end, "")
        return self.model.new_optional_interval_var(start, size, end, present, "")

    def _add_compute(self, stage: int, c: int) -> None:
        ticks, choices = self.clock.ticks, self.choices[stage][c]
        self.add_span(Action(Op.F, stage, c), [ticks(float(self.tables.passes[stage].forward_us[c]))])
        if not any(choice.split for choice in choices):
            self.add_span(Action(Op.B, stage, c), [ticks(choice.backward_us) for choice in choices])
            return
        weight_us = float(self.tables.passes[stage].weight_us[c])
        backward_ticks = [ticks(choice.backward_us - weight_us * (not choice.split)) for choice in choices]
        self.add_span(Action(Op.B, stage, c), backward_ticks)
        self.add_span(Action(Op.W, stage, c), [ticks(weight_us)])
        self._join(stage, c, self.any_of(stage, c, [choice.split for choice in choices]), ticks(weight_us))

    def _join(self, stage: int, c: int, split: Any, weight: int) -> None:
        """Add that a weight gradient follows its backward at once, as a part of it, unless it is split off."""
        backward, own = (self.spans[Action(op, stage, c)] for op in (Op.B, Op.W))
        self.model.add(own.start >= backward.end)
        self.model.add(own.start == backward.end).only_enforce_if(~split)
        end = self.model.new_int_var(0, self.horizon, "")
        self.model.add(end == backward.end + weight * ~split)
        size = self.model.new_int_var(0, self.horizon, "")
        whole = self.interval(backward.start, size, end)
        self.spans[Action(Op.B, stage, c)] = backward._replace(end=end, whole=whole)
        self.spans[Action(Op.W, stage, c)] = own._replace(present=split)

    def _add_copies(self, stage: int, c: int) -> None:
        choices = self.choices[stage][c]
        if not any(choice.moved_bytes for choice in choices):
            return
        present = self.any_of(stage, c, [choice.moved_bytes > 0 for choice in choices])
        values = [self.clock.ticks(self.tables.host_us(choice.moved_bytes)) if choice.moved_bytes else 0 for choice in choices]
        for op in (Op.O, Op.L):
            self.add_span(Action(op, stage, c), values, present)

    def follows(self, action: Action, before: Action, gap: int = 0) -> None:
        """Constrain an action to start when another has ended, in the plans that have both.

        Args:
            gap: ticks between them at least.
        """
        if action in self.spans and before in self.spans:
            later, earlier = self.spans[action], self.spans[before]
            row = self.model.add(later.start >= earlier.end + gap)
            row.only_enforce_if(*(span.present for span in (later, earlier) if span.present is not True))

    def _add_chains(self) -> None:
        """Add what actions wait for: forwards go through the stages, backwards the other way, slices in order."""
        links = slice_neighbours(self.chunks)
        for stage in self.stages:
            for c in range(len(self.chunks)):
                own = {op: Action(op, stage, c) for op in (Op.F, Op.B, Op.W, Op.O, Op.L)}
                for later, earlier in ((Op.B, Op.F), (Op.O, Op.F), (Op.L, Op.O), (Op.B, Op.L)):
                    self.follows(own[later], own[earlier])
                if stage:
                    hop = self.clock.ticks(self.tables.hops[stage - 1][c])
                    self.follows(own[Op.F], Action(Op.F, stage - 1, c), hop)
                    self.follows(Action(Op.B, stage - 1, c), own[Op.B], hop)
                for previous in links.previous[c]:
                    self.follows(own[Op.F], Action(Op.F, stage, previous))
                    self.follows(Action(Op.B, stage, previous), own[Op.B])

    def _add_added(self) -> None:
        """Add the added operations' actions, what they wait for and what waits for them, and one order of their collectives.

        A collective is launched by all ranks in one order, so the actions whose results it carries have one order on all sites.
        """
        added, chunks = self.tables.added, range(len(self.chunks))
        carried = {need.op for op in added for need in needs_of(op) if isinstance(need.carries, Collective)}
        for op, rows in added.items():
            for site, times_us in enumerate(rows.time_us):
                for c in chunks:
                    self.add_span(Action(op, site, c), [self.clock.ticks(times_us[c])])
        for op in (Op.F, Op.B, *added):
            for site in range(len(operation(op).sites(self.tables.rank_of))):
                self._add_needs(op, site)
        for op, rows in added.items():
            sites = range(len(rows.time_us))
            for u, v in combinations(chunks, 2) if len(sites) > 1 and op in carried else ():
                self.add_turn([(Action(op, site, u), Action(op, site, v)) for site in sites])

    def _add_needs(self, op: Op, site: int) -> None:
        """Add what the actions of a site wait for, where they or those are of an added operation.

        Args:
            op, site: the operation that waits, and where.
        """
        tables = self.tables
        for other in resolve(op, site, tables.rank_of):
            if other.need.chunk is not Of.SAME or not {op, other.op} & set(tables.added):
                continue
            carried_us = tables.transfer_us(other.need.carries, min(site, other.site))
            for c in range(len(self.chunks)):
                self.follows(Action(op, site, c), Action(other.op, other.site, c), self.clock.ticks(carried_us[c]))

    def _add_tracks(self) -> None:
        """Add that ranks compute one action at a time, copy one at a time, and take turns on a link to the host."""
        links = self.tables.host_links
        tracks: dict[object, list[Any]] = {}
        for action, span in self.spans.items():
            rank = rank_of(action, self.tables)
            if action.op in (Op.O, Op.L):
                tracks.setdefault(("copies", rank), []).append(span.interval)
                if links.count(links[rank]) > 1:
                    tracks.setdefault((action.op, links[rank]), []).append(span.interval)
            else:
                tracks.setdefault(rank, []).append(span.interval)
        for intervals in tracks.values():
            self.model.add_no_overlap(intervals)

    def _add_turns(self, leg: range) -> None:
        """Add that chunks pass the stages of a leg in one order forward and in one order backward.

        Args:
            leg: stages with messages from each to the next, which never overtake each other.
        """
        root = [number for number, group in enumerate(slice_groups(self.chunks)) for _ in group]
        whole = [root.count(number) == 1 for number in root]
        for u, v in combinations(range(len(self.chunks)), 2):
            if root[u] == root[v]:
                continue  # slices are in order anyway
            equal = whole[u] and whole[v] and self._profile(u) == self._profile(v)
            for op in (Op.F, Op.B):
                if op is Op.F and equal:
                    for stage in leg:
                        self.follows(Action(op, stage, v), Action(op, stage, u))
                    continue
                self.add_turn([(Action(op, stage, u), Action(op, stage, v)) for stage in leg])

    def add_turn(self, pairs: Sequence[tuple[Action, Action]]) -> None:
        """Add the constraint that one of two actions comes first everywhere.

        Args:
            pairs: both, on every site.
        """
        turn = self.model.new_bool_var(f"{pairs[0][0]} before {pairs[0][1]}")
        for pair in pairs:
            first, second = map(self.spans.__getitem__, pair)
            self.model.add(second.start >= first.end).only_enforce_if(turn)
            self.model.add(first.start >= second.end).only_enforce_if(~turn)

    def _profile(self, c: int) -> tuple[object, ...]:
        """All times and sizes of a chunk that the program reads."""
        rows = list[TimeColumn | IntColumn](self.tables.hops)
        for passes in self.tables.passes:
            rows += [passes.forward_us, passes.weight_us, passes.weight_bytes]
            rows += [passes.forward_alloc, passes.forward_free, passes.backward_residual]
        own = (tuple(self.choices[stage][c]) for stage in self.stages)
        return *(row[c].item() for row in rows), *profile_of(self.tables, c), *own


def legs(rank_of: Sequence[int]) -> Iterator[range]:
    """Yield the runs of consecutive stages on different ranks.

    Args:
        rank_of: the rank of every stage.
    """
    begin = 0
    for stage, (here, there) in enumerate(pairwise(rank_of), start=1):
        if here == there:
            yield range(begin, stage)
            begin = stage
    yield range(begin, len(rank_of))


def solver() -> Any:
    """Import CP-SAT. Raises `PlanError` where OR-tools is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        remedy = Remedy("set", "planner", "greedy")
        raise PlanError("this planner needs OR-tools (pip install 'megatron-epp[milp]')", remedy) from error
    return cp_model
