"""Neighbouring actions in one step, where exchanges between tensor-parallel ranks are then overlapped with compute."""

from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import pytest

from megatron_epp.contrib.overlap.joined import JoinedDecisions
from megatron_epp.contrib.overlap.pairing import WITH_FORWARDS, WITH_WEIGHTS
from megatron_epp.cost import PipelineCosts
from megatron_epp.formulas import H100, analytic_profile
from megatron_epp.formulas.library import load_flags, shape_of
from megatron_epp.plan import Op, Plan, Step
from megatron_epp.plan.check import check
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, fitted, plan, slice_groups
from megatron_epp.planner.result import greedy
from tests.support.plan.planner_cases import GIB, least_cap_bytes, problem, web_lengths
from tests.support.seeds import some_by_default, spread_by_default

RANKS = 4
ASKED = Options(overlap_exchanges=True)


def costs_of(tensor_parallel: int, stages: int = RANKS, shares: tuple[float, ...] = ()) -> PipelineCosts:
    shape = shape_of(load_flags("llama3-8b") | {"num_layers": 16, "tensor_model_parallel_size": tensor_parallel})
    layers = [16 // stages] * stages
    return analytic_profile(shape, H100).costs(layers, state_bytes_per_parameter=7.5, vocabulary_shares=shares)


def joined(made: Plan) -> list[Step]:
    return [step for step in chain.from_iterable(made.ranks) if step.also]


EQUAL, SKEWED = (8192,) * 24, (30000, 9000, 5000, *[900] * 40)
SPLIT, SEARCHED = Options(split_weight=True), Options(steps=50)


@some_by_default(
    ("lengths", "options"),
    [(EQUAL, Options()), (SKEWED, SPLIT), (SKEWED, SEARCHED), (SKEWED, Options()), (EQUAL, SPLIT), (EQUAL, SEARCHED)],
    2,
)
def test_steps_of_two_actions_make_a_plan_of_tensor_parallel_ranks_faster(lengths: tuple[int, ...], options: Options):
    asked, costs = problem(lengths, RANKS, 40 * GIB), costs_of(8)
    plain, made = (plan(asked, costs, replace(options, overlap_exchanges=on)) for on in (False, True))
    assert not joined(plain)
    kinds = {tuple(action.op for action in step.actions) for step in joined(made)}
    assert (Op.B, Op.F) in kinds
    assert kinds <= {*WITH_WEIGHTS, *WITH_FORWARDS}
    assert not any({*pair} <= {Op.B, Op.W} for pair in (*WITH_WEIGHTS, *WITH_FORWARDS)), "autograd has one thread for a device"
    assert made.predicted.makespan_us < (0.98 if options.split_weight else 0.95) * plain.predicted.makespan_us
    assert check(made) == []


def test_weight_gradients_are_joined_with_forwards_where_these_have_no_backward_in_front():
    placement = Placement("v", RANKS, 2)
    asked = Problem((8192,) * 24, placement.rank_of, (80 * GIB,) * RANKS)
    made = plan(asked, costs_of(8, 8), replace(ASKED, split_weight=True))
    assert {(Op.B, Op.F), (Op.W, Op.F)} <= {tuple(action.op for action in step.actions) for step in joined(made)}
    assert check(made) == []


def test_slices_of_one_sequence_are_no_step():
    asked = problem(SKEWED, RANKS, 40 * GIB)
    made = plan(asked, costs_of(8), replace(ASKED, chunk_tokens=30000))
    steps = [step.actions for step in joined(made)]
    assert steps
    group_of = {c: number for number, group in enumerate(slice_groups(made.chunks)) for c in group}
    assert all(group_of[one.chunk] != group_of[two.chunk] for one, two in steps if one.op is two.op)


def test_without_tensor_parallel_ranks_and_in_an_evaluation_nothing_is_joined():
    asked = problem((9000, 8000, 3000, 2500), RANKS)
    assert plan(asked, costs_of(1), ASKED) == plan(asked, costs_of(1))
    evaluation = replace(asked, forward_only=True)
    assert plan(evaluation, costs_of(8), ASKED) == plan(evaluation, costs_of(8))


@spread_by_default(3, kind=("looped", "v"), share=(1.2, 2.0), seed=range(3))
def test_plans_under_caps_are_no_slower_and_within_them(kind: str, share: float, seed: int):
    placement = Placement(kind, RANKS, 2).rank_of  # type: ignore[arg-type]
    costs = costs_of(4, 8)
    batch = Problem(web_lengths(24, seed, longest=20000), placement, (1,) * RANKS)
    asked = replace(batch, cap_bytes=(int(share * least_cap_bytes(batch, costs, Options())),) * RANKS)
    plain, made = plan(asked, costs), plan(asked, costs, ASKED)
    assert any(map(any, plain.recompute_us)) or kind == "v" or share == 2.0, "the cap binds"
    assert joined(made) or share < 2 or kind == "v"
    assert made.predicted.makespan_us <= plain.predicted.makespan_us
    assert max(made.predicted.peak_bytes) <= asked.cap_bytes[0]
    assert check(made) == []


def test_backwards_that_would_wait_for_a_forwards_input_stay_alone():
    asked = Problem(web_lengths(40, 5, longest=20000), Placement("looped", RANKS, 2).rank_of, (80 * GIB,) * RANKS)
    costs = costs_of(4, 8)
    made = greedy(asked, costs, ASKED)
    every = frozenset(pair for row in made.order for pair in pairwise(row) if (pair[0].op, pair[1].op) == (Op.B, Op.F))
    assert isinstance(made, JoinedDecisions)
    assert made.joined < every
    slower = fitted(made.order, made.chunks, asked, costs, Options(), partial(JoinedDecisions, joined=every))
    assert made.makespan_us(asked, costs) < slower.makespan_us(asked, costs)


def test_shards_of_the_vocabulary_stand_between_the_steps():
    asked, costs = problem((8192,) * 24, RANKS, 60 * GIB), costs_of(8, shares=(0.25,) * RANKS)
    plain, made = plan(asked, costs), plan(asked, costs, ASKED)
    assert joined(made)
    assert any(step.action.op is Op.S for step in made.ranks[0])
    assert made.predicted.makespan_us < plain.predicted.makespan_us
    assert check(made) == []


def test_the_exact_planner_leaves_steps_of_two_actions_as_they_are():
    pytest.importorskip("ortools", reason="the exact planner needs OR-tools: pip install 'megatron-epp[milp]'")
    asked, costs = problem((4096,) * 8, 2), costs_of(8, 2)
    made = plan(asked, costs, ASKED)
    assert joined(made)
    assert plan(asked, costs, replace(ASKED, planner="milp")).ranks == made.ranks
