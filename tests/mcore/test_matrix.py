"""Training with plans gives what Megatron's own schedule gives on the same documents fed whole: fp32, on CPU, over gloo.

"Stock" is Megatron's schedule function and Megatron's attention, one document per microbatch. `support/mcore/rows.py` has the
rows: features and layouts. Losses, gradients of the first and of the last iteration, and parameters are compared.
"""

from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pytest
import torch

from scripts.parity.cells import Row as Choices
from scripts.parity.cells import all_cells, all_rows, covering_rows, full_rows
from tests.support.mcore import worker
from tests.support.mcore.matrix import Matrix, Row, parameters
from tests.support.mcore.rows import BY_DEFAULT, CHOICES, KINDS, PAIRS, ROWS
from tests.support.mcore.script_rows import SCRIPT_ROWS, ScriptRow


@pytest.mark.parametrize("row", parameters(ROWS))
def test_it_trains_as_the_stock_schedule_does(matrix: Matrix, row: Row) -> None:
    matrix.check(row)


@pytest.mark.parametrize("script", parameters(SCRIPT_ROWS))
def test_a_scripts_own_microbatches_train_as_the_stock_schedule_does(script: ScriptRow) -> None:
    script.check()


def test_replicas_train_on_unequal_numbers_of_documents(matrix: Matrix) -> None:
    """With and without experts to share: or the rows above prove nothing about them."""
    for shares_experts in (False, True):
        rows = [row for row in KINDS if row.case.cell.dp > 1 and (row.case.cell.ep > 1) == shares_experts]
        replicas = [matrix.figures(row)["plans"] for row in rows]
        assert any(len({plan["sequences"] for plan in plans}) > 1 for row in replicas for plans in zip(*row, strict=True))


def test_a_training_is_the_same_bit_by_bit_alone_and_after_others(matrix: Matrix, tmp_path: Path) -> None:
    """Ranks keep nothing of a training that the next could notice."""
    rows = {row.name: row for row in ROWS}
    after, before = rows["pp2: gpt2, split, some recompute, 5"], rows["masked labels: part of every document"]
    flags = {row.name: row.case.elastic_flags(row.common(tmp_path)) for row in (before, after)}
    recorded = "tests.support.mcore.trainings:recorded"
    alone = worker.call(2, recorded, fresh=True, flags=flags[after.name])
    worker.call(2, recorded, flags=flags[before.name])
    worker.call(2, recorded, flags=[*after.case.stock_flags(after.common(tmp_path))])
    for one, other in zip(alone, worker.call(2, recorded, flags=flags[after.name]), strict=True):
        assert one.losses == other.losses
        assert one.validation == other.validation
        for tensors, others in zip((one.final, *one.gradients), (other.final, *other.gradients), strict=True):
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def meetings(rows: Iterable[Choices]) -> set[tuple[str, str]]:
    """Every two kinds of parallelism that meet in a row; tensor parallelism with and without shared tokens are two kinds."""
    found: set[tuple[str, str]] = set()
    for cell in (row.cell for row in rows):
        sizes = {"tp": cell.tp if not cell.sp else 1, "sp": 1 + cell.sp, "cp": cell.cp, "dp": cell.dp, "pp": cell.pp}
        sizes |= {cell.placement: cell.virtual, "split": 1 + cell.split, "experts": 1 + cell.experts, "ep": cell.ep}
        found |= set(combinations(sorted(kind for kind, size in sizes.items() if size > 1), 2))
    return found


def test_the_rows_bring_every_two_choices_together() -> None:
    everything = set().union(*(row.pairs for row in all_rows()))
    assert set().union(*(row.pairs for row in covering_rows())) == everything
    assert [row.cell for row in full_rows()] == all_cells()
    assert len(CHOICES) == len(BY_DEFAULT)
    in_the_slow_set = {("cp", "looped"), ("cp", "tp"), ("dp", "v"), ("ep", "v"), ("looped", "sp"), ("tp", "v")}
    assert meetings(all_rows()) - meetings(CHOICES) == in_the_slow_set
    assert meetings(all_rows()) == meetings([*CHOICES, *PAIRS])
    assert {*CHOICES, *PAIRS} >= {*covering_rows()}


def test_rows_have_names_of_their_own() -> None:
    names = [row.name for row in (*ROWS, *SCRIPT_ROWS)]
    assert len({*names}) == len(names)
