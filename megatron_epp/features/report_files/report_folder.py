"""The folder of the first rank's reports."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.plan import Plan, PlanError
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.serialize import save
from megatron_epp.plan.trace import save_trace
from megatron_epp.plan.writing import append_line

if TYPE_CHECKING:
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

LINES = "iterations.jsonl"
"""File with a line for every iteration."""


def report_folder(run: Run) -> ReportFolder | None:
    """Return the folder, on the first rank of the job."""
    path = Path(run.args.epp_report_dir)
    return ReportFolder(path, run.run_id, run.args.epp_trace or ()) if dist.get_rank() == 0 else None


class ReportFolder(RunFeature):
    """Folder of the first rank's reports: a line for every iteration, and plan, times and trace of the `traced` ones.

    It is made for the first file. What cannot be written is logged once and left out: a full disk or memory must not end a
    training. `run` identifies the run in lines.
    """

    def __init__(self, path: Path, run: str, traced: Sequence[int] = ()) -> None:
        self.path, self._run, self._traced = path, run, traced
        self._told: set[str] = set()

    def report(self, line: dict[str, Any], plan: Plan | None, measured: Measured | None) -> None:
        """Append the iteration's line, and write its plan, times and trace if they are asked for."""
        iteration = line["iteration"]
        with self._going_on("the folder"):
            self.path.mkdir(parents=True, exist_ok=True)
        if plan is not None and measured is not None and iteration in self._traced:
            number = f"-{iteration}" if len(self._traced) > 1 else ""
            with self._going_on("plan, times and trace"):
                save(plan, self.path / f"plan{number}.json")
                measured.save(self.path / f"measured{number}.json")
                save_trace(plan, self.path / f"trace{number}.json", measured)
                logger.info(
                    "wrote the plan, the times and a trace (ui.perfetto.dev) of iteration %d to %s", iteration, self.path
                )
                logger.info("megatron-epp show %s -o page.html makes a page of them", self.path)
        with self._going_on(LINES):
            append_line(self.path / LINES, json.dumps({"run": self._run, **line}))

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, PlanError, MemoryError) as error:
            if what not in self._told:
                self._told.add(what)
                if isinstance(error, MemoryError):
                    said = f"{self.path}: no memory left"
                else:
                    said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
                logger.warning("a report cannot be written (%s); training goes on without it", said)
