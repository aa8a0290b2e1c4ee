"""The oracle against every order and recompute of tiny cases and formulas; greedy plans, as the exact planner refines them."""

import itertools
import logging
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from megatron_epp.contrib.exact import oracle as exact
from megatron_epp.contrib.exact.oracle import TOLERANCE, Proven, oracle
from megatron_epp.contrib.exact.refine import MOST_CHUNKS, milp
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import Costs, PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import Action, Chunk, InfeasibleError, Op, PlanError, Segment
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import least_peaks, peaks_bytes
from megatron_epp.planner.fitted import for_table
from megatron_epp.planner.order import Order
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.result import greedy
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.tools.formulas import H100, analytic_profile, library
from scripts.bench.orders.unit import TOKENS, Unit
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem
from tests.support.plan.stages import stage_of
from tests.support.seeds import some_by_default


def tiny_case(seed: int) -> tuple[tuple[Chunk, ...], Problem, PipelineCosts]:
    """Two stages of one layer and three chunks of odd sizes, sliced or not."""
    draw = random.Random(seed)
    sizes = [[draw.randint(2, 20) for _ in range(count)] for count in draw.choice([(1, 1, 1), (2, 1), (3,)])]
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
        return all(order.index(other) < order.index(c) for c in number for other in before[c])

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


pytest.importorskip("ortools", reason="the oracle needs OR-tools: pip install 'megatron-epp[milp]'")


def finds_none(chunks: Sequence[Chunk], asked: Problem, costs: Costs) -> bool:
    """Whether the oracle says that nothing fits, or finds nothing for a second: a proof of that may take minutes."""
    try:
        return oracle(chunks, asked, costs, Options(), time_limit_s=1).decisions is None
    except InfeasibleError as error:
        return str(asked.cap_bytes[0]) in str(error)


@some_by_default("seed", [1, 2, 3, 0, 4, 5, 6, 7], 2)
def test_no_order_and_no_recompute_is_faster(seed: int):
    chunks, asked, costs = tiny_case(seed)
    tables = tabulate(chunks, asked, costs)
    order = elastic_1f1b(chunks, 2, False)
    least = max(least_peaks(order, tables))
    most = max(peaks_bytes(order, tables, [[0] * len(chunks)] * 2))
    # without the least cap itself, where the search for anything that fits may take minutes
    caps = sorted({(2 * least) // 3, least - 1, (least + most) // 2, most, 3 * most})
    for cap, best_us in zip(caps, best_by_force(chunks, tables, caps), strict=True):
        capped = replace(asked, cap_bytes=(cap, cap))
        if math.isinf(best_us):
            assert finds_none(chunks, capped, costs)
            continue
        found = oracle(chunks, capped, costs, Options())
        assert found.optimal
        assert found.makespan_us == pytest.approx(best_us, rel=2e-6)
        assert found.bound_us <= found.makespan_us
        assert found.decisions is not None
        made = build_plan(capped, costs, Options(planner="milp"), found.decisions)
        assert made.predicted.makespan_us == pytest.approx(best_us, rel=2e-6)


WEIGHTS = Options(split_weight=True)


def test_a_cap_below_what_ranks_hold_throughout_is_refused():
    chunks, asked, costs = tiny_case(0)
    cap = max(tabulate(chunks, asked, costs).static) - 1
    with pytest.raises(InfeasibleError, match=str(cap)):
        oracle(chunks, replace(asked, cap_bytes=(cap, cap)), costs, Options(), time_limit_s=20)


def test_weight_gradients_are_split_off_where_it_is_worth_it():
    """One sequence of three slices under a cap between what no and full recompute need."""
    costs, free = pipeline(2, 2), problem((24_000,), 2)
    chunks = plan(free, costs, Options(slices=3)).chunks
    tables, order = tabulate(chunks, free, costs), elastic_1f1b(chunks, 2, False)
    cap = (max(least_peaks(order, tables)) + max(peaks_bytes(order, tables, [[0] * 3] * 2))) // 2
    asked = replace(free, cap_bytes=(cap, cap))
    plain, weights = (oracle(chunks, asked, costs, options) for options in (Options(), WEIGHTS))
    assert plain.decisions is not None
    assert any(action.op is Op.W for row in weights.decisions.order for action in row)
    assert weights.makespan_us < plain.makespan_us
    assert build_plan(asked, costs, WEIGHTS, weights.decisions).predicted.makespan_us == pytest.approx(weights.makespan_us)


def small_case(seed: int) -> tuple[Problem, Options, int]:
    draw = random.Random(seed)
    stages = draw.choice([2, 3])
    lengths = tuple(round(10 ** draw.uniform(2.7, 4.7)) for _ in range(draw.randint(2, 4)))
    static = max(stage.static_bytes for stage in pipeline(stages, 2).stages)
    return problem(lengths, stages, static + round(sum(lengths) * draw.uniform(2e5, 8e5))), Options(slices=2), stages


@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_the_greedy_plan_it_starts_from(seed: int):
    asked, options, stages = small_case(seed)
    costs = pipeline(stages, 2)
    start = greedy(asked, costs, options)
    found = oracle(start.chunks, asked, costs, options, start=start, time_limit_s=2)
    assert found.decisions is not None
    made = build_plan(asked, costs, options, found.decisions)
    before = build_plan(asked, costs, options, start)
    assert check(made) == []
    assert made.predicted.makespan_us == pytest.approx(found.makespan_us)
    assert before.predicted.lower_bound_us <= found.bound_us <= found.makespan_us <= before.predicted.makespan_us
    assert found.optimal == (found.makespan_us < found.bound_us * (1 + TOLERANCE))


def test_without_time_the_start_is_the_answer_and_the_bound_says_how_good_it_is():
    asked = problem((60_000, 30_000, 20_000, 9000, 3000, 2000), 4, 30 * GIB)
    start = greedy(asked, pipeline(4), Options(slices=3))
    found = oracle(start.chunks, asked, pipeline(4), Options(), start=start, time_limit_s=0.01)
    assert found.decisions == start
    assert not found.optimal
    assert found.bound_us < found.makespan_us


def test_what_it_does_not_know_it_refuses():
    chunks = plan(problem((100, 100), 2), pipeline(2)).chunks
    with pytest.raises(PlanError, match="oracle"):
        oracle(chunks, problem((100, 100), 2, forward_only=True), pipeline(2), Options())


# Equal microbatches with unit costs, whose optimum is a formula: F, B and W take one unit each on a rank.


def best(unit: Unit, microbatches: float, options: Options) -> Proven:
    """Solve under a cap of so many microbatches, and compare the plan with what the solver says of it."""
    capped = replace(unit.problem, cap_bytes=(int(microbatches * TOKENS),) * unit.problem.num_ranks)
    start = for_table(unit.chunks, capped, unit.costs, options)
    found = oracle(unit.chunks, capped, unit.costs, options, start=start, time_limit_s=60)
    assert found.optimal
    assert found.decisions is not None
    made = build_plan(capped, unit.costs, options, found.decisions)
    assert check(made) == []
    assert made.predicted.makespan_us == found.makespan_us <= start.makespan_us(capped, unit.costs)
    assert found.bound_us == pytest.approx(found.makespan_us)
    return found


def waits(unit: Unit, found: Proven) -> float:
    """Idle time of a rank, in units."""
    return found.makespan_us / TOKENS - 3 * unit.microbatches


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 4), (4, 5)])
def test_whole_backwards_wait_as_1f1b_whatever_the_memory(p: int, m: int):
    """The bubble of 1F1B is (p - 1)(F + B), and with the memory of p microbatches or with more no order has less."""
    unit = Unit("1f1b-sliced", p, m)
    assert [waits(unit, best(unit, cap, Options())) for cap in (p, m + 1)] == [3 * (p - 1)] * 2


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 4), (4, 6)])
def test_split_weight_gradients_wait_as_zb_h1_with_the_memory_of_1f1b(p: int, m: int):
    """The bubble of ZB-H1 is (p - 1)(F + B - W); a rank's W fill all but the way of the first forward."""
    unit = Unit("zb-h1", p, m)
    assert waits(unit, best(unit, p, WEIGHTS)) == p - 1 == unit.waits(unit.of_paper())


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v", "interleaved", "hanayo"])
def test_no_order_of_several_stages_per_rank_is_faster_with_its_memory(name: str):
    unit = Unit(name, 2, 4)
    theirs = unit.of_paper()
    found = best(unit, unit.peak_bytes(theirs) / TOKENS, replace(WEIGHTS, split_weight=unit.splits_weight))
    assert waits(unit, found) <= unit.waits(theirs)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 3)])
def test_memory_for_one_microbatch_runs_one_after_the_other(p: int, m: int):
    """Rank 0 keeps a microbatch from its forward to its weight gradient, 2 p + 1 units later."""
    assert best(Unit("zb-h1", p, m), 1, WEIGHTS).makespan_us / TOKENS == m * (2 * p + 1)


LONG_AND_SHORT = (9000, 700, 16_000)
COSTS = pipeline(2, 2)
OPTIONS = Options(planner="milp", slices=2, plan_limit_s=20)


def shared(tensor_parallel: int, shares: tuple[float, ...] = ()) -> PipelineCosts:
    """Return costs of two stages whose layers some ranks share, and the output layer the stages, by these shares."""
    shape = library.shape_of(
        library.load_flags("llama3-8b") | {"num_layers": 16, "tensor_model_parallel_size": tensor_parallel}
    )
    return analytic_profile(shape, H100).costs([8, 8], state_bytes_per_parameter=7.5, vocabulary_shares=shares)


def test_what_only_offload_makes_fit_is_refined_too():
    costs, options = pipeline(2), replace(OPTIONS, offload=True, slices=8, plan_limit_s=1)
    with pytest.raises(InfeasibleError) as error:
        plan(problem([60_000], 2, 1), costs, replace(options, offload=False, planner="greedy"))
    asked = problem([60_000], 2, int(0.9 * (error.value.least_cap_bytes or 0)))
    found, start = milp(asked, costs, options), greedy(asked, costs, options)
    assert len(found.chunks) <= MOST_CHUNKS
    assert any(found.copies)
    made, before = (build_plan(asked, costs, options, one) for one in (found, start))
    assert check(made) == []
    assert made.predicted.makespan_us <= before.predicted.makespan_us


def test_a_fixed_recompute_is_kept():
    made = milp(problem(LONG_AND_SHORT, 2), COSTS, replace(OPTIONS, recompute=1, plan_limit_s=5))
    assert {num_steps for row in made.recompute_steps for num_steps in row} == {1}


STAYING = {
    "more than 16 chunks": (problem((4000,) * (MOST_CHUNKS + 1), 2), COSTS, OPTIONS),
    "evaluations": (problem(LONG_AND_SHORT, 2, forward_only=True), COSTS, OPTIONS),
}


@pytest.mark.parametrize("why", STAYING)
def test_what_the_exact_planner_does_not_know_stays_as_greedy_plans_it_and_a_line_says_why(
    why: str, caplog: pytest.LogCaptureFixture
):
    asked, costs, options = STAYING[why]
    with caplog.at_level(logging.INFO):
        made = milp(asked, costs, options)
    assert made == greedy(asked, costs, options)
    (said,) = caplog.messages
    assert said.startswith("the plan is greedy's, the exact planner looks for no better one: ")
    assert why in said


SHARDED, EXCHANGING = shared(2, (0.5, 0.5)), shared(8)


@some_by_default("split", [True, False], 1)
def test_shards_of_the_vocabulary_are_refined(split: bool):
    asked = problem((12_000, 4000, 2000, 500), 2)
    options = Options(chunk_tokens=9500, split_weight=split, plan_limit_s=20)
    start, like = greedy(asked, SHARDED, options), milp(asked, SHARDED, options)
    assert {action.op for row in like.order for action in row} >= {Op.S, Op.N, Op.T}
    assert check(build_plan(asked, SHARDED, options, like)) == []
    times_us = [exact.makespan_us(asked, SHARDED, options, one) for one in (like, start)]
    assert times_us[0] < times_us[1]


def test_neighbours_in_a_refined_order_are_joined_where_exchanges_are_overlapped(caplog: pytest.LogCaptureFixture):
    asked, options = problem((4096,) * 6, 2), Options(slices=1, chunk_tokens=4096, overlap_exchanges=True, plan_limit_s=5)
    start = greedy(asked, EXCHANGING, options)
    with caplog.at_level(logging.INFO):
        made = milp(asked, EXCHANGING, options)
    assert made.joined
    assert "greedy's" not in caplog.text
    assert check(build_plan(asked, EXCHANGING, options, made)) == []
    assert exact.makespan_us(asked, EXCHANGING, options, made) <= exact.makespan_us(asked, EXCHANGING, options, start)


def test_under_a_cap_a_batch_is_refined_also_without_exchanges_to_overlap(caplog: pytest.LogCaptureFixture):
    lengths = (16_000, 9000, 3000, 700)
    asked = problem(lengths, 2, int(1.02 * least_cap_bytes(problem(lengths, 2), COSTS, Options(slices=2))))  # above the least
    options = replace(OPTIONS, overlap_exchanges=True)
    with caplog.at_level(logging.INFO):
        made = milp(asked, COSTS, options)
    assert made == milp(asked, COSTS, OPTIONS)
    assert check(build_plan(asked, COSTS, options, made)) == []
    refined_us, greedy_us = (exact.makespan_us(asked, COSTS, options, one) for one in (made, greedy(asked, COSTS, options)))
    assert refined_us < 0.999 * greedy_us
    assert "greedy's" not in caplog.text


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)], ids=["looped", "v"])
def test_several_stages_on_a_rank_are_refined(placement: tuple[int, ...]):
    asked = replace(problem(LONG_AND_SHORT, 4), placement=placement, cap_bytes=(1 << 40,) * 2)
    costs = pipeline(4, 2)
    options = replace(OPTIONS, split_weight=True, plan_limit_s=2)
    made, before = (
        build_plan(asked, costs, options, one) for one in (milp(asked, costs, options), greedy(asked, costs, options))
    )
    assert check(made) == []
    assert made.predicted.makespan_us <= before.predicted.makespan_us
