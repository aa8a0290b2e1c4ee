"""Worked examples and figures of papers, for planners that choose chunks, groups, layouts or orders themselves.

Units of time and memory are those of `test_schedules.py`; ``p`` are the ranks, ``m`` the microbatches, ``n`` the slices of a
sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from unittest import mock

import pytest

from megatron_epp.contrib.flexsp.context_groups import groups_of
from megatron_epp.contrib.flexsp.group_costs import GroupCosts
from megatron_epp.contrib.papers.chunkflow import recompute_all_but_last
from megatron_epp.cost.blocks import HEAD, LAYER
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, causal_pairs
from megatron_epp.plan import Chunk, Op, Plan, Segment
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.fitted import for_table
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.warm_up import run_ahead
from megatron_epp.tools.layouts import layout_choice
from megatron_epp.tools.layouts.layout_choice import LayoutChoice, Sample, choose, placements_of
from scripts.bench.orders.unit import TOKENS, Unit, unit_costs
from tests.support.golden import assert_as_written
from tests.support.plan.stages import stage_of


def on_ranks(units: Sequence[float], ranks: int, cap: int = UNLIMITED_BYTES) -> Problem:
    return Problem(tuple(int(TOKENS * each) for each in units), tuple(range(ranks)), (cap,) * ranks)


def equal(ranks: int, kept: float = 0.1) -> PipelineCosts:
    """Costs of stages of one layer, of whose bytes recompute keeps a share."""
    costs = unit_costs(ranks)
    return replace(costs, stages=tuple(one.changed(LAYER, input_bytes_per_token=kept) for one in costs.stages))


def text_of(made: Plan) -> str:
    """Format chunks, their groups of context-parallel ranks, recomputed layers, and order."""
    lines = []
    for c, chunk in enumerate(made.chunks):
        parts = " ".join(f"{part.sequence}[{part.start}:{part.end}]" for part in chunk.segments)
        again = [made.recompute[stage][c].num_layers for stage in range(made.num_stages)]
        divided = groups_of(made.extensions)
        groups = divided.of_chunk[c] if divided else ()
        shared = "".join(f", {group.degree} ranks from {group.first}: {list(group.segments)}" for group in groups)
        lines.append(f"chunk {c} | {parts}{shared}{f', recomputes {again}' if any(again) else ''}\n")
    return "".join(lines) + to_grid(made)


BATCH = (3.5, 2, 1, 0.5, 0.5)
PLANNED: dict[str, tuple[Callable[[], PipelineCosts], int, Options]] = {
    "seq1f1b": (lambda: equal(4), UNLIMITED_BYTES, Options(chunk_tokens=TOKENS)),
    "chunkflow": (lambda: equal(4), 5 * TOKENS, Options(chunk_tokens=TOKENS)),
    "infinipipe": (lambda: equal(4), 4 * TOKENS, Options(slices=4)),
    "flexsp": (lambda: sharing(4), UNLIMITED_BYTES, Options()),
}
"""Costs, cap and options of planners that cut their own chunks."""


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_of_a_few_unequal_sequences_is_as_written(name: str):
    costs_of, cap, options = PLANNED[name]
    made = plan(on_ranks(BATCH, 4, cap), costs_of(), replace(options, planner=name))
    assert (check(made), blocked([lower(made)])) == ([], [])
    assert_as_written(f"order_{name}", text_of(made))


def test_the_order_of_two_sequences_in_four_slices_is_as_written():
    assert_as_written("order_1f1b-sliced_slices", to_grid(Unit("1f1b-sliced", 4, 2, slices=4).plan()))


@pytest.mark.parametrize(("name", "option"), [("seq1f1b", "chunk_tokens"), ("infinipipe", "slices")])
@pytest.mark.parametrize(("p", "m", "n"), [(4, 8, 4), (8, 32, 4), (4, 6, 8)])
def test_equal_sequences_wait_p_minus_1_chunks_and_keep_p_minus_1_and_n(name: str, option: str, p: int, m: int, n: int):
    """2406.03488, section 3.2, of Seq1F1B: a bubble of ``p - 1`` slices, activations of ``p - 1 + n``.

    2509.21275 states the same for InfiniPipe: a pipeline starts up in ``p - 1`` mean chunks (Equation 13), and a stage keeps a
    window of ``p - 1 + n`` chunks (Equation 7).
    """
    options = Options(planner=name, **{option: n if option == "slices" else TOKENS // n})  # type: ignore[arg-type]
    made = plan(on_ranks([1] * m, p), unit_costs(p), options)
    assert made.predicted.makespan_us / TOKENS - 3 * m == pytest.approx((p - 1) * 3 / n)
    assert max(made.predicted.peak_bytes) / TOKENS == (p - 1 + n) / n


EXAMPLE = (4, 2, 1, 1)
"""Sequences of the example of 2503.02356 (Figure 2), in its unit of length."""


def idle(made: Plan) -> float:
    """Share of the time in which a rank of the example waits or recomputes: each has 3 units of work for a unit of length."""
    return 1 - 3 * sum(EXAMPLE) * TOKENS / made.predicted.makespan_us


@pytest.mark.parametrize(
    ("lengths", "options", "share"),
    [
        (EXAMPLE, Options(planner="1f1b"), 4 / 7),
        ((2, 2, 2, 2), Options(planner="1f1b"), 3 / 7),
        (EXAMPLE, Options(planner="chunkflow", chunk_tokens=4 * TOKENS), 3 / 5),
    ],
    ids=["1F1B", "1F1B, equal lengths", "two chunks"],
)
def test_chunkflows_example_waits_as_its_paper_says(lengths: tuple[int, ...], options: Options, share: float):
    """2503.02356, Figure 2: a bubble of 57.14 % on four ranks, where sequences of equal length have 42.8 %.

    Figure 7: chunks of four units leave two microbatches, and a bubble of 60 %.
    """
    assert idle(plan(on_ranks(lengths, 4), equal(4), options)) == pytest.approx(share)


def test_chunkflows_own_order_waits_as_its_paper_says():
    """2503.02356, Figure 6, K = 2: a bubble of 47.8 % (11 / 23), in chunks of two units, the packed one first.

    Microbatches are in 1F1B's window, and a backward waits for those of its sequence's later chunks. With K = 1 the figure is
    54.1 %. Here recompute is a part of the backward, so it begins when the gradient has arrived, on one rank after the other:
    the 46 units of K = 2 become 46 + 4 * 2, a bubble of 55.6 %, in which recompute counts as waiting.
    """
    size = 2 * TOKENS
    parts = [((2, TOKENS), (3, TOKENS)), ((1, size),)]
    packed = [Chunk(tuple(Segment(q, 0, length) for q, length in own)) for own in parts]
    chunks = (*packed, *(Chunk((Segment(0, start, start + size),)) for start in (0, size)))
    ends = [group.stop for group in slice_groups(chunks) for _ in group]
    order = run_ahead(slice_groups(chunks), 4, False, lambda stage: [max(k + 4 - stage, end) for k, end in enumerate(ends)])
    for retain, share in ((2, 22 / 46), (1, 30 / 54)):
        again = recompute_all_but_last(chunks, [1] * 4, retain)
        made = build_plan(on_ranks(EXAMPLE, 4), equal(4), Options(), Decisions(chunks, order, again))
        assert (check(made), idle(made)) == ([], pytest.approx(share))


def test_chunkflows_planner_waits_less_than_its_papers_order():
    """Long sequences first, with a window as wide as their chunks: 42.9 % (K = 2) and 50 % (K = 1)."""
    options = Options(planner="chunkflow", chunk_tokens=2 * TOKENS)
    whole = plan(on_ranks(EXAMPLE, 4), equal(4), options)
    assert idle(whole) == pytest.approx(3 / 7)
    tight = plan(on_ranks(EXAMPLE, 4, max(whole.predicted.peak_bytes) - 1), equal(4), options)
    assert [[one.num_layers for one in row] for row in tight.recompute] == [[1, 0, 0, 0]] * 4
    assert idle(tight) == pytest.approx(1 / 2)


@pytest.mark.parametrize("p", [4, 8])
def test_hanayos_wave_runs_down_the_ranks_and_back_and_waits_less_than_1f1b(p: int):
    """2308.15762, section 3: a wave folds two stages of each rank; no figure of the paper is checked.

    Where the wave turns no message is sent. As many microbatches as ranks wait less than with 1F1B, without more memory.
    """
    unit, plain = Unit("hanayo", p, p), Unit("1f1b-sliced", p, p)
    assert unit.problem.placement == (*range(p), *reversed(range(p)))
    made = unit.of_paper()
    assert unit.waits(made) < plain.waits(plain.of_paper())
    assert unit.alive(made) <= p
    lowered = lower(unit.plan())
    assert not any(action.op is Op.SEND_F and action.stage == p - 1 for action in chain(*lowered))
    assert any(action.op is Op.SEND_F and action.stage == p - 2 for action in chain(*lowered))


QUADRATIC, LINEAR, FIXED_US = 2e-4, 1.0, 300.0
"""Coefficients of 2412.01523 for a group's time: in squares of lengths, in tokens, and of every microbatch."""
EXCHANGES = (0.0, 0.02, 0.05, 0.3)
"""Time of the all-to-alls of a layer by token, in a pass, of groups of 1, 2, 4 and 8 ranks."""
LAYERS = 2


def sharing(stages: int, ranks: int = 8) -> PipelineCosts:
    """Costs of stages by that formula; those of a forward are a third. A pair of tokens stands for half a square."""

    def passing(share: float) -> LinearTime:
        each = share / LAYERS
        return LinearTime(FIXED_US * each, LINEAR / ranks * each + EXCHANGES[-1], 2 * QUADRATIC / ranks * each)

    stage = stage_of(
        num_layers=LAYERS,
        forward=passing(1 / 3),
        backward=passing(2 / 3),
        layer_bytes_per_token=1.0,
        recomputed_layer_bytes_per_token=0.0,
        kv_bytes_per_token=0.0,
    )
    return PipelineCosts("shared", (stage,) * stages, hidden_bytes_per_token=0.0, context_exchange_us=EXCHANGES)


def group_us(lengths: Sequence[int], degree: int) -> float:
    """2412.01523, section 4: ``(a s^2 + b s) / d`` of all sequences, their all-to-alls at its bandwidth, and ``c``."""
    exchange_us = 2 * LAYERS * EXCHANGES[degree.bit_length() - 1]
    each_us = ((QUADRATIC * s * (s + 1) + LINEAR * s) / degree + exchange_us * s for s in lengths)
    return FIXED_US + sum(each_us)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths", [(1000,), (6000, 500, 500)])
def test_a_group_takes_as_long_as_flexsps_formula_says(degree: int, lengths: tuple[int, ...]):
    line = GroupCosts(sharing(1)).line(0, degree)
    took_us = line.time_us(sum(lengths), sum(causal_pairs(0, length) for length in lengths))
    assert took_us == pytest.approx(group_us(lengths, degree))


def divisions(ranks: int, largest: int) -> Iterator[tuple[int, ...]]:
    if not ranks:
        yield ()
    for degree in (8, 4, 2, 1):
        if degree <= min(ranks, largest):
            yield from ((degree, *rest) for rest in divisions(ranks - degree, degree))


def slowest_us(lengths: Sequence[int], degrees: Sequence[int], group_of: Sequence[int]) -> float:
    held = [[length for length, own in zip(lengths, group_of, strict=True) if own == at] for at in range(len(degrees))]
    return max(group_us(own, degree) for own, degree in zip(held, degrees, strict=True) if own)


@pytest.mark.parametrize("lengths", [(8000, 2000, 1000, 1000), (6000, 3000, 2500), (3000, 3000, 500, 500)])
def test_no_assignment_of_a_microbatch_to_groups_ends_earlier_than_flexsps(lengths: tuple[int, ...]):
    """2412.01523, section 4: the slowest group ends as early as possible, for one microbatch on one stage of eight ranks."""
    made = plan(Problem(lengths, (0,), (UNLIMITED_BYTES,)), sharing(1), Options(planner="flexsp"))
    least_us = min(
        slowest_us(lengths, degrees, group_of)
        for degrees in divisions(8, 8)
        for group_of in product(range(len(degrees)), repeat=len(lengths))
    )
    divided = groups_of(made.extensions)
    assert len(made.chunks) == 1
    assert len(divided.of_chunk[0]) > 1
    assert made.predicted.makespan_us == pytest.approx(least_us)


def uneven(layout: Layout) -> PipelineCosts:
    """Costs of layers of one unit for each of F, B and W, and of an output layer that takes as long as two of them."""
    one, two, four = (LinearTime(0.0, count / TOKENS) for count in (1, 2, 4))
    kept = ("layer", "full", "weight", "recomputed_layer")
    stages = [
        stage_of(
            num_layers=count,
            forward=one,
            backward=two,
            weight=one,
            kv_bytes_per_token=0.0,
            **{f"{name}_bytes_per_token": 1.0 for name in kept},
        )
        for count in layout.layers
    ]
    stages[-1] = stages[-1].changed(HEAD, forward=two, backward=four, weight=two)
    return PipelineCosts("uneven", tuple(stages), hidden_bytes_per_token=0.0)


def chosen(microbatches: int, *, split: bool, placed: bool, several: float = 0.005) -> LayoutChoice:
    """Choose the layout of four such layers on two ranks: of one stage on each, unless the placement is open, too."""
    asked = on_ranks([1] * microbatches, 2)
    options = Options(split_weight=split, slices=1)
    placements = () if placed else placements_of(2)[:1]
    # The example's gains are of a few units; a run asks for more, since its costs are estimates.
    with mock.patch.multiple(layout_choice, MIN_GAIN_SHARE=0.005, MIN_GAIN_OF_SEVERAL_SHARE=several):
        return choose(Sample((asked,), uneven, 4, options, placements=placements))


@pytest.mark.parametrize("m", [4, 8])
def test_partition_placement_and_order_together_wait_less_than_each_alone(m: int):
    """2509.23722 chooses the three together. A worked example: with the output layer a microbatch takes 18 units on both ranks.

    Even layers leave 12 units to the last rank, which waits for the first forward (2), and whose last backward is followed by
    one of the first rank (4). Three layers and one leave 9 to each, and the bubble of 1F1B is ``F + B``. The order alone splits
    weight gradients off, which then fill all but the first forward; with three layers it is ZB-H1's ``F + B - W``.
    """
    layers, both = chosen(m, split=False, placed=False), chosen(m, split=True, placed=False)
    assert layers.even_us == 12 * m + 2 + 4
    assert (layers.layout.layers, layers.makespan_us) == ((3, 1), 9 * m + 3 + 6)
    assert (both.even_us, both.makespan_us) == (12 * m + 2, 9 * m + 3 + 3 - 3)
    moved, together = chosen(m, split=False, placed=True), chosen(m, split=True, placed=True)
    assert moved.layout.placement.num_chunks > 1
    assert 9 * m < together.makespan_us < min(both.makespan_us, moved.makespan_us) < layers.makespan_us < layers.even_us


def test_a_run_asks_more_of_several_stages_on_a_rank_than_the_example_gains():
    least = layout_choice.MIN_GAIN_OF_SEVERAL_SHARE
    several, single = (chosen(4, split=True, placed=True, several=share) for share in (0.005, least))
    assert several.layout.placement.num_chunks > single.layout.placement.num_chunks == 1
    assert 0.005 < 1 - several.makespan_us / single.makespan_us < least


def test_the_layout_of_the_worked_example_is_as_written():
    choice = chosen(4, split=True, placed=True)
    placed = replace(on_ranks([1] * 4, 2), placement=choice.layout.placement.rank_of)
    made = plan(placed, uneven(choice.layout), Options(split_weight=True, slices=1))
    head = f"layers {list(choice.layout.layers)} on ranks {list(choice.layout.placement.rank_of)}\n"
    assert_as_written("layout", head + to_grid(made))


def optimum(name: str, p: int, memory: float, *, copies: bool = False) -> float:
    """Idle time of a rank in the fastest plan of as many microbatches as ranks, in units, proven by the solver.

    Args:
        copies: all activations of a microbatch on a rank take a unit to host memory, and one back.
    """
    pytest.importorskip("ortools", reason="the oracle needs OR-tools: pip install 'megatron-epp[milp]'")
    from megatron_epp.contrib.exact.oracle import oracle

    unit, options = Unit(name, p, p), Options(split_weight=True, offload=copies)
    costs = replace(unit.costs, host_latency_us=0.0, host_us_per_byte=1.0, offloadable_share=1.0) if copies else unit.costs
    asked = replace(unit.problem, cap_bytes=(int(memory * TOKENS),) * p)
    start = for_table(unit.chunks, asked, costs, options)
    found = oracle(unit.chunks, asked, costs, options, start=start, time_limit_s=300)
    assert found.optimal
    assert found.decisions is not None
    made = build_plan(asked, costs, options, found.decisions)
    assert (check(made), blocked([lower(made)])) == ([], [])
    assert max(made.predicted.peak_bytes) <= memory * TOKENS
    return made.predicted.makespan_us / TOKENS - 3 * p


OPTIMA: dict[tuple[str, int, float, bool], float] = {
    ("zb-h1", 3, 3.0, False): 2, ("zb-h1", 3, 1.5, False): 12, ("zb-v", 3, 3.0, False): 1, ("zb-v", 3, 3.0, True): 1,
    ("zb-v", 3, 1.5, False): 5, ("zb-v", 3, 1.5, True): 1, ("zb-v", 3, 2.0, False): 2.5, ("zb-v", 3, 2.0, True): 1,
    ("zb-v", 4, 4.0, False): 1.5, ("zb-v", 4, 2.0, True): 1.5, ("zb-v", 4, 2.0, False): 5.5,
}  # fmt: skip
"""Idle time by schedule whose placement is used, ranks, memory in microbatches, and whether activations may be copied.

2510.05186, abstract: up to 50 % less idle time under the same memory; 1F1B waits ``3 (p - 1)`` with that of p microbatches.
Which of the optimal orders a solver finds differs by its version: so the idle times are written, and plans checked.
"""
SLOW = [("zb-v", 4, 2.0, False)]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW), id=str(case)) for case in OPTIMA]
)
def test_proven_optima_wait_as_written(case: tuple[str, int, float, bool]):
    name, p, memory, copies = case
    assert optimum(name, p, memory, copies=copies) == OPTIMA[case]
