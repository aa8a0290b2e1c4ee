"""The planning process of this rank, before there is a run that has it: formulas and layouts are asked there, too."""

from __future__ import annotations

from typing import Any

from megatron_epp.plan.problem import Options
from megatron_epp.port.planning import PlanningProcess

_process: PlanningProcess | None = None


def start(options: Options | None = None) -> PlanningProcess:
    """Return the process that will plan for this rank's next run, started now if it is not yet.

    Args:
        options: by which it will plan, which it prepares for; None if they are not known yet.
    """
    global _process
    if _process is None:
        _process = PlanningProcess()
    if options is not None:
        _process.prepare(options)
    return _process


def take() -> PlanningProcess:
    """Return the process for a run, which closes it."""
    global _process
    process, _process = start(), None
    return process


def ask(name: str, *args: Any) -> Any:
    """Call a function in the process (`PlanningProcess.call`)."""
    return start().call(name, *args)


def end() -> None:
    """End the process, unless a run has taken it."""
    if _process is not None:
        take().close()
