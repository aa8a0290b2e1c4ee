"""Megatron's rerun machine: iterations that run again must run alike, and results are compared by microbatch."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunState

from megatron_epp.plan.attributes import having

_MOST_CALLS = 1000
"""Most results with one message that a microbatch may have validated: the distance between two microbatches' numbers."""


def is_replay() -> bool:
    """Return True if the iteration runs again to compare results; Megatron's iterators then replay their items."""
    machine = _machine()
    return machine is not None and machine.state not in (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


def numbered_by(index: int) -> AbstractContextManager[None]:
    """Number the results that are validated in the body by microbatch `index`: Megatron's machine knows a result by its number
    in the iteration, and after a restart the order of microbatches may be another.
    """
    machine = _machine()
    if machine is None:
        return nullcontext()
    # Megatron counts results per message since the beginning of the iteration; here each microbatch has a range of numbers.
    return having(machine, validation_counts=defaultdict(lambda: index * _MOST_CALLS))


def _machine() -> Any:
    """Return Megatron's machine; None where nothing has made one, which a call of its own function would do."""
    return rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
