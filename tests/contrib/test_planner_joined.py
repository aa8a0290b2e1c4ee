"""Steps of two actions in a planner's decisions: their time, their bytes, and what is refused."""

from dataclasses import replace

import pytest

from megatron_epp.contrib.overlap.joined import Passing, joined_us
from megatron_epp.cost import H100, LinearTime, analytic_profile, on_device
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.cost.slowness import ITERATIONS, SlowStages
from megatron_epp.plan import Action, Op, PlanError, Step
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from scripts.bench.orders.unit import TOKENS, Unit


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Passing(10.0, 0.0), Passing(7.0, 0.0), 17.0),  # nothing is exchanged
        (Passing(10.0, 4.0), Passing(7.0, 2.0), 11.0),  # every exchange is behind the other's compute
        (Passing(10.0, 4.0), Passing(3.0, 0.0), 10.0),  # a second of exchange is left
        (Passing(10.0, 8.0), Passing(10.0, 8.0), 16.0),  # the exchanges take longest
        (Passing(10.0, 12.0), Passing(7.0, 0.0), 10.0),  # no action takes less than nothing
    ],
)
def test_the_exchange_of_each_is_behind_the_compute_of_the_other(one: Passing, other: Passing, expected: float):
    assert joined_us(one, other) == joined_us(other, one) == expected


def exchanging_plan(options: Options):
    shape = shape_of(load_flags("llama3-8b") | {"tensor_model_parallel_size": 8})
    costs = on_device(analytic_profile(shape, H100).costs([4] * 8, state_bytes_per_parameter=7.5))
    lengths = (30000, 28000, 9000, 5000, 3000, 2000) * 3
    problem = Problem(lengths, Placement("v", 4, 2).rank_of, (UNLIMITED_BYTES,) * 4)
    return plan(problem, costs, replace(options, planner="stp")), costs


def steps_of(**changes: float) -> dict[str, Step]:
    """The steps of two actions of a small plan by their kinds, with unit costs and these fields of a stage's, per token."""
    unit = Unit("stp", 4, 11)
    exchange, working = LinearTime(0.0, changes.get("exchange", 0.0)), changes.get("working", 0.0)
    stages = tuple(stage.changed(LAYER, exchange=exchange, working_bytes_per_token=working) for stage in unit.costs.stages)
    made = build_plan(unit.problem, replace(unit.costs, stages=stages), Options(), unit.of_paper())
    split = {(stage, chunk) for row in made.ranks for step in row for op, stage, chunk in step.actions if op is Op.W}
    joined = [step for row in made.ranks for step in row if step.also]
    return {"".join(a.op + "*" * (a.op is Op.B and a[1:] in split) for a in step.actions): step for step in joined}


def test_a_step_takes_as_long_as_both_actions_less_the_exchange_that_is_hidden():
    """F takes half a unit on a stage, B and W as much, and a token's exchange a tenth of a unit."""
    plain, exchanging = steps_of(), steps_of(exchange=0.1)
    taken = {kind: (plain[kind].time_us - exchanging[kind].time_us) / TOKENS for kind in plain}
    assert taken == pytest.approx({"FF": 0.2, "FB": 0.2, "FB*": 0.2, "FW": 0.1})
    assert {kind: step.time_us / TOKENS for kind, step in plain.items()} == {"FF": 1.0, "FB": 1.5, "FB*": 1.0, "FW": 1.0}


def test_a_step_needs_the_working_memory_of_both_actions():
    plain, working = steps_of(), steps_of(working=0.5)
    for kind, step in working.items():
        assert step.alloc_bytes - plain[kind].alloc_bytes == step.free_bytes - plain[kind].free_bytes == TOKENS / 2


@pytest.mark.parametrize("options", [Options(), Options(split_weight=True), Options(recompute=2)])
def test_bytes_by_item_add_up_to_those_of_the_steps(options: Options):
    made, costs = exchanging_plan(options)
    breakdown = memory_breakdown(made, costs)
    for step in (step for row in made.ranks for step in row):
        assert sum(breakdown.takes[step.action].values()) == step.alloc_bytes
        assert sum(breakdown.gives[step.action].values()) == step.free_bytes


def decisions():
    unit = Unit("stp", 2, 5)
    return unit, unit.of_paper()


def test_pairs_that_are_not_neighbours_or_share_an_action_are_refused():
    unit, made = decisions()
    strange = (Action(Op.F, 0, 0), Action(Op.B, 0, 4))
    with pytest.raises(PlanError, match="joined has 0F0 and 0B4, which no rank runs one after the other"):
        build_plan(unit.problem, unit.costs, Options(), replace(made, joined=frozenset({strange})))
    row = made.order[0]
    with pytest.raises(PlanError, match=f"joined has {row[1]} in two pairs"):
        build_plan(unit.problem, unit.costs, Options(), replace(made, joined=frozenset({row[:2], row[1:3]})))


def test_actions_that_take_turns_last_longer_and_make_no_stage_slow():
    made = Unit("stp", 2, 5).plan()
    alone, slow = ((step.action, step.time_us) for step in made.ranks[0] if not step.also), SlowStages()
    times = [*alone, *((action, 9 * step.time_us) for step in made.ranks[0] if step.also for action in step.actions)]
    for _ in range(ITERATIONS):
        slow.add(made, 0, times)
    assert slow.slow == {}
    for _ in range(ITERATIONS):
        slow.add(made, 0, [(action, 2 * time_us) for action, time_us in times])
    assert slow.slow == {0: 2.0, 3: 2.0}
