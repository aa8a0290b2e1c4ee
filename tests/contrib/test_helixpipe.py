"""HelixPipe: attention separate from its layer is planned, proven, simulated and lowered, and its faults are found."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from megatron_epp.contrib.demos.emulate import emulate
from megatron_epp.contrib.helix.attention_operations import INPUTS, INPUTS_GRADIENT, RESULT, RESULT_GRADIENT, A, G
from megatron_epp.contrib.helix.costs import cut_at_attention, with_separate_attention
from megatron_epp.contrib.helix.helixpipe import HelixLayout, helixpipe
from megatron_epp.contrib.papers.fixed_order import Batch
from megatron_epp.cost.work import NO_TIME
from megatron_epp.plan import Action, EppError, Op, Plan, PlanError, Step
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, Options, Problem, plan, slice_groups
from megatron_epp.planner.assemble import build_plan
from megatron_epp.tools.formulas import H100, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of
from megatron_epp.tools.report.gantt import save_gantt
from scripts.bench.orders.unit import TOKENS, Unit, block_costs

SHAPE = replace(shape_of(load_flags("llama3-8b")), num_layers=8)
LENGTHS = (9000, 8192, 8192, 7000, 6000, 8192, 3000, 8192)


def blocks(attention: bool = True):
    layout = HelixLayout.of(8, 4)
    profile = analytic_profile(SHAPE, H100)
    costs = profile.costs(layout.layers, state_bytes_per_parameter=7.5)
    if attention:
        return layout, layout.costs_of(costs, profile)
    return layout, cut_at_attention(costs, profile)


@pytest.fixture(scope="module")
def made() -> Plan:
    layout, costs = blocks()
    problem = Problem(LENGTHS, layout.placement.rank_of, (UNLIMITED_BYTES,) * 4)
    return plan(problem, costs, Options(planner="helixpipe", slices=1))


def unit_plan(folds: int, ranks: int, per_rank: int, rounds: int, attention: float) -> tuple[Plan, float]:
    """A plan of equal microbatches, and the time of all blocks' forwards of one microbatch on one layer."""
    unit = Unit(f"helixpipe, {per_rank}", ranks, rounds * folds * ranks)
    costs = block_costs(ranks * per_rank, 1.0, attention)
    (order,) = helixpipe(Batch(unit.chunks, slice_groups(unit.chunks), unit.placement, unit.problem, costs), folds)
    none = [[0] * len(unit.chunks)] * unit.problem.num_stages
    return build_plan(unit.problem, costs, Options(planner="helixpipe"), Decisions(unit.chunks, order, none)), (1 - attention)


@pytest.mark.parametrize(
    ("ranks", "per_rank", "rounds", "attention"),
    [(4, 2, 1, 0.5), (4, 3, 2, 0.9), (8, 2, 1, 0.25), (2, 4, 3, 0.75), (4, 1, 1, 0.5)],
)
def test_the_bubble_of_one_fold_is_that_of_one_layer_without_attention(
    ranks: int, per_rank: int, rounds: int, attention: float
):
    """``3 (p - 1) (t_pre + t_post)``, whatever attention takes and however many layers and microbatches there are.

    It follows from the order of 2507.00394, sections 4.1 and 4.2, with one microbatch in place of two that alternate.
    """
    made, block = unit_plan(1, ranks, per_rank, rounds, attention)
    assert check(made) == []
    timeline = simulate(made)
    for busy_us in timeline.busy_us:
        assert (timeline.makespan_us - busy_us) / TOKENS == pytest.approx(3 * (ranks - 1) * block)


@pytest.mark.parametrize("attention", [0.25, 0.9])
def test_the_bubble_of_two_folds_is_at_most_twice_that_and_has_no_attention_in_it(attention: float):
    made, block = unit_plan(2, 4, 2, 2, attention)
    timeline = simulate(made)
    waits = (timeline.makespan_us - min(timeline.busy_us)) / TOKENS
    assert 3 * 3 * block <= waits <= 2 * 3 * 3 * block
    assert max(timeline.busy_us) == pytest.approx(min(timeline.busy_us))


def test_attention_of_a_layer_is_on_all_ranks_and_backwards_reverse_forwards(made: Plan):
    for site, chunk in product(range(made.num_stages - 1), range(len(made.chunks))):
        (rank,) = [rank for rank in range(4) if Action(A, site, chunk) in made.actions(rank)]
        assert rank == (site + chunk // 2 + 1) % 4
        assert Action(G, site, chunk) in made.actions(rank)
    for rank in range(4):
        row = made.actions(rank)
        assert [(a.stage, a.chunk) for a in row] == [(a.stage, a.chunk) for a in reversed(row)]


def test_messages_join_blocks_and_attention_only_where_their_ranks_differ(made: Plan):
    placed = {action: rank for rank in range(4) for action in made.actions(rank)}
    sent = {action for row in lower(made) for action in row}
    for site, chunk in product(range(made.num_stages - 1), range(len(made.chunks))):
        own = placed[Action(A, site, chunk)]
        before, after = (placed[Action(Op.F, stage, chunk)] != own for stage in (site, site + 1))
        for message, moves, stage in ((INPUTS, before, site), (RESULT, after, site)):
            assert (Action(message.send, stage, chunk) in sent) == moves
        for message, moves, stage in ((RESULT_GRADIENT, after, site + 1), (INPUTS_GRADIENT, before, site)):
            assert (Action(message.send, stage, chunk) in sent) == moves


def test_the_plan_is_sound_cannot_hang_and_survives_json(made: Plan):
    assert (check(made), blocked([lower(made)]), from_json(to_json(made))) == ([], [], made)


def test_lost_receives_are_found_by_the_proof(made: Plan):
    rows = [list(row) for row in lower(made)]
    rows[1].remove(next(action for action in rows[1] if action.op is INPUTS.receive))
    assert blocked([rows]) != []


def without(made: Plan, action: Action) -> Iterator[tuple[Step, ...]]:
    for row in made.ranks:
        yield tuple(step for step in row if step.action != action)


def test_a_backward_of_attention_on_another_rank_than_its_forward_is_found(made: Plan):
    """Queries, keys and values stay where attention ran, and no message brings them to another rank."""
    moved = Action(G, 0, 0)
    step = next(step for row in made.ranks for step in row if step.action == moved)
    ranks = list(without(made, moved))
    ranks[3] = (*ranks[3], step)
    assert next(i for i, one in enumerate(ranks[0]) if one.action == Action(Op.B, 0, 0)) == len(ranks[0]) - 1
    fault, *_ = check(replace(made, ranks=tuple(ranks)))
    assert "needs what 0A0 keeps on rank 1" in str(fault)


def test_all_that_a_layer_took_and_kept_is_in_its_parts():
    """Times and bytes of blocks and attention add up to those of the layers they are cut from, but for what is kept twice."""
    _, whole = blocks(attention=False)
    separate = with_separate_attention(whole, last_in_backward=False)
    assert separate.attention is not None
    for stage, parts in zip(whole.stages, separate.stages, strict=True):
        attentions = stage.num_cached_layers
        for name in ("forward", "backward"):
            assert parts.line(name) + getattr(separate.attention, name).scaled(attentions) == stage.line(name)
        kept = stage.num_layers * stage.layers.bytes_per_token + sum(half.bytes_per_token for half in stage.inner)
        left = parts.num_layers * parts.layers.bytes_per_token + sum(half.bytes_per_token for half in parts.inner)
        assert left + attentions * separate.attention.input_bytes_per_token == pytest.approx(kept)
    assert (separate.attention.input_bytes_per_token, separate.attention.output_bytes_per_token) == (
        2 * (4096 + 2 * 1024),
        2 * 4096,
    )


def test_the_last_backward_runs_its_forward_and_waits_with_its_input_alone():
    whole = with_separate_attention(blocks(attention=False)[1], last_in_backward=False).stages[-1]
    last = blocks()[1].stages[-1]
    assert (last.line("forward"), last.line("backward")) == (NO_TIME, whole.line("forward") + whole.line("backward"))
    kept = last.inner[0].bytes_per_token + last.ends_bytes_per_token
    # The residual received, and the same and attention's output kept.
    assert kept == 3 * 2 * 4096 < whole.inner[0].bytes_per_token


def test_the_runtime_runs_its_actions_and_messages_in_the_order_of_the_plan():
    """With timed waits in place of compute: none begins before what it needs has ended, and its message has come."""
    layout = HelixLayout.of(4, 2)
    profile = analytic_profile(replace(SHAPE, num_layers=4), H100)
    costs = layout.costs_of(profile.costs(layout.layers, state_bytes_per_parameter=7.5), profile)
    made = plan(Problem((900, 500, 800), layout.placement.rank_of, (UNLIMITED_BYTES,) * 2), costs, Options(planner="helixpipe"))
    scale = 2e6 / made.predicted.makespan_us
    emulated = emulate(made, scale, timeout_s=120)
    assert [[text for text, _, _ in events] for events in emulated] == [[str(a) for a in made.actions(r)] for r in range(2)]
    times = {Action.parse(text): (start, end) for events in emulated for text, start, end in events}
    placed = {action: rank for rank in range(2) for action in made.actions(rank)}
    sent_us = dict(made.messages.message_us)
    for site, chunk in product(range(made.num_stages - 1), range(len(made.chunks))):
        ahead, behind, own, back = (Action(*key, chunk) for key in ((Op.F, site), (Op.F, site + 1), (A, site), (G, site)))
        ahead_back, behind_back = ahead._replace(op=Op.B), behind._replace(op=Op.B)
        for kind, first, then in (
            (INPUTS, ahead, own),
            (RESULT, own, behind),
            (RESULT_GRADIENT, behind_back, back),
            (INPUTS_GRADIENT, back, ahead_back),
        ):
            message_us = sent_us[kind.send][chunk] * (placed[first] != placed[then])
            assert times[then][0] >= times[first][1] + message_us * (1 - 1e-6)


def test_costs_with_attention_in_the_stages_slices_and_layers_that_ranks_cannot_share_equally_are_refused():
    with pytest.raises(EppError, match="equally many layers on every rank; 4 ranks share 10"):
        HelixLayout.of(10, 4)
    layout, costs = blocks(attention=False)
    problem = Problem(LENGTHS, layout.placement.rank_of, (UNLIMITED_BYTES,) * 4)
    with pytest.raises(PlanError, match="costs of separate attention"):
        plan(problem, costs, Options(planner="helixpipe"))
    with pytest.raises(PlanError, match="whole sequences; a sequence is in 4 slices"):
        plan(problem, blocks()[1], Options(planner="helixpipe", slices=4))


def test_pictures_name_attention(made: Plan, tmp_path):
    save_gantt(made, tmp_path / "helixpipe.svg")
    assert "attention backward" in (tmp_path / "helixpipe.svg").read_text()
