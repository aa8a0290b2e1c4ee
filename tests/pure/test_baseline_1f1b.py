"""Stock 1F1B with whole sequences: padded to the context, and packed up to it."""

from __future__ import annotations

import pytest

from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.planner import Options, plan
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from tests.support.plan.planner_cases import pipeline, problem, web_lengths

LENGTHS = (8000, *web_lengths(40, seed=11, longest=6000))


def made_by(name: str, lengths: tuple[int, ...] = LENGTHS, context: int | None = None, multiple: int = 1) -> Plan:
    return plan(problem(lengths, 4, token_multiple=multiple), pipeline(4), Options(planner=name, context=context))


def text(order: tuple[tuple[object, ...], ...]) -> list[str]:
    return [" ".join(str(action)[1:] for action in actions) for actions in order]


def test_one_chunk_per_group_is_1f1b():
    assert text(seq1f1b_order([[0], [1], [2], [3]], 3)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_fewer_microbatches_than_stages_run_all_forwards_first():
    assert text(seq1f1b_order([[0], [1]], 4))[0] == "F0 F1 B0 B1"


def test_every_sequence_is_a_row_of_the_context_length():
    made = made_by("1f1b-padded")
    assert [chunk.segments[0].sequence for chunk in made.chunks] == list(range(len(LENGTHS)))
    assert all(len(chunk.segments) == 1 and chunk.kind(LENGTHS) == "batched" for chunk in made.chunks)
    assert {made.padded_tokens(c) for c in range(len(made.chunks))} == {8000}


@pytest.mark.parametrize(("context", "multiple", "row"), [(None, 16, 8000), (10_000, 1, 10_000), (10_001, 16, 10_016)])
def test_rows_are_padded_to_the_context_rounded_up_to_the_multiple(context: int | None, multiple: int, row: int):
    made = made_by("1f1b-padded", context=context, multiple=multiple)
    assert {made.padded_tokens(c) for c in range(len(made.chunks))} == {row}


def test_padding_costs_time_memory_and_messages():
    costs = pipeline(4)
    made = made_by("1f1b-padded", (8000, 10, 10))
    steps = {str(step.action): step for step in made.ranks[1]}
    stage = costs.stages[1]
    assert steps["1F1"].time_us >= stage.line("forward").per_token_us * 8000
    assert steps["1F1"].alloc_bytes == steps["1F0"].alloc_bytes
    assert made.messages.activation_us[0][1] == made.messages.activation_us[0][0]


def test_rows_hold_whole_sequences_and_at_most_one_row_is_half_empty():
    made = made_by("1f1b-packed")
    assert sorted(s.sequence for chunk in made.chunks for s in chunk.segments) == list(range(len(LENGTHS)))
    assert all(s.start == 0 and s.end == LENGTHS[s.sequence] for chunk in made.chunks for s in chunk.segments)
    sizes = [chunk.num_tokens for chunk in made.chunks]
    assert max(sizes) <= 8000
    assert sum(size <= 4000 for size in sizes) <= 1


@pytest.mark.parametrize("name", ["1f1b-padded", "1f1b-packed"])
def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers(name: str):
    with pytest.raises(InfeasibleError, match=r"8000 .* 4096"):
        made_by(name, context=4096)
