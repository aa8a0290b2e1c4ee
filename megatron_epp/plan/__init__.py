"""The plan language: chunks, actions, plans, and checks and simulations that need no training run."""

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check import Violation, check, report
from megatron_epp.plan.check.lockstep import check_matched
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.errors import EppError, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.graph import deps
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.plan import UNLIMITED_BYTES, Copy, Hosted, Messages, Plan, Prediction, Step, is_unlimited
from megatron_epp.plan.recompute import LEVELS, NO_RECOMPUTE, Recompute
from megatron_epp.plan.serialize import digest, from_json, load, save, to_json
from megatron_epp.plan.simulate import MemoryEvent, Message, Timeline, simulate
from megatron_epp.plan.text import from_grid, to_grid

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
    "Remedy",
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
