"""Tables of torch.distributed.pipelining are read, proven, and their faults named."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from megatron_epp.contrib.foreign.pipelining import from_pipelining, launches_of
from megatron_epp.plan import Op, PlanError
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.tools.cli.main import main
from tests.support.calls import refusal

TABLE = "0F0,0F1,,0I0,0W0,0B1\n,1F0,1B0,1F1,1B1\n"
OLD = "0F0,0F1,,0B0,0W0,0B1,0W1\n,1F0,1B0,1F1,1W0,1B1,1W1\n"
"""In a notation in which B beside W is the part of a backward without weight gradients."""
WITH_MESSAGES = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0BW0,0RECV_B1,0B1,0W1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1W0,1F1,1BW1,1SEND_B1\n"
)


def test_a_sound_table_has_no_violations_and_its_peak_and_bubble():
    made = from_pipelining(f"\n{TABLE}\n\n")  # empty lines are no ranks
    assert check(made) == []
    assert made.placement == (0, 1)
    assert [str(step.action) for step in made.ranks[0]] == ["0F0", "0F1", "0B0", "0W0", "0B1"]
    assert [step.time_us for step in made.ranks[0]] == [1, 1, 1, 1, 2]
    assert made.predicted.peak_bytes == (2, 1)
    assert made.predicted.makespan_us == 9


def test_overlapping_actions_are_a_step():
    made = from_pipelining("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n")
    assert [step.actions for step in made.ranks[0] if len(step.actions) > 1] == [made.ranks[0][2].actions]
    assert ([action.op for action in made.ranks[0][2].actions], made.ranks[0][2].time_us) == ([Op.F, Op.B], 3)
    assert check(made) == []


@pytest.mark.parametrize(("table", "whole"), [(OLD, []), (WITH_MESSAGES, ["0B0", "1B1"])])
def test_a_backward_beside_its_weight_gradient_is_the_part_without_it(table: str, whole: list[str]):
    made = from_pipelining(table)
    assert check(made) == []
    steps = [step for row in made.ranks for step in row if step.action.op is Op.B]
    assert ([str(step.action) for step in steps if step.time_us == 2], len(steps)) == (whole, 4)


def test_the_sends_and_receives_of_a_table_are_proven_under_one_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "table.csv"
    path.write_text(WITH_MESSAGES)
    assert main(["check", str(path)]) == 0
    assert "its own 8 sends and receives cannot hang, not even on one hardware queue" in capsys.readouterr().out


def moved(table: str, cell: str, before: str) -> str:
    return table.replace(f",{cell}", "").replace(before, f"{cell},{before}")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (WITH_MESSAGES.replace("0SEND_F0,", ""), "0SEND_F0: missing: the rank never launches this send of an activation"),
        (WITH_MESSAGES.replace("0SEND_F0", "0SEND_F0,0SEND_F0"), "0SEND_F0: doubled: already at launch 1 (launch 2)"),
        (WITH_MESSAGES.replace("0F1,", "0F1,0SEND_B1,"), "0SEND_B1: no stage needs this message of the rank (launch 3)"),
        (moved(WITH_MESSAGES, "1RECV_F1", "1BW1"), "1F1: is launched at 5, before 1RECV_F1 (launch 6)"),
        (moved(WITH_MESSAGES, "0SEND_F1", "0F1"), "0SEND_F1: is launched at 2, before 0F1 (launch 3), which it needs"),
        (moved(moved(WITH_MESSAGES, "0F1", "0SEND_F0"), "0SEND_F1", "0SEND_F0"), "can hang: rank 0 0SEND_F1 (launch 2) waits"),
        (moved(WITH_MESSAGES, "0RECV_B0", "0SEND_F0"), "can hang: rank 0 0RECV_B0 (launch 1) waits"),
    ],
    ids=["missing", "doubled", "unknown", "received late", "sent early", "orders of both ends differ", "both ends wait"],
)
def test_faults_of_its_messages_are_violations(table: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "table.csv"
    path.write_text(table)
    assert main(["check", str(path)]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", "row 1 of the table has no passes"),
        ("0F0,hello\n", "row 1, cell 2 of the table is 'hello'"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 of the table is on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 of the table has no passes"),
        ("0F999999999\n9999F0\n", "stage 1 of the table has no passes"),
        ("0F999999999\n", "1,000,000,000 microbatches"),
        ("0F0,0F1,0I0,0W0,0I1\n", "stage 0 has I of microbatch 1 and never W"),
        ("0F0,0I0,0W0,0F1,0B1,0W1\n", "stage 0 has B and W of microbatch 1: B is both parts"),
        ("0F0,0F1,0BW0,0B1\n", "stage 0 has I of microbatch 1 and never W"),
        ("0F0,0I0,0B0,0W0\n", "stage 0 has B and I of microbatch 0: B is both parts"),
        ("0F0,0B0\n,\n", "row 2 of the table has no passes"),
        ("0" * 140_000 + "F0\n", "the table is no CSV"),
    ],
)
def test_what_is_no_table_is_refused_in_a_line(table: str, said: str):
    assert said in refusal(from_pipelining, table, error=PlanError)


RANKS, MICROBATCHES = 4, 8


def rows_of(name: str) -> dict[int, list[Any]]:
    """Return torch's actions of every rank of a schedule with two stages per rank, made without stages and process groups."""
    made: Any = object.__new__(getattr(schedules, name))
    made.n_local_stages = made._n_local_stages = 2
    made.pp_group_size, made._num_stages = RANKS, 2 * RANKS
    made._n_microbatches, made.stage_index_to_group_rank = MICROBATCHES, {}
    made.number_of_rounds = MICROBATCHES // RANKS
    made.microbatches_per_round = MICROBATCHES // made.number_of_rounds
    return {rank: made._calculate_single_rank_operations(rank) for rank in range(RANKS)}


def table_of(rows: dict[int, list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows.values())
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "kept"), [("ScheduleInterleaved1F1B", 11), ("ScheduleInterleavedZeroBubble", 8), ("ScheduleDualPipeV", 9)]
)
def test_torchs_own_tables_are_sound(name: str, kept: int) -> None:
    made = from_pipelining(table_of(rows_of(name)))
    assert (check(made), blocked([lower(made)]), len(made.chunks)) == ([], [], MICROBATCHES)
    assert max(made.predicted.peak_bytes) == kept


def test_the_sends_and_receives_that_torch_adds_cannot_hang() -> None:
    compute = {rank: [one for one in row if one is not None] for rank, row in rows_of("ScheduleInterleavedZeroBubble").items()}
    text = table_of(schedules._add_send_recv(compute, lambda stage: stage % RANKS, 2 * RANKS))
    rows = launches_of(text)
    assert sum("SEND" in action.op for row in rows for action in row) == 2 * (2 * RANKS - 1) * MICROBATCHES
    assert check(from_pipelining(text), rows) == []


def test_a_backward_of_a_microbatch_that_is_never_forwarded_is_found() -> None:
    text = table_of(rows_of("ScheduleInterleaved1F1B")).replace("4B3", "4B8")
    assert any("never runs" in str(fault) for fault in check(from_pipelining(text)))
