"""Schedules of other papers: bubbles and memory as the papers state them, sound plans for skewed batches, clear refusals.

Greedy is never slower with equal microbatches, placement and peak memory.

With unit costs a microbatch takes 3 on a rank (1 each of F, B and W), so formulas of papers become numbers. ``p`` are the
ranks, ``m`` the microbatches, ``v`` the stages of each rank, ``n`` the slices of a sequence.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest

from megatron_epp.contrib.helix.attention_operations import A
from megatron_epp.contrib.helix.helixpipe import HelixLayout
from megatron_epp.cost.blocks import LAYER
from megatron_epp.features.stages.list_scheduling import ListScheduling
from megatron_epp.features.stages.stage_orders import BLOCKS, Block, Interleaved
from megatron_epp.plan import Action, Chunk, InfeasibleError, Op, PlanError, Segment
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan, tabulate
from megatron_epp.planner.evaluate import makespan_us
from scripts.bench.orders import orders as compared
from scripts.bench.orders.orders import LAYERS, TIE
from scripts.bench.orders.unit import TOKENS, Unit, fewest, unit_costs
from tests.support.calls import refusal
from tests.support.golden import assert_as_written
from tests.support.plan.planner_cases import LLAMA
from tests.support.seeds import some_by_default

ORDERS = [name for name, entry in PLANNERS.entries().items() if entry.fixed is not None]
SIZES = [(4, 8, 1), (8, 32, 1), (6, 24, 1)]
LENGTHS = (30000, 28000, 26000, 9000, 9000, 5000, 3000, 2000, 700, 700, 300)


RANKS = (2, 3, 4, 5, 6, 7, 8, 12)
STATED: dict[str, tuple[list[tuple[int, int, int]], Callable[[int, int, int], tuple[float, float]]]] = {
    # 1811.06965, section 2.3: bubble (p - 1) / (m + p - 1)
    "gpipe": (SIZES, lambda p, m, n: ((p - 1) * 3, m)),
    # 2006.09503, section 3.1; 2104.04473, section 2.2.1: bubble (p - 1) / m of the work, at most p microbatches;
    # 2406.03488, section 3.2: a bubble of p - 1 slices, activations of p - 1 + n slices
    "1f1b-sliced": ([*SIZES, (4, 8, 4), (4, 8, 8), (8, 8, 8)], lambda p, m, n: ((p - 1) * 3 / n, (p - 1 + n) / n)),
    # 2303.01675, section 3.1: k times the microbatches of 1F1B, and no more bubble
    "kfkb": ([(8, 32, 1)], lambda p, m, n: ((p - 1) * 3, p)),
    "kfkb/1": ([(8, 32, 1)], lambda p, m, n: ((p - 1) * 3, 2 * p)),
    "kfkb/2": ([(8, 32, 1)], lambda p, m, n: ((p - 1) * 3, 3 * p)),
    "kfkb/3": ([(8, 32, 1)], lambda p, m, n: ((p - 1) * 3, 4 * p)),
    # 2104.04473, section 2.2.2: bubble (p - 1) / (v m) of the work; 1 + (p - 1) / (p v) times the memory
    "interleaved, 2": (SIZES[:2], lambda p, m, n: ((p - 1) * 3 / 2, p + (p - 1) / 2)),
    "interleaved, 4": (SIZES[:2], lambda p, m, n: ((p - 1) * 3 / 4, p + (p - 1) / 4)),
    # 2211.05953, section 3: bubble (p - 1) / (v m) of the work, activations of all microbatches
    "breadth-first, 2": ([(4, 8, 1)], lambda p, m, n: ((p - 1) * 3 / 2, m)),
    "breadth-first, 4": ([(4, 8, 1)], lambda p, m, n: ((p - 1) * 3 / 4, m)),
    # 2401.10241, table 1: bubble (p - 1)(F + B - W), memory p
    "zb-h1": (SIZES, lambda p, m, n: ((p - 1) * (1 + 1 - 1), p)),
    # 2401.10241, section 6: the memory of 1F1B. The authors' order waits (p - 1) / 2 until its last rank ends, 3.5 for 8 ranks.
    "zb-v": ([(p, 4 * p, 1) for p in RANKS], lambda p, m, n: ((p - 1) / 2, p)),
    # 2405.15362, table 1: bubble and memory of 1F1B times a half, of memory besides at most one microbatch; so long waits the
    # order that the authors' code makes, which keeps as much
    "v-half": (
        [(4, 8, 1), (5, 20, 1), (6, 24, 1), (8, 32, 1), (16, 64, 1)],
        lambda p, m, n: ({4: 2.5, 5: 5.5, 6: 5.5, 8: 8.5, 16: 20.5}[p], p // 2 + 1),
    ),
    # 2412.19437, table 2: bubble (PP / 2 - 1)(F&B + B - 3 W), activations of PP + 1 microbatches on a stage. There B is the
    # whole backward and PP are the stages, here 2 p. F and B do not overlap here, so that F&B takes F + B.
    "dualpipe-v": (
        [(2, 4, 1), (4, 8, 1), (8, 32, 1), (12, 48, 1)],
        lambda p, m, n: ((p - 1) * ((1 / 2 + 2 / 2) + 2 / 2 - 3 / 2) / 2, (2 * p + 1) / 2),
    ),
    # 2503.01328: idle time and peak of the authors' program with unit costs, for groups of 1, p/2 and p microbatches
    "pipeoffload": ([(4, 16, 1), (8, 32, 1)], lambda p, m, n: {4: (4.5, 3.5), 8: (11.5, 6.5)}[p]),
    "pipeoffload/1": ([(4, 16, 1), (8, 32, 1)], lambda p, m, n: {4: (4, 3), 8: (9, 6)}[p]),
    "pipeoffload/2": ([(4, 16, 1), (8, 32, 1)], lambda p, m, n: (p - 1, p)),
}
"""By schedule, behind a slash the number of its order: p, m and n, and what papers state of them, idle time and memory."""


@pytest.mark.parametrize(
    ("name", "p", "m", "n"), [(name, *size) for name, (sizes, _) in STATED.items() for size in sizes], ids=str
)
def test_a_schedule_waits_and_keeps_what_its_paper_states(name: str, p: int, m: int, n: int):
    schedule, _, which = name.partition("/")
    unit = Unit(schedule, p, m, slices=n)
    made = unit.of_paper(int(which or 0))
    assert (unit.waits(made), unit.alive(made)) == STATED[name][1](p, m, n)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32), (6, 24)])
def test_zb_h2_never_waits_between_its_ends_with_twice_the_memory(p: int, m: int):
    """2401.10241, table 1: bubble ``(p - 1)(F + B - 2 W)`` where ranks end one after the other, memory ``2 p - 1``."""
    unit = Unit("zb-h2", p, m)
    made = unit.of_paper()
    assert (unit.alive(made), unit.idle_between_ends(made)) == (2 * p - 1, [0.0] * p)


@pytest.mark.parametrize(("p", "authors"), [(3, 2.5), (4, 5.5), (5, 7.5), (6, 8.5), (7, 11.5), (8, 13.5), (12, 20.5)])
def test_v_min_waits_no_longer_than_its_authors_order_with_a_third_of_the_memory_of_1f1b(p: int, authors: float):
    """2405.15362, table 1: bubble of 1F1B times two thirds, memory times a third and at most 4 / 3 of a microbatch."""
    unit = Unit("v-min", p, 4 * p)
    made = unit.of_paper()
    assert unit.waits(made) <= min(authors, 2 * (p - 1))
    assert unit.alive(made) == (p + 1) // 3 + 1


@pytest.mark.parametrize("name", ["v-min", "v-half"])
def test_blocks_let_no_more_weight_gradients_wait_than_there_are_ranks(name: str):
    """Weight gradients keep bytes that recompute does not free, and slices leave room for all of them to wait for the end."""
    for row in Unit(name, 4, 8, slices=8).of_paper().order:
        assert max(accumulate((action.op is Op.B) - (action.op is Op.W) for action in row)) <= 4


@pytest.mark.parametrize("p", RANKS)
def test_zb_v_waits_only_until_its_last_rank_begins(p: int):
    """2401.10241, section 6: no bubble between a rank's ends if F, B, W take equally long. Here the first ranks have one."""
    unit = Unit("zb-v", p, 4 * p)
    between = unit.idle_between_ends(unit.of_paper())
    assert (between[0] <= (p - 1) / 2, between[-1]) == (True, 0)


@pytest.mark.parametrize(("p", "m"), [(2, 5), (4, 11), (4, 16), (8, 32)])
def test_stp_has_the_bubble_the_memory_and_the_lone_forwards_of_its_paper(p: int, m: int):
    """2510.27257: bubble ``(p - 1)(F + exchange + B - W)``, activations ``3 p``, exchange of ``2 p + 1`` forwards in sight.

    Passes and activations are of a stage. Both actions of a step keep activations, so there is one more here.
    """
    unit = Unit("stp", p, m)
    assert unit.waits(unit.of_paper()) == (p - 1) * (1 + 0 + 1 - 1) / 2
    whole = plan(unit.problem, unit.costs, Options(planner="stp", slices=1))
    assert max(whole.predicted.peak_bytes) == TOKENS * (3 * p + 1) / 2
    lone = [sum(step.action.op is Op.F and not step.also for step in row) for row in unit.plan().ranks]
    assert lone == [2 * p + (rank + 1) % 2 for rank in range(p)]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
def test_stp_hides_the_exchange_of_all_but_as_many_passes_as_its_phases_have(share: float):
    """More microbatches leave no more exchange in sight: all of a further one's is behind compute."""
    times = [exchanging(Unit("stp", 4, m), share) for m in (16, 17)]
    assert times[1] - times[0] == pytest.approx(3 - 2 * share)
    assert times[0] < exchanging(Unit("stp", 4, 16), share, joined=False) - 2 * share


def exchanging(unit: Unit, share: float, joined: bool = True) -> float:
    """Return the makespan in units, if a share of a forward, and as much of a backward, is exchange."""
    stages = tuple(stage.changed(LAYER, exchange=stage.layers.forward.scaled(share)) for stage in unit.costs.stages)
    made = unit.of_paper() if joined else replace(unit.of_paper(), joined=frozenset())
    return made.makespan_us(unit.problem, replace(unit.costs, stages=stages)) / TOKENS


DRAWN = {"terapipe": Unit("terapipe", 4, 2, slices=4), "sppo": Unit("sppo", 4, 1, slices=8, link=4)}
DRAWN["pipeoffload"] = Unit("pipeoffload", 4, 8, link=1)
"""Units of the schedules that are about slices or copies; of the others eight microbatches are drawn."""


@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_few_equal_microbatches_is_as_written(name: str):
    unit = DRAWN.get(name, Unit(name, 4, max(8, fewest(name, 4))))
    assert_as_written(f"order_{name}", to_grid(unit.with_copies() if PLANNERS.entries()[name].offloads else unit.plan()))


def problem_of(name: str, cap: int = UNLIMITED_BYTES) -> Problem:
    return Problem(LENGTHS, PLANNERS[name].layout(32, 4).placement.rank_of, (cap,) * 4)


def costs_of(problem: Problem):
    if problem.num_stages > 32:
        layout = HelixLayout.of(32, 4)
        return layout.costs_of(LLAMA.costs(layout.layers, state_bytes_per_parameter=7.5), LLAMA)
    return LLAMA.costs([32 // problem.num_stages] * problem.num_stages, state_bytes_per_parameter=7.5)


SLICING = [name for name in ORDERS if name != "helixpipe"]


@pytest.mark.parametrize("name", SLICING)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(), id="any", marks=pytest.mark.slow),
        pytest.param(Options(slices=6), id="six slices"),
        pytest.param(Options(split_weight=True), id="W", marks=pytest.mark.slow),
        pytest.param(Options(slices=6, split_weight=True), id="six slices, W"),
    ],
)
def test_skewed_batches_have_sound_plans(name: str, options: Options):
    problem = problem_of(name)
    made = plan(problem, costs_of(problem), replace(options, planner=name))
    assert (check(made), blocked([lower(made)])) == ([], [])
    has_weights = any(step.action.op is Op.W for row in made.ranks for step in row)
    assert has_weights == (options.split_weight and PLANNERS.entries()[name].splits_weight)
    if options.slices:
        assert max(len(group) for group in [[c for c in made.chunks if c.segments[0].sequence == 0]]) == 6


@pytest.mark.parametrize("name", ORDERS)
def test_a_cap_is_held_by_recompute(name: str):
    options = Options(planner=name, slices=6 if name in SLICING else 1)
    cap = int(0.8 * max(plan(problem_of(name), costs_of(problem_of(name)), options).predicted.peak_bytes))
    problem = problem_of(name, cap)
    made = plan(problem, costs_of(problem), options)
    assert max(made.predicted.peak_bytes) <= cap
    assert any(one.num_layers for row in made.recompute for one in row)


@pytest.mark.parametrize("name", ORDERS)
def test_evaluations_have_forwards_alone(name: str):
    problem = replace(problem_of(name), forward_only=True)
    made = plan(problem, costs_of(problem), Options(planner=name))
    assert {step.action.op for row in made.ranks for step in row} - {A} == {Op.F}


@pytest.mark.parametrize(
    ("name", "placement", "said"),
    [
        ("zb-v", (0, 1, 2, 3), "2 stages on each rank in a V"),
        ("interleaved", (0, 1, 2, 3), "two or more stages on each rank"),
        ("gpipe", (0, 1, 2, 3, 0, 1, 2, 3), "one stage on each rank"),
        ("v-min", (0, 1, 2, 3, 0, 1, 2, 3), "in a V; the stages are on ranks [0, 1, 2, 3, 0, 1, 2, 3]"),
        ("chronos", (0, 1, 2, 3), "planner 'chronos' needs 2 stages on each rank; the stages are on ranks [0, 1, 2, 3]"),
        ("dualpipe-v", (0, 1, 2, 1, 0), "planner 'dualpipe-v' needs 2 stages on each rank in a V"),
        ("dualpipe-v", (0, 1, 2, 0, 1), "2 stages on each rank in a V; the stages are on ranks [0, 1, 2, 0, 1]"),
    ],
)
def test_another_placement_is_refused_with_the_one_that_is_needed(name: str, placement: tuple[int, ...], said: str):
    problem = Problem(LENGTHS, placement, (UNLIMITED_BYTES,) * (max(placement) + 1))
    assert said in refusal(plan, problem, costs_of(problem), Options(planner=name), error=PlanError)


def test_a_window_that_fits_is_found_behind_those_that_do_not():
    """Orders of a schedule keep more or less: the least cap that is named is that of the least, and a plan is made under it."""
    for name in ("hanayo", "kfkb", "slimpipe"):
        problem = replace(problem_of(name, 1), lengths=(2048,) * 24)
        with pytest.raises(InfeasibleError) as refused:
            plan(problem, costs_of(problem), Options(planner=name, recompute=0))
        enough = replace(problem, cap_bytes=(refused.value.least_cap_bytes,) * 4)
        made = plan(enough, costs_of(problem), Options(planner=name, recompute=0))
        assert max(made.predicted.peak_bytes) <= refused.value.least_cap_bytes


@pytest.mark.parametrize(("name", "least"), [("dualpipe-v", "DualPipeV needs at least 7"), ("stp", "STP needs at least 11")])
def test_too_few_chunks_are_refused_with_how_many_it_takes(name: str, least: str):
    problem = replace(problem_of(name), lengths=(300, 200))
    with pytest.raises(PlanError, match=f"^{least} chunks on 4 ranks; there are 2: [^\\n]*$"):
        plan(problem, costs_of(problem), Options(planner=name, slices=1))


@pytest.mark.parametrize("name", [name for name in compared.ORDERS if name != "helixpipe"])  # whose blocks greedy has not
@some_by_default(("ranks", "microbatches"), [(4, 8), (8, 32)], 1)
def test_greedy_is_no_slower_than_an_order_with_as_much_memory(name: str, ranks: int, microbatches: int):
    planner, count = compared.ORDERS[name]
    entry = PLANNERS.entries()[planner]
    layout = entry.fixed.layout(LAYERS, ranks, count)
    costs = compared.costs_of(layout, 4096)
    options = Options(split_weight=entry.splits_weight, overlap_exchanges=entry.joins)
    free = Problem((4096,) * max(microbatches, fewest(name, ranks)), layout.placement.rank_of, (UNLIMITED_BYTES,) * ranks)
    made = plan(free, costs, replace(options, planner=planner))
    ours = plan(replace(free, cap_bytes=(max(made.predicted.peak_bytes),) * ranks), costs, options)
    assert ours.predicted.makespan_us <= made.predicted.makespan_us * (1 + TIE)


@pytest.mark.parametrize("name", ["interleaved", "hanayo"], ids=["looped", "v"])
def test_forwards_and_backwards_in_turn_wait_as_little_as_megatrons_interleaved_order(name: str):
    unit = Unit(name, 8, 32)
    orders = [ListScheduling(2.5, turns).order(unit.chunks, unit.tables, unit.problem) for turns in (False, True)]
    waits = [unit.waits(replace(unit.of_paper(), order=order)) for order in orders]
    assert waits[0] > waits[1] == 7 * 3 / 2


PATTERNS = (Interleaved(), Interleaved(elastic=False))
V_PATTERNS = tuple(Block(name, minimal) for name in BLOCKS for minimal in (False, True))


@pytest.mark.parametrize("microbatches", [10, 11])
def test_microbatches_whose_own_windows_are_a_deadlock_are_interleaved_with_one_warm_up(microbatches: int):
    unit = Unit("interleaved, 4", 4, microbatches)
    order = PATTERNS[0].order(unit.chunks, unit.tables, unit.problem)
    assert order == unit.of_paper().order
    assert order != ListScheduling(2, alternating=True).order(unit.chunks, unit.tables, unit.problem)


@pytest.mark.parametrize("seed", range(12))
def test_patterns_run_every_action_once_whatever_the_slices(seed: int):
    draw = random.Random(seed)
    ranks, counts = draw.randint(2, 6), sorted((draw.choice((1, 1, 2, 5, 9)) for _ in range(draw.randint(1, 20))), reverse=True)
    chunks = tuple(Chunk((Segment(q, 10 * k, 10 * k + 10),)) for q, count in enumerate(counts) for k in range(count))
    for kind, laps, rules in (("looped", 2, PATTERNS), ("looped", 3, PATTERNS), ("v", 2, V_PATTERNS)):
        placement = Placement(kind, ranks, laps)
        problem = Problem(tuple(10 * count for count in counts), placement.rank_of, (UNLIMITED_BYTES,) * ranks)
        tables = tabulate(chunks, problem, unit_costs(placement.num_stages))
        for rule in rules:
            order = rule.order(chunks, tables, problem)
            assert makespan_us(order, tables, [[0] * len(chunks)] * placement.num_stages) > 0
            every = sorted(action for row in order for action in row)
            stages, table = range(placement.num_stages), range(len(chunks))
            assert every == sorted(Action(op, stage, c) for op in (Op.F, Op.B) for stage in stages for c in table)
