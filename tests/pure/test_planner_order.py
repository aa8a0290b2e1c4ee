"""The order of actions: 1F1B over slices, windows as large as caps allow, weight gradients in gaps, and an order as numbers."""

import pickle
from dataclasses import replace
from itertools import chain, pairwise

import pytest

from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost import LinearTime, PipelineCosts
from megatron_epp.cost.blocks import LAYER
from megatron_epp.plan import UNLIMITED_BYTES, Action, Chunk, Op, PlanError, Segment
from megatron_epp.plan.check import check
from megatron_epp.planner import Options, WarmUp, fitted, plan, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunk_tables import with_other_starts
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.kernels.codes import KIND_MASK, WEIGHT, CodedOrder, coded, encode
from megatron_epp.planner.kernels.split import EAGER_GAP, WHOLE_GAP
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.completion import split_weights
from megatron_epp.planner.orders.patterns import Interleaved
from megatron_epp.planner.orders.vocabulary_order import SHARD_KINDS
from megatron_epp.planner.orders.warm_up import CappedWarmUp, elastic_1f1b
from tests.support.plan.planner_cases import pipeline, problem, web_lengths
from tests.support.plan.stages import stage_of

UNEQUAL = (4, 4, 3, 2, 1, 1, 1, 1)


def table(slices: tuple[int, ...]) -> tuple[Chunk, ...]:
    """Sequence q in ``slices[q]`` slices of ten tokens."""
    return tuple(Chunk((Segment(q, 10 * k, 10 * k + 10),)) for q, count in enumerate(slices) for k in range(count))


def tables(slices: tuple[int, ...], stages: int):
    """Tables of equal chunks: forward 1, backward 2, messages free."""
    stage = stage_of(
        num_layers=1,
        forward=LinearTime(1.0),
        backward=LinearTime(2.0),
        layer_bytes_per_token=1.0,
        recomputed_layer_bytes_per_token=0.0,
        kv_bytes_per_token=0.0,
    )
    costs = PipelineCosts("equal", (stage,) * stages, hidden_bytes_per_token=0.0)
    return tabulate(table(slices), problem([10 * count for count in slices], stages), costs)


def live_chunks(actions: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in actions:
        live += 1 if action.op is Op.F else -1
        peak = max(peak, live)
    return peak


def warmup(actions: tuple[Action, ...]) -> int:
    return next(position for position, action in enumerate(actions) if action.op is Op.B)


def test_whole_sequences_run_as_plain_1f1b_slices_back_in_reverse_and_evaluations_forward_only():
    order = elastic_1f1b(table((1, 1, 1)), 2, False)
    assert [" ".join(map(str, actions)) for actions in order] == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    (actions,) = elastic_1f1b(table((3, 2)), 1, False)
    assert [a.chunk for a in actions if a.op is Op.F] == [0, 1, 2, 3, 4]
    assert [a.chunk for a in actions if a.op is Op.B] == [2, 1, 0, 4, 3]
    order = elastic_1f1b(table((2, 1)), 2, True)
    assert [" ".join(map(str, actions)) for actions in order] == ["0F0 0F1 0F2", "1F0 1F1 1F2"]


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_warmup_covers_the_stages_below_and_the_slices_of_the_longest_and_no_more_is_alive(stages: int):
    for rank, actions in enumerate(elastic_1f1b(table(UNEQUAL), stages, False)):
        assert warmup(actions) == live_chunks(actions) == min(sum(UNEQUAL), stages - rank - 1 + max(UNEQUAL))


def test_the_window_shrinks_once_the_longest_sequence_is_through():
    (actions,) = elastic_1f1b(table((4, 1, 1, 1, 1)), 1, False)
    assert " ".join(map(str, actions)) == "0F0 0F1 0F2 0F3 0B3 0F4 0B2 0F5 0B1 0F6 0B0 0B4 0B5 0B6 0F7 0B7"


@pytest.mark.parametrize("slices", [(1,) * 8, UNEQUAL, (6,), (3, 3, 3), (2, 1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_chunks_leave_no_bubble_between_fill_and_drain(slices: tuple[int, ...], stages: int):
    order = elastic_1f1b(table(slices), stages, False)
    costs = tables(slices, stages)
    assert makespan_us(order, costs, [[0] * sum(slices)] * stages) == (sum(slices) + stages - 1) * 3.0
    assert lower_bound_us(costs) == (sum(slices) + stages - 1) * 3.0


def test_an_order_that_deadlocks_is_named():
    order = elastic_1f1b(table((1, 1)), 2, False)
    crossed = (order[0], tuple(Action(op, stage, 1 - chunk) for op, stage, chunk in order[1]))
    one_alive = (tuple(sorted(order[0], key=lambda action: action.chunk)), crossed[1])
    with pytest.raises(PlanError, match=r"deadlock.*0B0, 1F1"):
        makespan_us(one_alive, tables((1, 1), 2), [[0, 0], [0, 0]])


def test_where_windows_shrink_every_rank_of_looped_stages_stays_ahead_of_the_next():
    chunks = table((24, *(1,) * 24))
    asked = replace(problem([240, *[10] * 24], 8), placement=(0, 1, 2, 3) * 2, cap_bytes=(UNLIMITED_BYTES,) * 4)
    order, of_paper = (
        Interleaved(elastic).order(chunks, tabulate(chunks, asked, pipeline(8)), asked) for elastic in (True, False)
    )
    assert order != of_paper, "it runs: no other order had to take its place"
    ahead = [[sum(one.op is Op.F for one in row[:at]) for at, action in enumerate(row) if action.op is Op.B] for row in order]
    for rank, following in pairwise(ahead):
        assert all(here >= there for here, there in zip(rank, following, strict=True))


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


RANKS = 4


def one_f_one_b(seed: int):
    """A batch in slices, its tables, an order of whole backwards, and no recompute."""
    asked, costs = problem(web_lengths(40, seed, longest=65536), RANKS), pipeline(RANKS)
    chunker = Slicer.of(asked, costs, None)
    chunks = chunker.table(chunker.grain(chunks=6 * RANKS))
    tables = tabulate(chunks, asked, costs)
    return asked, tables, coded(WarmUp(1).order(chunks, tables, asked), len(chunks)), [[0] * len(chunks)] * RANKS


@pytest.mark.parametrize("seed", range(4))
def test_gradients_that_run_in_gaps_shorter_than_themselves_do_not_all_wait_for_the_end(seed: int):
    asked, tables, order, steps = one_f_one_b(seed)
    whole, eager = (split_weights(order.codes, tables, steps, asked.cap_bytes, (), share) for share in (WHOLE_GAP, EAGER_GAP))
    assert makespan_us(eager, tables, steps) < 0.98 * makespan_us(whole, tables, steps)
    assert makespan_us(whole, tables, steps) < makespan_us(order, tables, steps)
    last = [[int(code) & KIND_MASK == WEIGHT for code in row.actions[row.starts[0] : row.starts[1]]] for row in (whole, eager)]
    ends = [row[::-1].index(False) for row in last]
    assert ends[1] < ends[0], "fewer are left for the end of the first rank"


STAGES = 4
COSTS = pipeline(STAGES)
LENGTHS = (60000, 16000, 9000, *[5000] * 4, *[2000] * 24)
BATCH = problem(LENGTHS, STAGES, token_multiple=16)
CHUNKER = Slicer.of(BATCH, COSTS, None)
TABLE = CHUNKER.table(CHUNKER.grain(chunks=12 * STAGES))


def capped(share: float):
    """The batch with a cap between the peaks of the smallest and of the largest window."""
    tables = tabulate(TABLE, BATCH, COSTS)
    none = [[0] * len(TABLE)] * STAGES
    least, most = (max(peaks_bytes(WarmUp(3, minimal).order(TABLE, tables, BATCH), tables, none)) for minimal in (True, False))
    assert least < most
    return replace(BATCH, cap_bytes=(int(least + share * (most - least)),) * STAGES)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_window_takes_about_what_the_caps_leave(share: float):
    asked = capped(share)
    tables = tabulate(TABLE, asked, COSTS)
    order = CappedWarmUp(3).order(TABLE, tables, asked)
    peaks = peaks_bytes(order, tables, [[0] * len(TABLE)] * STAGES)
    assert all(peak <= 1.01 * cap for peak, cap in zip(peaks, asked.cap_bytes, strict=True)), "recompute does the rest"
    if share == 1.0:
        assert order == WarmUp(3).order(TABLE, tables, asked)
    assert check(build_plan(asked, COSTS, Options(), fitted(order, TABLE, asked, COSTS))) == []


def test_without_a_cap_the_window_is_the_largest_and_in_an_evaluation_there_is_none():
    tables = tabulate(TABLE, BATCH, COSTS)
    assert CappedWarmUp(2).order(TABLE, tables, BATCH) == WarmUp(2).order(TABLE, tables, BATCH)
    evaluation = replace(BATCH, forward_only=True)
    order = CappedWarmUp(2).order(TABLE, tabulate(TABLE, evaluation, COSTS), evaluation)
    assert {action.op for action in chain.from_iterable(order)} == {Op.F}


def test_other_sequences_come_first_and_none_is_lost_or_parted():
    groups = [[TABLE[c] for c in group] for group in slice_groups(TABLE)]
    for table in with_other_starts(TABLE, STAGES):
        found = [[table[c] for c in group] for group in slice_groups(table)]
        assert found[0] != groups[0]
        assert sorted(found, key=str) == sorted(groups, key=str)
    (single, *_), (alone, *_) = with_other_starts(groups[0], STAGES)
    assert single == alone == groups[0][0], "a sequence alone has nothing before it"


@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)])
def test_the_bound_counts_what_a_sequence_keeps_on_all_stages_of_a_rank(placement: tuple[int, ...]):
    free = replace(problem((60000,), 4), placement=placement, cap_bytes=(UNLIMITED_BYTES,) * 2)
    made = plan(free, COSTS, Options(slices=8))
    asked = replace(free, cap_bytes=(int(0.7 * max(made.predicted.peak_bytes)),) * 2)
    tables = tabulate(made.chunks, asked, COSTS)
    tight = plan(asked, COSTS, Options(slices=8)).predicted
    assert lower_bound_us(tables) < lower_bound_us(tables, made.chunks, asked)
    assert tight.lower_bound_us <= tight.makespan_us


@pytest.mark.parametrize("link_us_per_byte", [0.0, 1e-5])
def test_the_bound_under_a_cap_takes_no_recompute_of_a_stage_without_layers(link_us_per_byte: float):
    costs = pipeline(2)
    costs = replace(costs, stages=(costs.stages[0].changed(LAYER, count=0), costs.stages[1]), host_us_per_byte=link_us_per_byte)
    free = problem((9000, 300), 2)
    table = plan(free, costs).chunks
    capped = replace(free, cap_bytes=(1, UNLIMITED_BYTES))
    bounds = [lower_bound_us(tabulate(table, asked, costs), table, asked, Options(offload=True)) for asked in (free, capped)]
    assert bounds[0] == bounds[1]
