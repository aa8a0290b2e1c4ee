"""A schedule builder's mistakes: each ends in the report of a plan that cannot run, never in a traceback or a wrong plan."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_epp.cost import Costs, PipelineCosts
from megatron_epp.plan import Action, Chunk, Op, Plan, PlanError, Segment, check
from megatron_epp.plan.serialize import digest
from megatron_epp.planner import PLANNERS, Decisions, Options, Problem, for_table, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.tables import tabulate
from tests.support.plan.planner_cases import pipeline, problem

COSTS = pipeline(2)
BATCH = problem((900, 70, 300), 2)
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


def planned(change: Change, monkeypatch: pytest.MonkeyPatch, asked: Problem = BATCH) -> Plan:
    def builder(given: Problem, costs: Costs, options: Options) -> Decisions:
        return change(gpipe())

    monkeypatch.setitem(PLANNERS, "builder", builder)
    return plan(asked, COSTS, Options(planner="builder"))


def test_without_a_mistake_there_is_a_plan(monkeypatch: pytest.MonkeyPatch):
    assert check(planned(lambda made: made, monkeypatch)) == []


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
            r"recomputes 9 steps of its recompute frontier of chunk 0; it has \d",
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
        (lambda made: None, "returned a NoneType, not Decisions"),
    ],
)
def test_a_mistake_is_reported(change: Change, words: str, monkeypatch: pytest.MonkeyPatch):
    """`test_plan_check.py` has what is said of other actions, which random changes below put into orders."""
    with pytest.raises(PlanError, match=rf"planner 'builder' .*\n?(.|\n)*{words}"):
        planned(change, monkeypatch)


def forwards(made: Decisions) -> Decisions:
    return replace(made, order=tuple(row[:4] for row in made.order), recompute_steps=[[1] * 4, [0] * 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made, "a forward-only plan holds forwards, and vocabulary shards with their losses, and nothing else"),
        (forwards, "stage 0 recomputes 1 layers of chunk 0; it has 0"),
    ],
)
def test_a_backward_or_recompute_in_an_evaluation_is_reported(change: Change, words: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PlanError, match=words):
        planned(change, monkeypatch, replace(BATCH, forward_only=True))


def test_layers_may_be_numbers_of_numpy(monkeypatch: pytest.MonkeyPatch):
    made = planned(with_(recompute_steps=np.ones((2, 4), dtype=np.int64)), monkeypatch)
    assert digest(made) == digest(planned(with_(recompute_steps=[[1] * 4] * 2), monkeypatch))


@pytest.mark.parametrize("seed", range(60))
def test_random_changes_of_sound_decisions_are_planned_or_reported(seed: int, monkeypatch: pytest.MonkeyPatch):
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

    try:
        made = planned(spoil, monkeypatch)
    except PlanError as error:
        head = str(error).splitlines()[0]
    else:
        assert check(made) == []
        return
    assert head == "planner 'builder' made a plan that cannot run"


@pytest.mark.parametrize(
    ("chunks", "costs", "words"),
    [
        ((CHUNKS[1], CHUNKS[0], *CHUNKS[2:]), COSTS, "chunk 0 goes on with sequence 0 at token 600"),
        ((CHUNKS[0], CHUNKS[2], CHUNKS[1], CHUNKS[3]), COSTS, "chunk 2 goes on with sequence 0 at token 600"),
        (CHUNKS, pipeline(3), "the placement has 2 stages, but the costs are of"),
    ],
)
def test_a_table_that_is_none_or_of_another_pipeline_is_refused_before_it_is_ordered(
    chunks: tuple[Chunk, ...], costs: PipelineCosts, words: str
):
    with pytest.raises(PlanError, match=words):
        for_table(chunks, BATCH, costs, Options())


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
    peak = max(plan(free, COSTS, Options(slices=6)).predicted.peak_bytes)
    asked = replace(free, cap_bytes=(peak - (peak - max(s.static_bytes for s in COSTS.stages)) // 3,) * 2)
    bounds = [lower_bound_us(tabulate(table, asked, COSTS), table, asked) for table in (by_sequence, in_turn)]
    made = build_plan(asked, COSTS, Options(), for_table(by_sequence, asked, COSTS, Options()))
    assert bounds[1] <= bounds[0] <= made.predicted.makespan_us
