"""Rehearsals: real ranks, real messages, timed waits. Nothing here judges how fast this machine is."""

import threading
from dataclasses import replace
from itertools import pairwise

import pytest

from megatron_epp.contrib.demos.emulate import emulate, host_locks
from megatron_epp.plan import Action, EppError, Op
from megatron_epp.plan.document import digest
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.relations import deps
from megatron_epp.plan.serialize import save
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner import plan as make_plan
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.plan.small_plans import offload, shared_link
from tests.support.runtime.runtime_plans import offloading, planned, two_ranks, v_shape


def assert_follows(emulated, plan):
    """Every rank ran its list, no action was shorter than planned, and none began before what it needs and its message."""
    started, ended = {}, {}
    for rank, events in enumerate(emulated):
        copies = {str(copy.action): copy.time_us for copy in plan.copies[rank]} if plan.copies else {}
        copied = [event for event in events if event[0] in copies]
        assert [text for text, _, _ in copied] == list(copies)
        assert all(end - start >= copies[text] * (1 - 1e-6) for text, start, end in copied)
        events = [event for event in events if event[0] not in copies]
        assert [text for text, _, _ in events] == [str(action) for action in plan.actions(rank)]
        for (text, start, end), step in zip(events, plan.ranks[rank], strict=True):
            assert end - start >= step.time_us * (1 - 1e-6)
            started[Action.parse(text)], ended[Action.parse(text)] = start, end
        for before, after in pairwise(events):
            assert before[2] <= after[1]
    needs = deps(plan.chunks, plan.num_stages)
    for action in started:
        for needed in needs(action):
            message_us = 0.0
            if plan.placement[needed.stage] != plan.placement[action.stage]:
                table = plan.messages.activation_us if action.op is Op.F else plan.messages.gradient_us
                message_us = table[min(needed.stage, action.stage)][action.chunk]
            assert started[action] >= ended[needed] + message_us * (1 - 1e-6)


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_planned_batch_runs_as_planned_and_no_faster(forward_only):
    plan = planned((900, 200, 120, 60), [1, 1, 1], slices=3, forward_only=forward_only)
    emulated = emulate(plan, scale=3.0, timeout_s=120)
    assert_follows(emulated, plan)
    assert max(end for events in emulated for _, _, end in events) >= simulate(plan).makespan_us * (1 - 1e-6)


def test_other_placements_run_too():
    plan = v_shape()
    assert_follows(emulate(plan, scale=1000.0, timeout_s=120), plan)


def test_copies_run_beside_compute_in_turns_and_backwards_wait_for_them():
    plan = replace(offloading(two_ranks(), 0.5), host_links=(0, 0))
    emulated = emulate(plan, scale=2000.0, timeout_s=120)
    assert_follows(emulated, plan)
    at = {text: (start, end) for events in emulated for text, start, end in events}
    for op in "OL":
        lane = sorted(at[f"{stage}{op}{chunk}"] for stage in (0, 1) for chunk in (0, 1, 2))
        assert all(before[1] <= after[0] for before, after in pairwise(lane))
    for stage in (0, 1):
        for chunk in (0, 1, 2):
            assert at[f"{stage}F{chunk}"][1] <= at[f"{stage}O{chunk}"][0]
            assert at[f"{stage}L{chunk}"][1] <= at[f"{stage}B{chunk}"][0]


def test_a_rehearsal_that_takes_too_long_is_ended():
    with pytest.raises(EppError, match="2 of 2 ranks have not ended after 1 s"):
        emulate(two_ranks(), scale=1e8, timeout_s=1)


def test_the_command_reports_measured_against_simulated_and_writes_the_run(tmp_path, capsys):
    plan = planned((900, 200, 120, 60), [1, 1])
    save(plan, tmp_path / "plan.json")
    argv = ["emulate", str(tmp_path / "plan.json"), "--time-scale", "2", "-o", str(tmp_path / "measured.json")]
    assert main(argv) == 0
    assert "makespan: simulated" in capsys.readouterr().out
    measured = Measured.load(tmp_path / "measured.json")
    assert measured.plan_digest == digest(plan)
    assert measured.makespan_us >= plan.predicted.makespan_us * (1 - 1e-6)
    assert main(["show", str(tmp_path / "plan.json"), "--measured", str(tmp_path / "measured.json")]) == 0


def test_a_plan_that_does_not_check_is_not_rehearsed(tmp_path, capsys):
    plan, path = two_ranks(), tmp_path / "plan.json"
    save(replace(plan, ranks=(plan.ranks[0][::-1], plan.ranks[1])), path)
    assert main(["emulate", str(path)]) == 2
    assert "megatron-epp check" in capsys.readouterr().err


@pytest.mark.parametrize("forward_only", [False, True])
def test_shards_of_the_vocabulary_wait_for_their_collectives(forward_only):
    shape = ModelShape(num_layers=3, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=512)
    costs = analytic_profile(shape, CPU).costs([1, 1, 1], vocabulary_shares=[1 / 3] * 3)
    problem = Problem((900, 200, 120, 60), (0, 1, 2), (UNLIMITED_BYTES,) * 3, forward_only=forward_only)
    plan = make_plan(problem, costs, Options(slices=3))
    emulated = emulate(plan, scale=100.0, timeout_s=120)
    events = {Action.parse(text): (start, end) for row in emulated for text, start, end in row}
    assert [text for text, _, _ in emulated[1]] == [str(action) for action in plan.actions(1)]
    spread, gather = (dict(plan.messages.collective_us)[op] for op in (Op.SPREAD, Op.GATHER))
    for chunk in range(len(plan.chunks)):
        shards = [events[Action(Op.S, rank, chunk)] for rank in range(3)]
        forward, loss = events[Action(Op.F, 2, chunk)], events[Action(Op.N, 0, chunk)]
        assert min(start for start, _ in shards) >= forward[1] + spread[chunk] * (1 - 1e-6)
        assert loss[0] >= max(end for _, end in shards) + gather[chunk] * (1 - 1e-6)


def test_links_that_ranks_share_have_a_lock_in_each_direction_and_others_none():
    assert host_locks(offload(), threading) == host_locks(replace(shared_link(), host_links=(0, 1)), threading) == {}
    assert set(host_locks(shared_link(), threading)) == {(0, Op.O), (0, Op.L)}
