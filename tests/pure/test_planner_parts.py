"""Small parts of the planner: passes, packed plans, orders as numbers, weight gradients, microbatches."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given

from megatron_epp.cost import H100, ModelShape, analytic_costs
from megatron_epp.plan import Action, InfeasibleError, Op, Plan, PlanError, Segment, check, digest, lower
from megatron_epp.planner import UNLIMITED_BYTES, Chunker, Options, Problem, WarmUp, plan, tabulate
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.kernels.codes import KIND_MASK, WEIGHT, CodedOrder, coded, decode, encode
from megatron_epp.planner.kernels.split import EAGER, WHOLE
from megatron_epp.planner.memory.offload import Offload
from megatron_epp.planner.microbatches import plan_as_given, plan_microbatches
from megatron_epp.planner.orders.completion import split_weights, with_split_weights
from megatron_epp.planner.orders.vocabulary_order import SHARD_KINDS
from megatron_epp.planner.passes import BackwardBytes, LayerGroup, moments
from megatron_epp.planner.service.packed import PackedPlan
from tests.support.plan.planner_cases import GIB, named_cap_bytes, pipeline, problem, web_lengths
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import hybrid

# ---- passes: a backward's peak is that of a walk along its layers ----------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_the_peak_of_a_backward_is_that_of_a_walk_along_its_layers(seed: int):
    draw = random.Random(seed)
    sizes = BackwardBytes(*(np.array(draw.randint(-9, 30)) for _ in BackwardBytes._fields))
    groups = [LayerGroup(draw.randint(1, 4), draw.randint(0, 20), draw.randint(0, 30)) for _ in range(draw.randint(0, 3))]
    live, walked = int(sizes.constant + sizes.reached), [int(sizes.constant + sizes.at_half)]
    for number, (kept, peak) in enumerate((kept, peak) for count, kept, peak in groups for _ in range(count)):
        walked.append(live + peak - kept)
        live += int(sizes.first_mlp) * (number == 0) - kept - int(sizes.gone)
    assert max(map(int, moments(sizes, groups))) == max(walked if groups else [*walked, live])


# ---- packed plans: the plan and its lowered actions, rank by rank ----------------------------------------------------


@given(sound_plans())
def test_a_packed_plan_is_the_plan_and_the_actions_of_every_rank(plan: Plan) -> None:
    packed = PackedPlan.of(plan, 1.5, tuple(range(len(plan.lengths))), 7)
    assert packed.plan() == plan
    assert tuple(packed.actions(rank) for rank in range(plan.num_ranks)) == lower(plan)
    assert packed.plan_digest == digest(plan)
    assert packed[3:] == (1.5, tuple(range(len(plan.lengths))), 7)


@pytest.mark.parametrize("damage", [lambda m: b"", lambda m: b"no plan", lambda m: m[:-9], lambda m: m[:20] + m[21:]])
def test_a_damaged_message_is_refused(damage: Callable[[bytes], bytes]) -> None:
    packed = PackedPlan.of(hybrid(), 0.0, ())
    with pytest.raises(PlanError, match="is no packed plan"):
        packed._replace(message=damage(packed.message)).plan()
    with pytest.raises(PlanError, match="is no packed plan"):
        packed._replace(rows=tuple(map(damage, packed.rows))).actions(0)


# ---- orders as numbers -----------------------------------------------------------------------------------------------


ORDER = (
    (Action(Op.F, 0, 0), Action(Op.F, 0, 1), Action(Op.B, 0, 1), Action(Op.B, 0, 0), Action(Op.W, 0, 0)),
    (Action(Op.F, 1, 0), Action(Op.F, 1, 1), Action(Op.B, 1, 1), Action(Op.B, 1, 0)),
)


def test_an_order_as_numbers_reads_like_its_actions() -> None:
    order = coded(ORDER, 2)
    assert isinstance(order, CodedOrder)
    assert len(order) == 2
    assert (order[1], order[:1], list(order)) == (ORDER[1], ORDER[:1], list(ORDER))
    assert repr(order) == repr(ORDER)
    assert coded(order, 2) is order


def test_an_order_goes_to_another_process_as_actions_for_its_numbers_may_be_of_another_type_there() -> None:
    received = pickle.loads(pickle.dumps(coded(ORDER, 2)))
    assert (type(received), received) == (tuple, ORDER)


def test_an_order_as_numbers_equals_any_order_of_the_same_actions() -> None:
    actions, order, other = ORDER, coded(ORDER, 2), coded((ORDER[0][:4], ORDER[1]), 2)
    assert order == actions
    assert actions == order
    assert order == coded(ORDER, 2)
    assert order != other
    assert actions != other
    assert (order.key == coded(ORDER, 2).key, order.key == other.key) == (True, False)
    assert order == CodedOrder(encode(order, 2, SHARD_KINDS), 2), "kinds that no action has make no difference"


def test_encoding_is_undone_by_decoding() -> None:
    codes = encode(ORDER, 2, SHARD_KINDS)
    assert codes.num_ranks == 2
    assert list(codes.starts) == [0, 5, 9]
    assert decode(codes, 2) == ORDER


# ---- weight gradients that run in the gaps of their ranks ------------------------------------------------------------


RANKS = 4


def one_f_one_b(seed: int):
    """A batch in slices, its tables, an order of whole backwards, and no recompute."""
    asked, costs = problem(web_lengths(40, seed, longest=65536), RANKS), pipeline(RANKS)
    chunker = Chunker.of(asked, costs, None)
    chunks = chunker.table(chunker.grain(chunks=6 * RANKS))
    tables = tabulate(chunks, asked, costs)
    return asked, tables, coded(WarmUp(1).order(chunks, tables, asked), len(chunks)), [[0] * len(chunks)] * RANKS


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_run_in_gaps_shorter_than_themselves_do_not_all_wait_for_the_end(seed: int):
    asked, tables, order, steps = one_f_one_b(seed)
    whole, eager = (split_weights(order.codes, tables, steps, asked.cap_bytes, (), share) for share in (WHOLE, EAGER))
    assert makespan_us(eager, tables, steps) < 0.98 * makespan_us(whole, tables, steps)
    assert makespan_us(whole, tables, steps) < makespan_us(order, tables, steps)
    last = [[int(code) & KIND_MASK == WEIGHT for code in row.actions[row.starts[0] : row.starts[1]]] for row in (whole, eager)]
    ends = [row[::-1].index(False) for row in last]
    assert ends[1] < ends[0], "fewer are left for the end of the first rank"


@pytest.mark.parametrize("seed", range(4))
def test_the_faster_of_both_ways_counts(seed: int):
    asked, tables, order, steps = one_f_one_b(seed)
    found, took_us = with_split_weights(order, tables, Offload(steps, (), ()), asked.cap_bytes)
    both = [
        makespan_us(split_weights(order.codes, tables, steps, asked.cap_bytes, (), share), tables, steps)
        for share in (WHOLE, EAGER)
    ]
    assert took_us == makespan_us(found, tables, steps)
    assert took_us <= min(both)


# ---- sequences that run whole because the caches of their slices do not fit ------------------------------------------


LENGTHS = (100_000, 30_000, 20_000, *[700] * 80)
"""More than are tried whole in every order anyway."""
STAGES = 4
SHAPE = ModelShape(num_layers=48, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, vocab_size=4096)
COSTS = analytic_costs(SHAPE, H100, [12] * STAGES, state_bytes_per_parameter=2.0)
"""Many layers with as many key heads as query heads: caches of all of them are larger than one layer's activations."""


def least_cap(lengths: tuple[int, ...] = LENGTHS, **options: object) -> int:
    with pytest.raises(InfeasibleError) as error:
        plan(problem(lengths, STAGES, 1 << 30), COSTS, Options(**options))  # type: ignore[arg-type]
    return named_cap_bytes(error.value)


def test_whole_sequences_fit_where_their_slices_do_not():
    cap = least_cap()
    assert cap < least_cap(slices=8)
    made = plan(problem(LENGTHS, STAGES, cap), COSTS, Options())
    assert not check(made)
    assert any(chunk.segments == ((0, 0, LENGTHS[0]),) for chunk in made.chunks)


def test_such_plans_are_no_slower_than_1f1b_of_whole_sequences():
    rising = tuple(sorted(LENGTHS))
    cap = int(1.5 * least_cap(rising, planner="1f1b"))
    made = plan(problem(LENGTHS, STAGES, cap), COSTS, Options())
    plain = plan(problem(rising, STAGES, cap), COSTS, Options(planner="1f1b"))
    assert any(chunk.segments == ((0, 0, LENGTHS[0]),) for chunk in made.chunks)
    assert made.predicted.makespan_us <= plain.predicted.makespan_us


def test_an_error_of_a_planner_that_cuts_nothing_does_not_advise_smaller_chunks():
    with pytest.raises(InfeasibleError, match="no plan of '1f1b' fits a memory cap") as refused:
        plan(problem(LENGTHS, STAGES, 8 * GIB), COSTS, Options(planner="1f1b"))
    said = str(refused.value)
    assert ", or set planner to greedy, or lower context, " in said
    assert "chunk_tokens" not in said


# ---- a caller's microbatches run each whole, in the best of three orders ---------------------------------------------


MICROBATCHES = ((16, 8), (32,), (8, 8), (400,))
PROBLEM = Problem((), (0, 1), (UNLIMITED_BYTES,) * 2)
TWO_STAGES = pipeline(2, 2)


def test_a_plan_runs_other_microbatches_that_are_no_larger_in_its_order() -> None:
    other = ((16, 8), (30,), (16,), (390, 10))
    planned = plan_microbatches(MICROBATCHES, PROBLEM, TWO_STAGES, Options())
    plan, order = planned.of(other)
    assert order == planned.order
    assert plan.ranks == planned.plan.ranks
    assert [fault for fault in check(plan) if "predicted" not in str(fault)] == []
    assert [tuple(plan.lengths[segment.sequence] for segment in chunk.segments) for chunk in plan.chunks] == [
        other[index] for index in order
    ]


def test_each_microbatch_is_a_chunk_of_whole_sequences_in_any_order() -> None:
    plan, order = plan_microbatches(MICROBATCHES, PROBLEM, TWO_STAGES, Options())
    assert check(plan) == []
    assert sorted(order) == [0, 1, 2, 3]
    assert {index: plan.chunks[c].segments for c, index in enumerate(order)} == {
        0: (Segment(0, 0, 16), Segment(1, 0, 8)),
        1: (Segment(2, 0, 32),),
        2: (Segment(3, 0, 8), Segment(4, 0, 8)),
        3: (Segment(5, 0, 400),),
    }


def test_microbatches_run_in_one_of_three_orders_with_nothing_cut_or_joined() -> None:
    microbatches = ((30, 4), (9,), (200,), (12, 12), (65,))
    longest, given = (2, 4, 0, 3, 1), (0, 1, 2, 3, 4)
    for options in (Options(), Options(slices=4), Options(chunk_tokens=16), Options(offload=True)):
        plan, order = plan_microbatches(microbatches, PROBLEM, TWO_STAGES, options)
        assert order in (longest, longest[::-1], given)
        assert len(plan.chunks) == len(microbatches)


def test_equal_microbatches_run_in_the_order_given() -> None:
    microbatches = ((30, 20),) * 6
    assert plan_microbatches(microbatches, PROBLEM, TWO_STAGES, Options()).order == tuple(range(6))


def test_the_best_order_is_no_slower_than_the_given_one() -> None:
    given, best = (make(MICROBATCHES, PROBLEM, TWO_STAGES, Options()).plan for make in (plan_as_given, plan_microbatches))
    assert best.predicted.makespan_us <= given.predicted.makespan_us
