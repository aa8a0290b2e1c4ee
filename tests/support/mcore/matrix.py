"""Trains rows of the matrix, with plans and by Megatron's own schedule, and compares what their ranks saw.

A row is a model and its features on a layout of ranks, with what its plans must contain. Ranks stay from row to row (`worker`).
Rows whose runs by Megatron's schedule have equal flags share one.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from megatron_epp.data.sampler import GlobalBatchSampler
from scripts.parity.cells import CONTEXT, LENGTHS, VOCABULARY, Case, Cell, common_flags
from scripts.parity.runs import Run, compare
from scripts.random_documents import write_documents
from tests.support.mcore import worker
from tests.support.mcore.parity_figures import SMALL_BATCH, Figures, answers_only, check_closeness, masked_documents
from tests.support.mcore.script_rows import ScriptRow
from tests.support.mcore.stand_ins import has_stand_in

FOLDER = "FOLDER"
"""Stands in the flags of a row for a folder of its own."""
SEED = 1234
NUM_TRAINING = round(0.8 * len(LENGTHS))
"""Documents of the training split; the others are for validation."""

Check = Callable[[Figures, Path], None]
"""Asserts what the plans of a row contain, or its folder: without it, a row could prove nothing."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One training of the matrix.

    Attributes:
        case: layout, model and flags. `FOLDER` in the flags of the run with plans is a folder for its files.
        iterations: of both runs, and one evaluation behind them.
        batch: documents of a batch.
        documents: a key of `DOCUMENTS`.
        prepare: called with the row's folder ahead of the run with plans.
        is_slow: it belongs to the set `slow`.
        unused: tensors that Megatron makes and has no gradient for.
    """

    name: str
    case: Case
    check: Check
    iterations: int = 2
    batch: int = SMALL_BATCH
    documents: str = "plain"
    prepare: Callable[[Path], None] = lambda _: None
    is_slow: bool = False
    unused: int = 0

    @property
    def num_processes(self) -> int:
        return self.case.cell.num_processes

    def common(self, documents: Path) -> tuple[str, ...]:
        flags = common_flags(self.iterations, CONTEXT, self.batch, validates=True)
        return (*flags, "--data-path", DOCUMENTS[self.documents](documents / self.documents.replace(" ", "-")))

    def stock(self, documents: Path) -> tuple[int, tuple[str, ...], bool]:
        """Return the ranks of the run by Megatron's schedule, its flags, and whether it saves where it began."""
        return self.case.stock.num_processes, self.case.stock_flags(self.common(documents)), self.case.loads


def cell_of(text: str) -> Cell:
    """Return the layout that reads like this, as in ``tp2 sp pp2 v2 split``; ``alone`` is one rank."""
    sizes: dict[str, Any] = {}
    for word in text.split():
        name, size = re.fullmatch(r"([a-z]+)(\d*)", word).groups()
        sizes |= {"virtual": int(size), "placement": name} if name in ("looped", "v") else {name: int(size) if size else True}
    sizes.pop("alone", None)
    cell = Cell(**sizes)
    assert str(cell) == text, f"{text} reads {cell}"
    return cell


def case(cell: str, plan: str, model: str = "llama", **more: Any) -> Case:
    return Case(cell_of(cell), model, plan, **more)


def parameters(rows: Iterable[Row | ScriptRow]) -> list[Any]:
    """Return rows as values of pytest's `parametrize`, so that ranks seldom change: those of few ranks come first."""
    ordered = sorted(rows, key=lambda row: row.num_processes)
    return [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * row.is_slow) for row in ordered]


class Matrix:
    """Runs of a test file's rows, each made when first asked for. Its runs by Megatron's schedule are made together."""

    @classmethod
    def of(cls, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> Self:
        """Return the matrix of the rows that are selected of a test file, whose fixture asks for it."""
        mine = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
        given = [item.callspec.params for item in mine if hasattr(item, "callspec")]
        return cls(folders.mktemp("matrix"), [params["row"] for params in given if "row" in params])

    def __init__(self, folder: Path, rows: Iterable[Row]) -> None:
        self._folder = folder
        (folder / "documents").mkdir()
        self._wanted = sorted({row.stock(self._documents) for row in rows}, key=lambda stock: stock[0])
        self._stock: dict[tuple[int, tuple[str, ...], bool], list[Run] | AssertionError] = {}
        self.figures = functools.cache(self._figures)

    @property
    def _documents(self) -> Path:
        return self._folder / "documents"

    def check(self, row: Row) -> None:
        """Assert that a row trains as Megatron's schedule does, and what its plans contain."""
        figures = self.figures(row)
        both = row.case.both.split()
        attention = "PlainAttention" if has_stand_in(both) else "DotProductAttention"
        attention = "TEDotProductAttention" if "transformer_engine" in both else attention
        check_closeness(figures, attention, row.unused)
        assert figures["num_losses"] == [row.iterations, 1]
        row.check(figures, self.folder(row))

    def folder(self, row: Row) -> Path:
        return self._folder / row.name.replace("/", " ").replace(" ", "_")

    def _figures(self, row: Row) -> Figures:
        for wanted in self._wanted:
            if wanted not in self._stock:
                self._stock[wanted] = self._train_stock(wanted)
        wanted = row.stock(self._documents)
        if wanted not in self._stock:
            self._stock[wanted] = self._train_stock(wanted)
        stock = self._stock[wanted]
        if isinstance(stock, AssertionError):
            raise stock
        self.folder(row).mkdir()
        row.prepare(self.folder(row))
        flags = [flag.replace(FOLDER, str(self.folder(row))) for flag in row.case.elastic_flags(row.common(self._documents))]
        if row.case.loads:
            flags += ["--load", str(self._saved(wanted)), "--finetune"]
        elastic = train(row.num_processes, flags, limit_s=900)
        return compare(stock, elastic) | {"num_processes": len(elastic)}

    def _train_stock(self, wanted: tuple[int, tuple[str, ...], bool]) -> list[Run] | AssertionError:
        num_processes, flags, saves = wanted
        try:
            return train(num_processes, flags, self._saved(wanted) if saves else None, limit_s=900)
        except AssertionError as error:
            return error

    def _saved(self, wanted: tuple[int, tuple[str, ...], bool]) -> Path:
        return self._folder / f"checkpoint{abs(hash(wanted))}"


def train(num_processes: int, flags: Iterable[str], checkpoint: Path | None = None, limit_s: float = 300) -> list[Run]:
    """Train in a world that stays, and return what its ranks saw. Raises AssertionError with their output if it fails."""
    saved = None if checkpoint is None else str(checkpoint)
    recorded = "tests.support.mcore.trainings:recorded"
    return worker.call(num_processes, recorded, limit_s=limit_s, flags=[*flags], checkpoint=saved)


def batches_of(size: int, count: int) -> list[tuple[int, ...]]:
    sampler = GlobalBatchSampler(NUM_TRAINING, size, seed=SEED)
    return [next(sampler) for _ in range(count)]


def whole(documents: set[int]) -> list[np.ndarray]:
    """Return masks of documents that are trained as a whole or not at all."""
    return [np.full(length + 1, number in documents) for number, length in enumerate(LENGTHS)]


def _whole_or_ends() -> list[np.ndarray]:
    """Return masks by which some documents train nothing, others only their end, so that chunks are masked whole."""
    return [np.arange(length + 1) > (length if number % 3 == 0 else 0.7 * length) for number, length in enumerate(LENGTHS)]


def _part_of_every_one() -> list[np.ndarray]:
    random = np.random.RandomState(5)
    return [random.rand(length + 1) < 0.3 for length in LENGTHS]


def _on_one_of_two_replicas() -> list[np.ndarray]:
    """Return masks by which, of two replicas with a document each, one has nothing to train."""
    first_of_each = {batch[0] for batch in batches_of(2, 2)}
    return whole(first_of_each | set(range(NUM_TRAINING, len(LENGTHS))))


def _masked(masks: Callable[[], list[np.ndarray]]) -> Callable[[Path], str]:
    return functools.cache(lambda prefix: masked_documents(prefix, masks()))


DOCUMENTS: dict[str, Callable[[Path], str]] = {
    "plain": functools.cache(lambda prefix: write_documents(prefix, LENGTHS, VOCABULARY)),
    "answers": _masked(answers_only),
    "whole or ends": _masked(_whole_or_ends),
    "parts": _masked(_part_of_every_one),
    "one of two replicas": _masked(_on_one_of_two_replicas),
}
"""By what of them is trained, functions that write documents of the lengths of parity runs and return their path."""
