"""Small cases for the oracle, every order and recompute of a tiny one, and changes of decisions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields, replace

from megatron_epp.cost import BlockCosts, LinearTime, PipelineCosts, Static
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.plan import Action, Chunk, Op, PlanError, Segment
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.planner import Decisions, Options, Problem
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.order import Order
from megatron_epp.planner.tables import Tables
from tests.support.plan.planner_cases import problem
from tests.support.plan.stages import stage_of


def tiny_case(seed: int) -> tuple[tuple[Chunk, ...], Problem, PipelineCosts]:
    """Two stages of one layer and three chunks of odd sizes, sliced or not."""
    draw = random.Random(seed)
    cuts = draw.choice([(1, 1, 1), (2, 1), (3,)])
    sizes = [[draw.randint(2, 20) for _ in range(count)] for count in cuts]
    chunks = tuple(
        Chunk((Segment(q, start, end),))
        for q, row in enumerate(sizes)
        for start, end in itertools.pairwise(itertools.accumulate(row, initial=0))
    )
    stages = tuple(
        stage_of(
            num_layers=1,
            forward=LinearTime(draw.random() * 3, draw.random() + 0.2),
            backward=LinearTime(draw.random() * 3, 2 * draw.random() + 0.2),
            layer_bytes_per_token=draw.randint(8, 20),
            recomputed_layer_bytes_per_token=draw.randint(0, 6),
            extra_bytes_per_token=draw.randint(0, 4),
            kv_bytes_per_token=draw.randint(0, 3),
            static=Static(weights=draw.randint(0, 50)),
        )
        for _ in range(2)
    )
    costs = PipelineCosts("tiny", stages, 1.0, draw.random(), draw.random() / 4)
    return chunks, problem([sum(row) for row in sizes], 2), costs


def all_orders(chunks: tuple[Chunk, ...], stages: int) -> Iterator[Order]:
    """Every order that `check` accepts or that deadlocks: one order of forwards, one of backwards, any interleaving."""
    before = slice_neighbours(chunks).previous
    number = range(len(chunks))

    def keeps_slices(order: tuple[int, ...]) -> bool:
        return all(before[c] is None or order.index(before[c]) < order.index(c) for c in number)

    for forwards, backwards in itertools.product(itertools.permutations(number), repeat=2):
        if keeps_slices(forwards) and keeps_slices(backwards[::-1]):
            rank = [list(interleavings(forwards, backwards, stage)) for stage in range(stages)]
            yield from itertools.product(*rank)


def interleavings(forwards: tuple[int, ...], backwards: tuple[int, ...], stage: int) -> Iterator[tuple[Action, ...]]:
    size = len(forwards)
    for places in itertools.combinations(range(2 * size), size):
        queue = iter(forwards), iter(backwards)
        row = tuple(
            Action(Op.F, stage, next(queue[0])) if place in places else Action(Op.B, stage, next(queue[1]))
            for place in range(2 * size)
        )
        if all(row.index(Action(Op.F, stage, c)) < row.index(Action(Op.B, stage, c)) for c in forwards):
            yield row


def best_by_force(chunks: tuple[Chunk, ...], tables: Tables, caps: list[int]) -> list[float]:
    """Least makespan under each of several caps; infinite where nothing fits."""
    found = [float("inf")] * len(caps)
    choices = list(itertools.product(range(2), repeat=len(chunks)))
    for order in all_orders(chunks, 2):
        try:
            if makespan_us(order, tables, [[0] * len(chunks)] * 2) >= max(found):
                continue
        except PlanError:
            continue
        peaks = list(zip(*[peaks_bytes(order, tables, [list(choice)] * 2) for choice in choices], strict=True))
        for one, two in itertools.product(range(len(choices)), repeat=2):
            need = max(peaks[0][one], peaks[1][two])
            if any(need <= cap for cap in caps):
                took = makespan_us(order, tables, [list(choices[one]), list(choices[two])])
                found = [min(best, took) if need <= cap else best for best, cap in zip(found, caps, strict=True)]
    return found


def with_features(costs: PipelineCosts, seed: int) -> PipelineCosts:
    """The same with weight gradients that can be split off and a link to the host; in megabytes, so that one is little."""
    draw = random.Random(seed)

    def larger[T: (BlockCosts, KVBytes)](one: T) -> T:
        sizes = {field.name: getattr(one, field.name) for field in fields(one) if "bytes" in field.name}
        return replace(one, **{name: size * 10**6 for name, size in sizes.items() if size is not None})

    stages = []
    for stage in costs.stages:
        weight = stage.layers.backward.scaled(draw.uniform(0.2, 0.6))
        own = stage.changed(LAYER, weight=weight, weight_bytes_per_token=draw.randint(1, 8), kv=larger(stage.kv))
        stages.append(replace(own, blocks=tuple(map(larger, own.blocks))))
    link = {"host_latency_us": draw.uniform(0.05, 0.5), "host_us_per_byte": draw.uniform(2e-9, 5e-8), "offloadable_share": 0.9}
    return replace(costs, stages=tuple(stages), **link)


class Changes:
    """Small changes of decisions at random: places of actions, recompute, weight gradients of their own."""

    def __init__(self, options: Options, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kinds = [self._swap, self._swap, self._swap_everywhere, self._recompute]
        self.kinds += [self._weight] * 2 * options.split_weight

    def of(self, made: Decisions) -> Decisions:
        self.order = [list(row) for row in made.order]
        self.recompute_steps = [list(row) for row in made.recompute_steps]
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            self.draw.choice(self.kinds)(self.draw.randrange(len(self.order)), self.draw.randrange(len(made.chunks)))
        return replace(made, order=tuple(map(tuple, self.order)), recompute_steps=self.recompute_steps)

    def _swap(self, rank: int, _: int) -> None:
        row = self.order[rank]
        at = self.draw.randrange(len(row) - 1)
        row[at], row[at + 1] = row[at + 1], row[at]

    def _swap_everywhere(self, _: int, chunk: int) -> None:
        op, other = self.draw.choice((Op.F, Op.B)), self.draw.randrange(len(self.recompute_steps[0]))
        trade = {chunk: other, other: chunk}
        for row in self.order:
            row[:] = [a._replace(chunk=trade[a.chunk]) if a.op is op and a.chunk in trade else a for a in row]

    def _recompute(self, rank: int, chunk: int) -> None:
        self.recompute_steps[rank][chunk] ^= 1

    def _weight(self, rank: int, chunk: int) -> None:
        row, weight = self.order[rank], Action(Op.W, rank, chunk)
        if weight in row:
            row.remove(weight)
        if self.draw.random() < 0.7:
            row.insert(self.draw.randint(0, len(row)), weight)
