"""The plan language: chunks, actions, plans, and what can be asked of them without running anything."""

from megatron_epp.schedule.action import Action, Op
from megatron_epp.schedule.check import Violation, check, report
from megatron_epp.schedule.check_matched import check_matched
from megatron_epp.schedule.chunk import Chunk, Segment
from megatron_epp.schedule.deps import deps
from megatron_epp.schedule.errors import EppError, InfeasibleError, PlanError
from megatron_epp.schedule.lowering import lower
from megatron_epp.schedule.plan import UNLIMITED_BYTES, Copy, Hosted, Messages, Plan, Prediction, Step, is_unlimited
from megatron_epp.schedule.recompute import LEVELS, NO_RECOMPUTE, Recompute
from megatron_epp.schedule.serialize import digest, from_json, load, save, to_json
from megatron_epp.schedule.simulate import MemoryEvent, Message, Timeline, simulate
from megatron_epp.schedule.text import from_grid, to_grid

__all__ = [
    "LEVELS",
    "NO_RECOMPUTE",
    "UNLIMITED_BYTES",
    "Action",
    "Chunk",
    "Copy",
    "EppError",
    "Hosted",
    "InfeasibleError",
    "MemoryEvent",
    "Message",
    "Messages",
    "Op",
    "Plan",
    "PlanError",
    "Prediction",
    "Recompute",
    "Segment",
    "Step",
    "Timeline",
    "Violation",
    "check",
    "check_matched",
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
