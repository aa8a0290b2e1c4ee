"""Greedy at once, refined when the batch comes again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.plan.check import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.exact.refine import MOST_CHUNKS, Refiner, milp
from megatron_epp.planner.search.greedy import greedy
from megatron_epp.planner.search.recent import canonical, relabelled
from tests.support.plan.planner_cases import pipeline, problem

pytest.importorskip("ortools", reason="the solver needs OR-tools: pip install 'megatron-epp[milp]'")

LENGTHS = (9000, 700, 16_000)
COSTS = pipeline(2, 2)
OPTIONS = Options(planner="milp", slices=2)


@pytest.fixture
def refiner() -> Iterator[Refiner]:
    made = Refiner(COSTS, OPTIONS, time_limit_s=20)
    yield made
    made.close()


def test_the_same_lengths_in_another_order_get_the_refined_plan(refiner: Refiner):
    first = refiner.plan(problem(LENGTHS, 2))
    assert first.predicted.makespan_us == plan(problem(LENGTHS, 2), COSTS, Options(slices=2)).predicted.makespan_us
    assert refiner._worker._connection.poll(60)
    shuffled = LENGTHS[2], LENGTHS[0], LENGTHS[1]
    second = refiner.plan(problem(shuffled, 2))
    assert refiner.solved.recall(canonical(problem(LENGTHS, 2))[0]) is not None
    assert second.lengths == shuffled
    assert check(second) == []
    assert second.predicted.makespan_us <= first.predicted.makespan_us
    asked, sequences = canonical(problem(shuffled, 2))
    refined = relabelled(milp(asked, COSTS, OPTIONS, 20), sequences)
    assert second == build_plan(problem(shuffled, 2), COSTS, OPTIONS, refined)


def test_what_only_offload_makes_fit_stays_as_it_is():
    costs, options = pipeline(2), replace(OPTIONS, offload=True, slices=8)
    with pytest.raises(InfeasibleError) as error:
        plan(problem([60_000], 2, 1), costs, replace(options, offload=False, planner="greedy"))
    asked = problem([60_000], 2, int(0.9 * (error.value.least_cap_bytes or 0)))
    found = milp(asked, costs, options, 20)
    assert len(found.chunks) <= MOST_CHUNKS
    assert found == greedy(asked, costs, options)


def test_what_fits_nothing_is_said_at_once(refiner: Refiner):
    with pytest.raises(InfeasibleError):
        refiner.plan(problem(LENGTHS, 2, max(stage.static_bytes for stage in COSTS.stages)))


def test_what_goes_wrong_in_the_solver_surfaces_with_the_next_batch():
    refiner = Refiner(COSTS, replace(OPTIONS, recompute=1), time_limit_s=20)  # which the oracle does not know
    refiner.plan(problem(LENGTHS, 2))
    refiner._worker._connection.poll(60)
    with pytest.raises(PlanError, match="the oracle chooses recompute itself"):
        refiner.plan(problem((500, 600), 2))
    assert check(refiner.plan(problem((500, 600), 2))) == []
    refiner.close()


def test_closing_ends_the_solver_in_the_middle_of_a_batch():
    refiner = Refiner(pipeline(4, 2), Options(planner="milp", slices=4), time_limit_s=600)
    refiner.plan(problem((9000, 700, 16_000), 4))
    refiner.close()
    assert refiner._worker._process.returncode is not None


def test_relabelling_undoes_the_sorting():
    lengths = tuple(random.Random(1).sample(range(100, 9000), 12))
    asked, sequences = canonical(problem(lengths, 2))
    assert list(asked.lengths) == sorted(lengths, reverse=True)
    made = relabelled(greedy(asked, COSTS, Options()), sequences)
    ends = {s.sequence: s.end for chunk in made.chunks for s in chunk.segments}
    assert tuple(ends[q] for q in range(len(lengths))) == lengths


def test_the_planner_is_never_slower_than_greedy():
    asked = problem(LENGTHS, 2)
    refined = plan(asked, COSTS, OPTIONS).predicted
    assert refined.makespan_us <= plan(asked, COSTS, Options(slices=2)).predicted.makespan_us


def test_long_tables_evaluations_and_several_stages_on_a_rank_stay_greedy():
    long = problem((4000,) * (MOST_CHUNKS + 1), 2)
    assert len(greedy(long, COSTS, OPTIONS).chunks) > MOST_CHUNKS
    evaluation = problem(LENGTHS, 2, forward_only=True)
    looped = replace(problem(LENGTHS, 4), placement=(0, 1, 0, 1), cap_bytes=(1 << 40,) * 2)
    for asked, costs in ((long, COSTS), (evaluation, COSTS), (looped, pipeline(4, 2))):
        assert milp(asked, costs, OPTIONS, 1.0) == greedy(asked, costs, OPTIONS)
