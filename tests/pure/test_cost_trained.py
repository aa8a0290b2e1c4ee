"""Plans know which tokens are trained: only they take time in the output layer."""

from dataclasses import replace

import pytest

from megatron_epp.cost import LinearTime, PipelineCosts, work_of
from megatron_epp.cost.blocks import HEAD, INPUT
from megatron_epp.cost.work import trained_tokens
from megatron_epp.plan import Chunk, PlanError, Segment
from megatron_epp.plan.serialize import digest
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.service.replica_balance import divide
from tests.support.plan.planner_cases import pipeline, problem

TIMES = {"forward": LinearTime(5.0, 20.0), "backward": LinearTime(5.0, 40.0), "weight": LinearTime(0.0, 15.0)}


def with_head(stages: int = 2) -> PipelineCosts:
    """Costs of a pipeline whose output layer takes most of the time."""
    costs = pipeline(stages)
    return replace(
        costs,
        stages=(
            *costs.stages[:-1],
            costs.stages[-1].changed(INPUT, HEAD, **dict.fromkeys(TIMES, LinearTime())).changed(HEAD, **TIMES),
        ),
    )


def parts_of(length: int, trained: range) -> tuple[int, ...]:
    """One part per token."""
    return tuple(int(token in trained) for token in range(length))


def test_tokens_of_a_segment_are_those_of_its_parts():
    parts = (0, 3, 8, 1)
    assert trained_tokens(parts, 40, 0, 40) == 12
    assert [trained_tokens(parts, 40, start, start + 10) for start in range(0, 40, 10)] == list(parts)
    assert trained_tokens(parts, 40, 15, 25) == 1.5 + 4
    assert sum(trained_tokens(parts, 37, start, min(37, start + 5)) for start in range(0, 37, 5)) == pytest.approx(12)
    assert trained_tokens((5,), 9, 0, 3) == pytest.approx(5 / 3)


def test_times_of_the_output_layer_are_those_of_trained_tokens():
    costs, lengths = with_head(), (8, 5)
    chunks = (Chunk((Segment(0, 0, 4),)), Chunk((Segment(0, 4, 8), Segment(1, 0, 5))))
    everything = work_of(chunks, lengths, 4)
    some = work_of(chunks, lengths, 4, (parts_of(8, range(6, 8)), parts_of(5, range(3))))
    assert some.trained is not None
    assert some.trained.tolist() == [0, 5]
    for column, per_token in ((costs.forward_us, 20.0), (costs.backward_us, 40.0), (costs.weight_us, 15.0)):
        assert (column(1, everything) - column(1, some)).tolist() == pytest.approx([per_token * 4, per_token * (12 - 5)])
        assert column(0, everything).tolist() == column(0, some).tolist()
    for sizes in (costs.activation_bytes, costs.head_bytes):
        assert sizes(1, everything).tolist() == sizes(1, some).tolist()


def test_a_plan_of_trained_tokens_only_is_the_one_without_a_mask():
    asked = problem((40, 30, 20, 10), 2)
    everything = replace(asked, trained=tuple((length,) for length in asked.lengths))
    assert digest(plan(asked, with_head())) == digest(plan(everything, with_head()))


def test_chunks_are_balanced_by_another_stage_where_few_tokens_are_trained():
    asked, costs = problem((64, 64), 2), with_head()
    few = replace(asked, trained=((0,), (1,)))
    lines = [costs.forward_line(stage) + costs.backward_line(stage) for stage in range(2)]
    assert Chunker.of(asked, costs, None).line.per_token_us == lines[1].per_token_us
    assert Chunker.of(few, costs, None).line.per_token_us < lines[1].per_token_us - 0.9 * 60
    assert Chunker.of(few, costs, None).total_us < 0.6 * Chunker.of(asked, costs, None).total_us


def test_trained_tokens_go_with_their_sequences():
    asked = replace(problem((3, 9, 5), 2), trained=((1,), (2,), (3,)))
    assert asked.part((2, 0)).trained == ((3,), (1,))
    assert asked.part((2, 0)).lengths == (5, 3)
    with pytest.raises(PlanError, match="trained tokens of 2 sequences, and lengths of 3"):
        plan(replace(asked, trained=((1,), (2,))), pipeline(2))


def test_replicas_share_trained_tokens_too():
    """Half the sequences train nothing: one replica does not get all of them."""
    asked = replace(problem((60,) * 8, 2), trained=((60,), (0,)) * 4)

    def slowest_us(shares: tuple[Problem, ...]) -> float:
        return max(about_us(share, with_head(), Options()) for share in shares)

    division = divide(asked, with_head(), ((0,), (1,)), slowest_us)
    trained = [sum(sum(parts) for parts in asked.part(share).trained) for share in division.shares]
    assert max(trained) < 240 * 0.8
