"""The oracle against every order and recompute of tiny cases, and against the greedy planner on small ones."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_epp.contrib.exact.oracle import TOLERANCE, oracle
from megatron_epp.cost import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Op, PlanError
from megatron_epp.plan.check import check
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.fit import least_peaks, peaks_bytes
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.result import greedy
from megatron_epp.planner.tables import tabulate
from tests.support.plan.oracle_cases import Changes, best_by_force, tiny_case, with_features
from tests.support.plan.planner_cases import GIB, pipeline, problem
from tests.support.seeds import some_by_default

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


@some_by_default("seed", [1, 2, 7], 1)
@pytest.mark.parametrize("options", [Options(), WEIGHTS], ids=["plain", "weights"])
def test_no_small_change_of_the_best_is_better(seed: int, options: Options):
    chunks, asked, costs = tiny_case(seed)
    costs = with_features(costs, seed)
    tables = tabulate(chunks, asked, costs)
    order = elastic_1f1b(chunks, 2, False)
    most = max(peaks_bytes(order, tables, [[0] * len(chunks)] * 2))
    cap = max(least_peaks(order, tables)) * 2 // 3 + most // 3
    asked = replace(asked, cap_bytes=(cap, cap))
    found = oracle(chunks, asked, costs, options)
    assert found.optimal
    assert found.decisions is not None
    without = oracle(chunks, asked, costs, Options())
    assert found.makespan_us <= without.makespan_us
    assert build_plan(asked, costs, options, found.decisions).predicted.makespan_us == found.makespan_us
    changes, sound = Changes(options, seed), 0
    for _ in range(400):
        try:
            made = build_plan(asked, costs, options, changes.of(found.decisions))
        except PlanError:
            continue
        sound += 1
        assert made.predicted.makespan_us >= found.bound_us * (1 - 3e-5)
    assert sound


def test_weight_gradients_are_split_off_where_it_is_worth_it():
    """One sequence of three slices under a cap between what no and full recompute need."""
    costs, free = pipeline(2, 2), problem((24_000,), 2)
    chunks = plan(free, costs, Options(slices=3)).chunks
    tables, order = tabulate(chunks, free, costs), elastic_1f1b(chunks, 2, False)
    cap = (max(least_peaks(order, tables)) + max(peaks_bytes(order, tables, [[0] * 3] * 2))) // 2
    plain, weights = (oracle(chunks, replace(free, cap_bytes=(cap, cap)), costs, options) for options in (Options(), WEIGHTS))
    assert plain.decisions is not None
    assert weights.decisions is not None
    assert any(action.op is Op.W for row in weights.decisions.order for action in row)
    assert weights.makespan_us < plain.makespan_us


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


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        (problem((100, 100), 2, forward_only=True), Options()),
    ],
    ids=["evaluation"],
)
def test_what_it_does_not_know_it_refuses(asked: Problem, options: Options):
    chunks = plan(problem((100, 100), 2), pipeline(2)).chunks
    with pytest.raises(PlanError, match="oracle"):
        oracle(chunks, asked, pipeline(2), options)
