"""Quality of plans: close to a bound that holds, faster with more freedom or time, and steps of local search that gain."""

import dataclasses
import random
from dataclasses import replace

import pytest

from megatron_epp.features.copies import fit_copies
from megatron_epp.features.local_search.improvement import improve
from megatron_epp.features.split_weights.split_orders import with_split_weights
from megatron_epp.plan import Op, Plan
from megatron_epp.plan.proof import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.fitted import for_table
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.offload import peaks_with_copies, timed
from megatron_epp.planner.orders.warm_up import WarmUp
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import greedy
from megatron_epp.planner.search import SMALL_PLAN_ITEMS, search
from megatron_epp.planner.tables import tabulate
from scripts.bench.small_cases import drawn
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths
from tests.support.seeds import some_by_default, spread_by_default

WEB = web_lengths(200, seed=3)
WHALE = (131072, *web_lengths(120, seed=4, longest=2000))
EQUAL = (16384,) * 16
BIMODAL = tuple(60000 if i % 25 == 0 else 300 + 13 * i for i in range(100))
BATCHES = {"web": WEB, "whale": WHALE, "equal": EQUAL, "bimodal": BIMODAL}
SPLIT = Options(split_weight=True)
LOOPED, V = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)


def gap(made: Plan) -> float:
    return made.predicted.makespan_us / made.predicted.lower_bound_us - 1.0


def raw_bound_us(made: Plan, given: Problem, stages: int, options: Options, recompute_steps: int = 4) -> float:
    costs = pipeline(stages, recompute_steps)
    return lower_bound_us(
        tabulate(made.chunks, given, costs, options.modes(costs.recompute_modes)), made.chunks, given, options
    )


def ops(made: Plan) -> set[Op]:
    return {step.action.op for row in (*made.ranks, *made.copies) for step in row}


@spread_by_default(2, name=BATCHES, cap=(34, 48, 400))
def test_the_plan_is_close_to_a_bound_that_counts_the_recompute_the_cap_forces(name: str, cap: int):
    given = problem(BATCHES[name], 8, cap * GIB)
    made = plan(given, pipeline(8))
    assert gap(made) < 0.05
    assert raw_bound_us(made, given, 8, Options()) <= made.predicted.makespan_us * (1 + 1e-9)


@pytest.mark.parametrize("lengths", [WEB, EQUAL], ids=["web", "equal"])
def test_weight_gradients_of_their_own_are_faster_and_fit_the_same_cap(lengths: tuple[int, ...]):
    given = problem(lengths, 8, 40 * GIB)
    joint, split = plan(given, pipeline(8)), plan(given, pipeline(8), SPLIT)
    assert ops(split) == {Op.F, Op.B, Op.W}
    assert split.predicted.makespan_us < joint.predicted.makespan_us
    assert max(split.predicted.peak_bytes) <= 40 * GIB


def test_offload_takes_the_place_of_recompute_and_fits_the_same_cap():
    given = problem(WHALE, 8, 34 * GIB)
    without, made = plan(given, pipeline(8)), plan(given, pipeline(8), Options(offload=True))
    assert ops(made) == {Op.F, Op.B, Op.O, Op.L}
    assert check(made) == []
    assert made.predicted.makespan_us < 0.97 * without.predicted.makespan_us
    assert sum(map(sum, made.recompute_us)) < sum(map(sum, without.recompute_us))


@some_by_default(("lengths", "stages", "cap"), [(EQUAL, 4, 20), (WHALE, 8, 30), (EQUAL, 8, 20)], 1)
def test_weight_gradients_of_their_own_and_copies_go_together(lengths: tuple[int, ...], stages: int, cap: int):
    given, costs = problem(lengths, stages, cap * GIB), pipeline(stages)
    choices = Options(offload=True), SPLIT, Options(offload=True, split_weight=True)
    copied, split, both = (plan(given, costs, options) for options in choices)
    assert ops(both) == {Op.F, Op.B, Op.W, Op.O, Op.L}
    assert check(both) == []
    assert both.predicted.makespan_us < copied.predicted.makespan_us
    assert both.predicted.makespan_us < split.predicted.makespan_us
    assert raw_bound_us(both, given, stages, choices[-1]) <= both.predicted.makespan_us * (1 + 1e-9)


@pytest.mark.xfail(strict=True, reason="0.8 % slower: judged with weight gradients, the walk with copies ends in wider runs")
def test_where_weight_gradients_of_their_own_gain_nothing_beside_copies_asking_for_them_costs_next_to_nothing():
    given, costs = problem(EQUAL, 4, 16 * GIB), pipeline(4)
    choices = Options(offload=True), SPLIT, Options(offload=True, split_weight=True)
    copied, split, both = (plan(given, costs, options).predicted.makespan_us for options in choices)
    assert both <= 1.002 * min(copied, split)


@pytest.mark.slow
def test_ranks_that_take_turns_on_a_link_copy_no_slower_than_with_a_fixed_share_of_it():
    given, own = problem(WHALE, 8, 26 * GIB), pipeline(8)
    own = dataclasses.replace(own, host_us_per_byte=2 * own.host_us_per_byte)
    fixed, turns = dataclasses.replace(own, host_us_per_byte=2 * own.host_us_per_byte), dataclasses.replace(own, host_turns=2)
    took_us = [plan(given, costs, Options(offload=True)).predicted.makespan_us for costs in (own, turns, fixed)]
    assert took_us == sorted(took_us)
    assert took_us[1] < took_us[2]


@some_by_default("turns", [2, 3, 1], 2)
def test_what_the_search_plays_is_what_the_simulator_says(turns: int):
    given, costs = problem(WHALE, 4, 26 * GIB), dataclasses.replace(pipeline(4), host_turns=turns)
    made = greedy(given, costs, Options(offload=True))
    written = build_plan(given, costs, Options(offload=True), made)
    assert any(written.copies)
    assert written.host_links == {1: (), 2: (0, 0, 1, 1), 3: (0, 0, 0, 1)}[turns]
    assert made.makespan_us(given, costs) == written.predicted.makespan_us
    tables = made.tables(given, costs)
    played = play(made.order, tables, made.recompute_steps, timed(made.as_offload, tables))
    assert tuple(peaks_with_copies(made.order, tables, made.as_offload, played)) == written.predicted.peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_no_copies_bring_a_rank_below_what_it_holds_with_all_else_away(seed: int, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    stages = draw.randint(1, 3)
    asked, costs = problem([draw.randint(3000, 50_000) for _ in range(draw.randint(1, 5))], stages), pipeline(stages)
    chunks = plan(asked, costs, Options(slices=6)).chunks
    tables = tabulate(chunks, asked, costs, Options().modes(costs.recompute_modes))
    order = WarmUp(lead=2, minimal=True).order(chunks, tables, asked)
    least = fit_copies.floors(order, encode(order, len(chunks)), tables)
    unlimited = [[UNLIMITED_BYTES] * stages]
    monkeypatch.setattr(fit_copies, "floors", lambda *_: [0] * stages)
    for rank in range(stages):
        caps = tuple(least[rank] - 1 if other == rank else UNLIMITED_BYTES for other in range(stages))
        assert fit_copies.fit_offload(order, (tables,), caps, unlimited) is None


def test_offload_spares_recompute_of_a_given_chunk_table():
    costs = dataclasses.replace(pipeline(4), host_us_per_byte=1e-6)
    free = plan(problem(EQUAL, 4), costs, Options(slices=2))
    given = problem(EQUAL, 4, int(0.6 * max(free.predicted.peak_bytes)))
    bare, copied = (for_table(free.chunks, given, costs, Options(offload=offload)) for offload in (False, True))
    assert bare.chunks == copied.chunks == free.chunks
    assert copied.copies
    assert copied.makespan_us(given, costs) < bare.makespan_us(given, costs)


GIVEN, COSTS, OPTIONS = problem((9000, 8000, 3000, 2500), 3, 9 * GIB), pipeline(3, 2), Options(slices=1)


def fastest(given, costs, options) -> Decisions:
    """The fastest that the search finds, before local search, with whole backwards."""
    return search(Replicas((given,), costs, options)).best().whole_backwards[0]


def test_steps_are_judged_with_weight_gradients_split_off_where_that_is_asked_for():
    given, costs, options = drawn(102)
    start = fastest(given, costs, options)
    tables = start.tables(given, costs)
    whole, split = (improve(start, tables, given, options, split_weight=asked) for asked in (False, True))

    def split_us(made: Decisions) -> float:
        return with_split_weights(made.order, tables, made.as_offload, given.cap_bytes)[1]

    assert split_us(split) < min(split_us(start), split_us(whole))
    assert split.makespan_us(given, costs) >= whole.makespan_us(given, costs)


def test_a_plan_of_few_chunks_is_searched_with_weight_gradients_split_off_unasked(monkeypatch: pytest.MonkeyPatch):
    given, costs, options = drawn(167)
    given = replace(given, cap_bytes=(30_200_000_000,) * given.num_ranks)
    made = greedy(given, costs, options)
    assert len(made.chunks) * given.num_stages <= SMALL_PLAN_ITEMS
    assert made.makespan_us(given, costs) == pytest.approx(222_763, abs=1)
    monkeypatch.setattr("megatron_epp.features.local_search.improvement.SMALL_PLAN_ITEMS", 0)
    assert greedy(given, costs, options).makespan_us(given, costs) > 1.05 * made.makespan_us(given, costs)
