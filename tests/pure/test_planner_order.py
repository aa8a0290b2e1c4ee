"""The order of actions: 1F1B over slices, windows, weight gradients in gaps; mistakes of who builds one are reported."""

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import pytest

from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.features.split_weights.split import EAGER_GAP, WHOLE_GAP
from megatron_epp.features.split_weights.split_orders import split_weights
from megatron_epp.features.stages.stage_orders import Interleaved
from megatron_epp.plan import UNLIMITED_BYTES, Action, Chunk, Op, Plan, PlanError, Segment
from megatron_epp.plan.document import digest
from megatron_epp.plan.proof import check
from megatron_epp.planner import PLANNERS, Decisions, Options, Problem, WarmUp, plan, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunk_tables import with_other_starts
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.fitted import fitted, for_table
from megatron_epp.planner.kernels.codes import KIND_MASK, WEIGHT, coded, encode
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.warm_up import CappedWarmUp, elastic_1f1b
from tests.support.plan.planner_cases import pipeline, problem, web_lengths
from tests.support.plan.stages import stage_of

UNEQUAL = (4, 4, 3, 2, 1, 1, 1, 1)


def table(slices: tuple[int, ...]) -> tuple[Chunk, ...]:
    """Sequence q in ``slices[q]`` slices of ten tokens."""
    return tuple(Chunk((Segment(q, 10 * k, 10 * k + 10),)) for q, count in enumerate(slices) for k in range(count))


def tables(slices: tuple[int, ...], stages: int):
    """Tables of equal chunks: forward 1, backward 2, messages free."""
    sizes = {"layer_bytes_per_token": 1.0, "recomputed_layer_bytes_per_token": 0.0, "kv_bytes_per_token": 0.0}
    stage = stage_of(num_layers=1, forward=LinearTime(1.0), backward=LinearTime(2.0), **sizes)
    costs = PipelineCosts("equal", (stage,) * stages, hidden_bytes_per_token=0.0)
    return tabulate(table(slices), problem([10 * count for count in slices], stages), costs)


def live_chunks(actions: tuple[Action, ...]) -> int:
    return max(accumulate(1 if action.op is Op.F else -1 for action in actions))


def warmup(actions: tuple[Action, ...]) -> int:
    return next(position for position, action in enumerate(actions) if action.op is Op.B)


def test_whole_sequences_run_as_plain_1f1b_slices_back_in_reverse_and_evaluations_forward_only():
    for slices, forward_only, expected in (
        ((1, 1, 1), False, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        ((2, 1), True, ["0F0 0F1 0F2", "1F0 1F1 1F2"]),
    ):
        assert [" ".join(map(str, row)) for row in elastic_1f1b(table(slices), 2, forward_only)] == expected
    (actions,) = elastic_1f1b(table((3, 2)), 1, False)
    assert [[a.chunk for a in actions if a.op is op] for op in (Op.F, Op.B)] == [[0, 1, 2, 3, 4], [2, 1, 0, 4, 3]]


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


def test_an_order_goes_to_another_process_as_actions_for_its_numbers_may_be_of_another_type_there() -> None:
    received = pickle.loads(pickle.dumps(coded(ORDER, 2)))
    assert (type(received), received) == (tuple, ORDER)


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


OF_TWO = pipeline(2)
SMALL_BATCH = problem((900, 70, 300), 2)
CHUNKS = tuple(Chunk((Segment(*part),)) for part in ((0, 0, 600), (0, 600, 900), (1, 0, 70), (2, 0, 300)))
NO_LAYERS = [[0] * 4, [0] * 4]

Change = Callable[[Decisions], Decisions]


def gpipe() -> Decisions:
    """Sound decisions, which the changes below spoil."""
    order = tuple((*(Action(Op.F, s, c) for c in range(4)), *(Action(Op.B, s, c) for c in (3, 2, 1, 0))) for s in range(2))
    return Decisions(CHUNKS, order, NO_LAYERS)


def with_action(action: Any) -> Change:
    def change(made: Decisions) -> Decisions:
        first, second = made.order
        return replace(made, order=(first, (*second[:4], action, *second[4:])))

    return change


def with_(**fields: Any) -> Change:
    return lambda made: replace(made, **fields)


def with_chunk(chunk: Any) -> Change:
    return lambda made: replace(made, chunks=(*made.chunks[:3], chunk))


def planned(change: Change, asked: Problem = SMALL_BATCH) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANNERS, "builder", lambda *_: change(gpipe()))
        return plan(asked, OF_TWO, Options(planner="builder"))


COPY = (Action(Op.O, 0, 0), None), (Action(Op.L, 0, 0), None)
SHARES = ((0.5, 0.0, 0.0, 0.0), (0.0,) * 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_action(Action(Op.R, 1, 0)), r"1R0.*\n *\^\^\^ a planner says what recomputes by its layers"),
        (with_action(Action(Op.F, 1, 4)), r"\^\^\^ unknown chunk 4; there are 4"),
        (with_action(Action(Op.F, 0, 0)), "wrong rank: stage 0 is placed on rank 0"),
        (with_action(Action(Op.F, -1, 0)), "unknown stage -1"),
        (with_action(Action(Op.F, 1, -1)), "unknown chunk -1"),
        (with_action(("F", 1, 0)), r"\('F', 1, 0\) is not an Action"),
        (with_action(Action(Op.F, np.int64(1), 0)), "not an Action of an Op and two of Python's own whole numbers"),
        (lambda made: replace(made, order=made.order[:1]), "order has 1 rows for 2 ranks"),
        (with_(recompute_steps=[[0, 0, 5, 0], [0] * 4]), "stage 0 recomputes 5 layers of chunk 2; it has 4"),
        (
            with_(recompute_steps=[[9] * 4, [0] * 4], modes=("full", "selective")),
            r"9 steps of .* frontier of chunk 0; it has \d",
        ),
        (with_(recompute_steps=[[0.5] * 4, [0] * 4]), "recompute_steps holds values of type float64"),
        (with_(recompute_steps=[[[1], 2, 3, 4], [0] * 4]), "does not have its type in `Decisions`"),
        (with_(recompute_steps=[[0] * 4]), "recompute_steps has 1 rows"),
        (with_(recompute_steps=[[0] * 3, [0] * 4]), r"recompute_steps has 2 rows of \[3, 4\] entries"),
        (with_(modes=()), "recompute modes"),
        (with_(modes=("full", "half")), "half.*; the costs know full"),
        (with_(token_multiple=0), "token_multiple is 0"),
        (with_(token_multiple=float("nan")), "token_multiple is nan"),
        (with_(order=None), "does not have its type in `Decisions`"),
        (with_(chunks=()), "tokens 0 to 900 of sequence 0 are in no chunk"),
        (with_chunk(Chunk(())), "chunk 3 is empty"),
        (with_chunk(Chunk((Segment(7, 0, 300),))), "chunk 3 holds sequence 7; there are 3"),
        (with_chunk(Chunk((Segment(2, 300, 0),))), "chunk 3 holds tokens 300 to 0 of sequence 2"),
        (with_chunk(Chunk(((2, 0, 300),))), "is not a Chunk of Segments"),
        (with_chunk((2, 0, 300)), "is not a Chunk"),
        (with_chunk(Chunk((Segment(2, 0, None),))), "segments of something else than whole numbers"),
        (with_(copies=(COPY,), offload=SHARES), "copies has 1 rows for 2 ranks"),
        (with_(copies=(COPY, ()), offload=SHARES[:1]), r"offload has 1 rows of \[4\] entries; expected 2 rows of 4"),
        (with_(copies=(COPY, ())), "the offload share of chunk 0 at stage 0 is 0"),
        (with_(copies=(COPY[:1], ()), offload=SHARES), "0L0: missing"),
        (with_(copies=(COPY, ()), offload=((2.0, 0, 0, 0), (0.0,) * 4)), "a share of 2.0"),
        (with_(copies=(((Action(Op.O, 0, 9), None), COPY[1]), ()), offload=SHARES), "unknown chunk 9"),
        (with_(copies=((COPY[0], (COPY[1][0], Action(Op.F, 0, 9))), ()), offload=SHARES), "is issued after 0F9"),
        (with_(kv_offload=frozenset({(0, 1)})), "the sequence is not cut into slices"),
        (with_(kv_offload=frozenset({(5, 0)})), "there are 2 stages"),
        (with_(kv_offload=frozenset({("0", 0)})), "does not have its type in `Decisions`"),
        (with_(copies=(COPY, ()), offload=(("a",) * 4, (0.0,) * 4)), "does not have its type in `Decisions`"),
        (with_(copies=((3,), ()), offload=SHARES), "does not have its type in `Decisions`"),
        (lambda made: None, "returned None; a planner returns `Decisions`"),
    ],
)
def test_a_mistake_is_reported(change: Change, words: str):
    """`test_plan_check.py` has what is said of other actions, which random changes below put into orders."""
    with pytest.raises(PlanError, match=rf"planner '?builder'? .*\n?(.|\n)*{words}"):
        planned(change)


def forwards(made: Decisions) -> Decisions:
    return replace(made, order=tuple(row[:4] for row in made.order), recompute_steps=[[1] * 4, [0] * 4])


def test_a_backward_or_recompute_in_an_evaluation_is_reported():
    nothing_else = "a forward-only plan holds forwards, and vocabulary shards with their losses, and nothing else"
    for change, words in ((with_(), nothing_else), (forwards, "stage 0 recomputes 1 layers of chunk 0; it has 0")):
        with pytest.raises(PlanError, match=words):
            planned(change, replace(SMALL_BATCH, forward_only=True))


def test_without_a_mistake_there_is_a_plan_and_layers_may_be_numbers_of_numpy():
    assert check(planned(with_())) == []
    made = planned(with_(recompute_steps=np.ones((2, 4), dtype=np.int64)))
    assert digest(made) == digest(planned(with_(recompute_steps=[[1] * 4] * 2)))


@pytest.mark.parametrize("seed", range(60))
def test_random_changes_of_sound_decisions_are_planned_or_reported(seed: int):
    """Several at once: none may hide another in an error that is no `PlanError`, or pass with an unsound plan."""
    draw = random.Random(seed)

    def spoil(made: Decisions) -> Decisions:
        rows, recompute_steps = [list(row) for row in made.order], [list(row) for row in made.recompute_steps]
        for _ in range(draw.randint(1, 3)):
            rank = draw.randrange(2)
            at = draw.randrange(len(rows[rank]))
            match draw.randrange(6):
                case 0:
                    rows[rank][at] = Action(draw.choice(Op.known()), draw.randint(-1, 3), draw.randint(-1, 6))
                case 1:
                    del rows[rank][at]
                case 2:
                    rows[rank].insert(draw.randrange(9), rows[rank][at])
                case 3:
                    other = draw.randrange(len(rows[rank]))
                    rows[rank][at], rows[rank][other] = rows[rank][other], rows[rank][at]
                case 4:
                    recompute_steps[rank][draw.randrange(4)] = draw.choice((-1, 0, 3, 4, 5, 10**12))
                case 5:
                    rows[rank].insert(draw.randrange(9), Action(Op.W, rank, draw.randrange(4)))
        return replace(made, order=tuple(map(tuple, rows)), recompute_steps=recompute_steps)

    cannot = "planner 'builder' made a plan that cannot run"
    try:
        faults, head = check(planned(spoil)), cannot
    except PlanError as error:
        faults, head = [], str(error).splitlines()[0]
    assert (faults, head) == ([], cannot)


@pytest.mark.parametrize(
    ("chunks", "costs", "words"),
    [
        ((CHUNKS[1], CHUNKS[0], *CHUNKS[2:]), OF_TWO, "chunk 0 goes on with sequence 0 at token 600"),
        ((CHUNKS[0], CHUNKS[2], CHUNKS[1], CHUNKS[3]), OF_TWO, "chunk 2 goes on with sequence 0 at token 600"),
        (CHUNKS, pipeline(3), "the placement has 2 stages, but the costs are of"),
    ],
)
def test_a_table_that_is_none_or_of_another_pipeline_is_refused_before_it_is_ordered(chunks, costs: PipelineCosts, words: str):
    with pytest.raises(PlanError, match=words):
        for_table(chunks, SMALL_BATCH, costs, Options())


def test_an_order_with_a_recompute_of_its_own_is_refused_wherever_it_is_timed():
    with pytest.raises(PlanError, match="no R: a planner says what recomputes by its layers"):
        encode([[Action(Op.F, 0, 0), Action(Op.R, 0, 0)]], 1)


def test_the_lower_bound_does_not_rest_on_how_a_builder_numbers_chunks():
    """Slices of several sequences in turn: what they keep together need not be there together."""
    lengths = (6000, 6000, 6000)
    ends = range(0, 6000, 1000)
    by_sequence = tuple(Chunk((Segment(q, at, at + 1000),)) for q in range(3) for at in ends)
    in_turn = tuple(Chunk((Segment(q, at, at + 1000),)) for at in ends for q in range(3))
    free = problem(lengths, 2)
    peak = max(plan(free, OF_TWO, Options(slices=6)).predicted.peak_bytes)
    asked = replace(free, cap_bytes=(peak - (peak - max(s.static_bytes for s in OF_TWO.stages)) // 3,) * 2)
    bounds = [lower_bound_us(tabulate(table, asked, OF_TWO), table, asked) for table in (by_sequence, in_turn)]
    made = build_plan(asked, OF_TWO, Options(), for_table(by_sequence, asked, OF_TWO, Options()))
    assert bounds[1] <= bounds[0] <= made.predicted.makespan_us
