"""Tables that Primus and the zero-bubble fork print are read as the orders that they are, and their faults are named."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from megatron_epp.contrib.foreign import from_table, is_table
from megatron_epp.plan import Action, Op, PlanError
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
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
def test_faults_are_violations(written: Callable, fault: Callable, said: str, tmp_path: Path, capsys):
    path = tmp_path / "schedule.txt"
    path.write_text(written(fault(ONE_F_ONE_B)))
    assert main(["check", str(path)]) == 1
    assert said in capsys.readouterr().out


def test_a_sound_table_tells_its_bubble_and_its_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "schedule.log"
    path.write_text(primus(SPLIT))
    assert main(["check", str(path)]) == 0
    said = capsys.readouterr().out
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
def test_ranks_that_wait_for_each_other_are_named(name: str, written: Callable[[Rows], str], tmp_path: Path, capsys):
    """Rank 0 wants the gradient of microbatch 0 before it forwards 1; rank 1 wants 1 before it runs the backward of 0."""
    path = tmp_path / name
    path.write_text(written(rows_of("0F0 0B0 0F1 0B1 \n 1F0 1F1 1B0 1B1")))
    assert main(["check", str(path)]) == 1
    said = capsys.readouterr().out
    assert "deadlock: waits for 1B0 (rank 1, " in said
    assert "deadlock: waits for 0F1 (rank 0, " in said
