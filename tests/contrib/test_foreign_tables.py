"""Tables of Primus, the zero-bubble fork and torch are read as the orders that they are, and their faults are named."""

import csv
import io
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from megatron_epp.contrib.foreign import from_table, is_table
from megatron_epp.contrib.foreign.pipelining import from_pipelining, launches_of
from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.tools.cli.main import main
from tests.support.calls import refusal

Rows = list[list[Action]]
BLUE, PLAIN = "\x1b[34m", "\x1b[0m"


def rows_of(text: str) -> Rows:
    """Return rows written as in a plan's grid, a line for each rank."""
    return [[Action.parse(word) for word in line.split()] for line in text.strip().splitlines()]


ONE_F_ONE_B = rows_of("0F0 0F1 0B0 0B1 \n 1F0 1B0 1F1 1B1")
SPLIT = rows_of("0F0 0F1 0B0 0W0 0B1 0W1 \n 1F0 1B0 1F1 1B1 1W0 1W1")
LOOPED = rows_of("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 \n 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1")
V = rows_of("0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1 3W0 3W1 0W0 0W1 \n 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 2W0 2W1 1W0 1W1")
ORDERS = {"1F1B": ONE_F_ONE_B, "split weights": SPLIT, "looped": LOOPED, "V": V}


@pytest.fixture
def checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Have `check` prove a table as a file of this name, and return what it says."""

    def check_file(text: str, is_sound: bool, name: str = "schedule.txt") -> str:
        (tmp_path / name).write_text(text)
        assert main(["check", str(tmp_path / name)]) == (not is_sound)
        return capsys.readouterr().out

    return check_file


def local(rows: Rows, rank: int, stage: int) -> int:
    return sorted({action.stage for action in rows[rank]}).index(stage)


def primus(rows: Rows) -> str:
    """Write rows as Primus logs them, with sends, colours and a logger's prefix."""
    lines = []
    for rank, row in enumerate(rows):
        split, nodes = {action.chunk for action in row if action.op is Op.W}, []
        for op, stage, chunk in row:
            name, where = "BW" if op is Op.B and chunk not in split else op, f"|{chunk}|{local(rows, rank, stage)})"
            nodes += [f"({name}{where}", *[f"(S{op}{where}"] * (op in "FB")]
        lines.append(f"[rank-0/2][INFO] {BLUE}Rank {rank}: {','.join(nodes)}{PLAIN}")
    return "a line of another program\n" + "\n".join(reversed(lines))


def with_communication(rows: Rows) -> str:
    """Write rows as the zero-bubble fork prints them before it runs them: a stage's number is the case."""
    lines = []
    for rank, row in enumerate(rows):
        words = []
        for op, stage, chunk in row:
            for word in (f"r{op}{chunk}" * (op in "FB"), f"{op}{chunk}", f"s{op}{chunk}" * (op in "FB")):
                words.append(word.upper() if local(rows, rank, stage) else word.lower())
        lines.append(" ".join(filter(None, words)))
    return "\n".join(lines)


def among_other_lines(rows: Rows) -> str:
    """Write rows as the zero-bubble fork does with offloaded activations, behind figures of its search and before a rule."""
    return (
        "1 2 1 7.0 8.0\n0 3 1 7.0 8.0\npeak memory: [8, 7] -> [4, 4]\n\ngroup size: 4\n>>>>> best schedule\n"
        f"{with_communication(rows)}\nbest schedule <<<<<\n"
    )


def bare(rows: Rows) -> str:
    """Write rows as the zero-bubble fork prints them when it makes them."""
    names = {"F": "F", "B": "BW"}
    return "\n".join(
        " ".join(f"{names[op]}{chunk}.{local(rows, rank, stage)}" for op, stage, chunk in row) for rank, row in enumerate(rows)
    )


@pytest.mark.parametrize(
    ("name", "written"), [*product(ORDERS, (primus, with_communication, among_other_lines)), ("1F1B", bare), ("looped", bare)]
)
def test_an_order_is_read_as_it_was_written(name: str, written: Callable[[Rows], str]):
    rows = ORDERS[name]
    assert is_table("schedule.txt", written(rows))
    made = from_table(written(rows))
    assert check(made) == []
    assert [[action for step in row for action in step.actions] for row in made.ranks] == rows
    chunks = len({action.stage for action in rows[0]})
    assert made.placement == Placement("v" if name == "V" else "looped", 2, chunks).rank_of


@pytest.mark.parametrize(
    "text",
    ["F0-0 F0-1 BW0-1 BW0-0 F1-0 F1-1 BW1-1 BW1-0\n" * 2, "f0 f0 b0 sb0 b0 sb0 f1 f1 b1 b1\nrf0 f0 rf0 f0 b0 b0 f1 f1 b1 b1\n"],
    ids=["numbered", "repeated"],
)
def test_slices_run_forward_in_order_and_backward_last_first(text: str):
    made = from_table(text)
    assert check(made) == []
    assert made.lengths == (2, 2)
    order = [str(action) for step in made.ranks[0] for action in step.actions]
    assert order == ["0F0", "0F1", "0B1", "0B0", "0F2", "0F3", "0B3", "0B2"]


def test_numbers_behind_dashes_are_stages_where_backwards_have_two_parts():
    made = from_table(">>>>> best schedule\nF0-0 F0-1 B0-1 W0-1      B0-0 W0-0\n     F0-0 F0-1 B0-1 W0-1 B0-0 W0-0")
    assert made.lengths == (1,)
    assert made.num_stages == 4


def test_nodes_of_primus_in_brackets_are_a_step():
    (row,) = from_table("Rank 0: (F|0|0),[(F|1|0),(SF|1|0),(BW|0|0)],(BW|1|0)").ranks
    assert [len(step.actions) for step in row] == [1, 2, 1]


@pytest.mark.parametrize("written", [primus, with_communication])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda rows: [[a for a in row if a != Action(Op.F, 1, 1)] for row in rows], "missing"),
        (lambda rows: [rows[0], [rows[1][1], rows[1][0], *rows[1][2:]]], "before"),
        (lambda rows: [[rows[0][1], rows[0][0], *rows[0][2:]], rows[1]], "crossed"),
        (lambda rows: [[*rows[0], rows[0][-1]], rows[1]], "doubled"),
    ],
    ids=["a backward of a microbatch never forwarded", "a backward ahead of its forward", "messages cross", "a pass twice"],
)
def test_faults_are_violations(written: Callable, fault: Callable, said: str, checked: Callable[..., str]):
    assert said in checked(written(fault(ONE_F_ONE_B)), is_sound=False)


def test_a_sound_table_tells_its_bubble_and_its_peak(checked: Callable[..., str]):
    said = checked(primus(SPLIT), is_sound=True, name="schedule.log")
    assert "sound: 2 ranks, 2 stages, 2 chunks" in said
    assert "rank 0 keeps most, 2 microbatches of a stage" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Rank 0: (F|0|0),(X|0|0)", "rank 0 of the table has '(X|0|0)'; expected a node"),
        ("Rank 0: (F|0|0),[(B|0|0)", "bracket that does not end"),
        ("Rank 0: (F|0|0)\nRank 0: (F|0|0)", "two rows of rank 0"),
        ("Rank 1: (F|0|0)", "no row of rank 0, and one of rank 1"),
        ("Rank 0: (F|0|0),(B|0|0)", "stage 0 has I of microbatch 0 and never W"),
        ("Rank 0: (SF|0|0)", "row 1 of the table has no passes"),
        ("Rank 0: (F|0|999999999)", "1,000,000,000 stages on each of 1 ranks"),
        ("f0 f1\nf0 x1", "row 2, word 2 of the table is 'x1'"),
        ("peak memory: 8 -> 4\nf0 b0\n\nx1 x2 x3\nf0 b0", "row 2, word 1 of the table is 'x1'"),
        ("peak memory: 8 -> 4\nsf0 rf1", "row 1 of the table has no passes"),
        ("f0 Sf0", "row 1, word 2 of the table is 'Sf0'"),
        ("F999999999", "1,000,000,000 microbatches"),
        ("F0-999999999", "1,000,000,000 microbatches"),
        ("f0 w0", "stage 0 has W of microbatch 0 and never I"),
    ],
)
def test_what_is_no_table_is_refused_in_a_line(text: str, said: str):
    assert said in refusal(from_table, text, error=PlanError)


@pytest.mark.parametrize("text", ["{}", "", "hello world", "Rank 0 waits", "100,200"])
def test_other_texts_are_no_tables(text: str):
    assert not is_table("plan.json", text)


def test_a_file_without_a_row_is_neither_a_plan_nor_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "schedule.txt"
    path.write_text("1 2 1 7.0 8.0\npeak memory: [8, 7] -> [4, 4]\n")
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: neither a plan, which is JSON, nor a table: no line is a row of rank 0, such as" in said


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("t.csv", lambda rows: "\n".join(",".join(map(str, row)) for row in rows)),
        *(("t.txt", written) for written in (primus, with_communication, bare)),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(name: str, written: Callable[[Rows], str], checked: Callable[..., str]):
    """Rank 0 wants the gradient of microbatch 0 before it forwards 1; rank 1 wants 1 before it runs the backward of 0."""
    said = checked(written(rows_of("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1")), is_sound=False, name=name)
    assert "deadlock: waits for 1B0 (rank 1, " in said
    assert "deadlock: waits for 0F1 (rank 0, " in said


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


def test_the_sends_and_receives_of_a_table_are_proven_under_one_queue(checked: Callable[..., str]):
    said = checked(WITH_MESSAGES, is_sound=True, name="table.csv")
    assert "its own 8 sends and receives cannot hang, not even on one hardware queue" in said


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
def test_faults_of_its_messages_are_violations(table: str, said: str, checked: Callable[..., str]):
    assert said in checked(table, is_sound=False, name="table.csv")


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
def test_what_is_no_table_of_torch_is_refused_in_a_line(table: str, said: str):
    assert said in refusal(from_pipelining, table, error=PlanError)


RANKS, MICROBATCHES = 4, 8


def rows_of_torch(name: str) -> dict[int, list[Any]]:
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
    made = from_pipelining(table_of(rows_of_torch(name)))
    assert (check(made), blocked([lower(made)]), len(made.chunks)) == ([], [], MICROBATCHES)
    assert max(made.predicted.peak_bytes) == kept


def test_the_sends_and_receives_that_torch_adds_cannot_hang() -> None:
    compute = {
        rank: [one for one in row if one is not None] for rank, row in rows_of_torch("ScheduleInterleavedZeroBubble").items()
    }
    text = table_of(schedules._add_send_recv(compute, lambda stage: stage % RANKS, 2 * RANKS))
    rows = launches_of(text)
    assert sum("SEND" in action.op for row in rows for action in row) == 2 * (2 * RANKS - 1) * MICROBATCHES
    assert check(from_pipelining(text), rows) == []


def test_a_backward_of_a_microbatch_that_is_never_forwarded_is_found() -> None:
    text = table_of(rows_of_torch("ScheduleInterleaved1F1B")).replace("4B3", "4B8")
    assert any("never runs" in str(fault) for fault in check(from_pipelining(text)))
