"""The plan language: chunks, actions, plans, and checks and simulations that need no training run."""

from megatron_epp.plan import vocabulary_operations as vocabulary_operations  # defines operations
from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.check import Violation, check, report
from megatron_epp.plan.check.lockstep import check_lockstep
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.document import digest
from megatron_epp.plan.errors import EppError, InfeasibleError, PlanError, Remedy
from megatron_epp.plan.grid import from_grid, to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.plan import UNLIMITED_BYTES, Copy, KVOffload, Messages, Plan, Prediction, Step, is_unlimited
from megatron_epp.plan.recompute import NO_RECOMPUTE, RECOMPUTE_MODES, Recompute
from megatron_epp.plan.relations import deps
from megatron_epp.plan.simulate import MemoryEvent, Message, Timeline, simulate

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
    "is_unlimited",
    "lower",
    "report",
    "simulate",
    "to_grid",
]
