"""The plan language: chunks, actions and plans. What proves, times, prints and saves plans is imported when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_epp.plan import vocabulary_operations as vocabulary_operations  # defines operations
from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.errors import EppError, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.plan import UNLIMITED_BYTES, Copy, KVOffload, Messages, Plan, Prediction, Step, is_unlimited
from megatron_epp.plan.recompute import NO_RECOMPUTE, RECOMPUTE_MODES, Recompute

if TYPE_CHECKING:
    from megatron_epp.plan.document import digest
    from megatron_epp.plan.grid import from_grid, to_grid
    from megatron_epp.plan.lowering import lower
    from megatron_epp.plan.proof import Violation, check, report
    from megatron_epp.plan.proof.lockstep import check_lockstep
    from megatron_epp.plan.relations import deps
    from megatron_epp.plan.serialize import from_json, load, save, to_json
    from megatron_epp.plan.simulation import MemoryEvent, Message, Timeline, simulate

_LATER = {
    "document": ("digest",),
    "grid": ("from_grid", "to_grid"),
    "lowering": ("lower",),
    "proof": ("Violation", "check", "report"),
    "proof.lockstep": ("check_lockstep",),
    "relations": ("deps",),
    "serialize": ("from_json", "load", "save", "to_json"),
    "simulation": ("MemoryEvent", "Message", "Timeline", "simulate"),
}
"""Names of modules that a training rank does not import."""

__all__ = [
    "RECOMPUTE_MODES",
    "NO_RECOMPUTE",
    "UNLIMITED_BYTES",
    "Action",
    "Chunk",
    "Copy",
    "EppError",
    "KVOffload",
    "InfeasibleError",
    "MemoryEvent",
    "Message",
    "Messages",
    "Op",
    "Plan",
    "PlanError",
    "Prediction",
    "Recompute",
    "Remedy",
    "Segment",
    "Step",
    "Timeline",
    "Violation",
    "check",
    "check_lockstep",
    "deps",
    "digest",
    "from_grid",
    "from_json",
    "is_unlimited",
    "load",
    "lower",
    "report",
    "save",
    "simulate",
    "to_grid",
    "to_json",
]


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
