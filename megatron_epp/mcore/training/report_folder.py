"""Files of `--epp-report-dir`: a line for every iteration, and plan, times and trace of those asked for.

They are diagnostics, so that a full disk must not end a training.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_epp.plan import Plan, PlanError
from megatron_epp.plan.serialize import save
from megatron_epp.plan.writing import append_line
from megatron_epp.report.measured import Measured
from megatron_epp.report.trace import save_trace

logger = logging.getLogger(__name__)

LINES = "iterations.jsonl"


@dataclass(slots=True)
class ReportFolder:
    """Folder of the first rank's reports; what cannot be written is logged once and left out.

    Attributes:
        path: of the folder, made when the first file is written.
        run: identifier of the run, which its lines have.
        traced: iterations whose plan, times and trace are written.
    """

    path: Path
    run: str
    traced: Sequence[int] = ()
    _told: set[str] = field(default_factory=set)

    def write(self, iteration: int, line: Mapping[str, Any], plan: Plan | None, measured: Measured | None) -> None:
        """Append the iteration's line, and write its plan, times and trace if they are asked for."""
        with self._going_on("the folder"):
            self.path.mkdir(parents=True, exist_ok=True)
        if plan is not None and measured is not None and iteration in self.traced:
            number = f"-{iteration}" if len(self.traced) > 1 else ""
            with self._going_on("plan, times and trace"):
                save(plan, self.path / f"plan{number}.json")
                measured.save(self.path / f"measured{number}.json")
                save_trace(plan, self.path / f"trace{number}.json", measured)
                logger.info(
                    "wrote the plan, the times and a trace (ui.perfetto.dev) of iteration %d to %s", iteration, self.path
                )
                logger.info("megatron-epp show %s -o page.html makes a page of them", self.path)
        with self._going_on(LINES):
            append_line(self.path / LINES, json.dumps({"run": self.run, **line}))

    @contextlib.contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, PlanError) as error:
            if what not in self._told:
                self._told.add(what)
                said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
                logger.warning("a report cannot be written (%s); training goes on without it", said)
