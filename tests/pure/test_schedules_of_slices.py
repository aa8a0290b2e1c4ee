"""SlimPipe, kFkB and ChronosPipe by what a batch and its costs make of them: slices, values of k, recompute and copies.

``p`` are the ranks, ``n`` the slices of the longest sequence, ``v`` the stages of each rank.
"""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from megatron_epp.cli.main import main
from megatron_epp.cost import H100, PipelineCosts, analytic_profile
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.plan import Action, Op, Plan, PlanError, check, lower, to_grid, to_json
from megatron_epp.plan.check.launches import blocked
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.schedules.slimpipe import even_slices
from scripts.bench.orders.unit import TOKENS, Unit
from tests.support.plan import second_simulator
from tests.support.plan.queue_machine import stuck

PROFILE = analytic_profile(shape_of(load_flags("llama3-8b")), H100)
LENGTHS = (30000, 28000, 9000, 5000, 3000, 700, 700, 300)
TWO_EACH = Placement("looped", 4, 2).rank_of


def costs_of(placement: tuple[int, ...] = TWO_EACH, shards: bool = False) -> PipelineCosts:
    layers = [32 // len(placement)] * len(placement)
    return PROFILE.costs(layers, state_bytes_per_parameter=7.5, vocabulary_shares=[0.25] * 4 if shards else [])


def of_slimpipe(lengths: tuple[int, ...] = LENGTHS, multiple: int = 1, **asked: int) -> Plan:
    problem = Problem(lengths, TWO_EACH, (UNLIMITED_BYTES,) * 4, token_multiple=multiple)
    return plan(problem, costs_of(), Options(planner="slimpipe", **asked))


def slices_of(made: Plan, sequence: int = 0) -> list[int]:
    """Return the tokens of a sequence's slices."""
    parts = [chunk.segments[0] for chunk in made.chunks]
    return [part.end - part.start for part in parts if part.sequence == sequence]


@pytest.mark.parametrize("multiple", [1, 16, 128])
@pytest.mark.parametrize("asked", [{}, {"slices": 7}, {"slices": 64}, {"chunk_tokens": 1024}], ids=str)
def test_slimpipes_slices_have_equal_length_and_no_chunk_has_more_tokens(asked: dict[str, int], multiple: int):
    """2504.14519, section 4: a sequence is divided evenly."""
    made = of_slimpipe(multiple=multiple, **asked)
    *slices, last = slices_of(made)
    assert max(slices) - min(slices) <= multiple
    assert 0 <= max(slices) - last < 2 * multiple
    assert all(sum(part.end - part.start for part in chunk.segments) <= max(slices) for chunk in made.chunks)
    assert max(slices) <= asked.get("chunk_tokens", max(LENGTHS))
    assert check(made) == []


def test_slimpipe_has_as_many_slices_as_ranks_or_a_multiple_of_them():
    """2504.14519, section 4: ``n >= p``."""
    problem = Problem(LENGTHS, TWO_EACH, (UNLIMITED_BYTES,) * 4)
    counts = [sum(chunk.segments[0].sequence == 0 for chunk in table) for table in even_slices(problem, costs_of(), Options())]
    assert counts == sorted(set(counts))
    assert counts[0] == 4
    assert {count % 4 for count in counts} == {0}
    assert len(slices_of(of_slimpipe((300, 200)))) == 4


def test_slimpipe_cuts_other_sequences_where_it_cuts_the_longest():
    made = of_slimpipe(slices=6)
    assert slices_of(made) == [5000] * 6
    assert slices_of(made, 1) == [5000] * 5 + [3000]
    assert slices_of(made, 2) == [5000, 4000]


@pytest.mark.parametrize("n", [4, 8, 16])
def test_slimpipes_plans_keep_what_its_paper_states(n: int):
    """2504.14519, section 4.1: activations of ``(1 + 2 (p - 1) / (n v)) / p`` of a sequence on all ranks."""
    unit = Unit("slimpipe, 2", 4, 4)
    made = plan(unit.problem, unit.costs, Options(planner="slimpipe", slices=n))
    assert len(slices_of(made)) == n
    assert max(made.predicted.peak_bytes) == pytest.approx(TOKENS * (1 + 2 * 3 / (n * 2)))


TOO_FEW = "SlimPipe needs at least 4 slices of the longest sequence on 4 ranks; its"


@pytest.mark.parametrize(
    ("lengths", "multiple", "asked", "said"),
    [
        ((300, 200), 1, {"slices": 1}, f"{TOO_FEW} 300 tokens have 1; raise slices to 4, or lower num_stages"),
        (LENGTHS, 1, {"slices": 3}, f"{TOO_FEW} 30000 tokens have 3; raise slices to 4, or lower num_stages"),
        ((3, 2), 1, {}, f"{TOO_FEW} 3 tokens have 3, in multiples of 1: give it longer sequences or fewer ranks"),
        ((380, 10), 128, {}, f"{TOO_FEW} 380 tokens have 3, in multiples of 128: give it longer sequences or fewer ranks"),
        ((380, 10), 128, {"slices": 8}, f"{TOO_FEW} 380 tokens have 3, in multiples of 128: give it longer sequences"),
    ],
)
def test_slimpipe_refuses_fewer_slices_than_ranks(lengths: tuple[int, ...], multiple: int, asked: dict[str, int], said: str):
    with pytest.raises(PlanError) as refused:
        of_slimpipe(lengths, multiple, **asked)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_token_cap_that_makes_slices_enough_is_no_refusal():
    assert len(slices_of(of_slimpipe(slices=2, chunk_tokens=6000))) == 5


SHORT = ["--lengths", "300,200", "--model", "llama3-8b", "--stages", "4"]


def test_the_command_line_names_the_flag_that_gives_slimpipe_its_slices(capsys):
    assert main(["plan", *SHORT, "--planner", "slimpipe", "--slices", "2"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{TOO_FEW} 300 tokens have 2; raise --slices to 4, or lower --stages")
    assert main(["plan", *SHORT, "--planner", "slimpipe"]) == 0
    assert "0[75:150]" in capsys.readouterr().out


def test_a_comparison_lists_slimpipe_as_refused_with_the_reason(capsys):
    assert main(["compare", *SHORT, "--slices", "2", "--planner", "slimpipe", "--planner", "greedy", "--json"]) == 0
    refused, planned = json.loads(capsys.readouterr().out)
    assert refused["refusal"] == f"{TOO_FEW} 300 tokens have 2; raise --slices to 4, or lower --stages"
    assert "refusal" not in planned


@pytest.mark.parametrize("slices", [None, 6])
def test_slimpipe_plans_vocabulary_shards_on_all_ranks(slices: int | None):
    """2504.14519: the vocabulary is divided over the ranks; here by S before the loss, N, and T for its weights."""
    problem = Problem(LENGTHS, TWO_EACH, (UNLIMITED_BYTES,) * 4)
    made = plan(problem, costs_of(shards=True), Options(planner="slimpipe", slices=slices))
    chunks = range(len(made.chunks))
    ran = sorted(step.action for row in made.ranks for step in row)
    for op, ranks in ((Op.S, range(4)), (Op.T, range(4)), (Op.N, range(1))):
        assert [action for action in ran if action.op is op] == [Action(op, rank, c) for rank in ranks for c in chunks]
    assert check(made) == second_simulator.faults(made) == []
    rows = lower(made)
    assert blocked([rows]) == []
    assert stuck(to_json(made), to_grid(rows), 8, waits=0.1) == []


def test_slimpipes_stages_run_in_the_same_order_with_vocabulary_shards():
    problem = Problem(LENGTHS, TWO_EACH, (UNLIMITED_BYTES,) * 4)
    with_shards, without = (plan(problem, costs_of(shards=has), Options(planner="slimpipe", slices=8)) for has in (True, False))
    for row, bare in zip(with_shards.ranks, without.ranks, strict=True):
        kept = [step.action for step in row if step.action.op in (Op.F, Op.B)]
        assert kept == [step.action for step in bare]
        assert all(one != other for one, other in pairwise(kept))
