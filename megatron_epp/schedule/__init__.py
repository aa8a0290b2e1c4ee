"""The plan language: chunks, actions, plans, and what can be asked of them without running anything."""

from megatron_epp.schedule.action import Action, Op
from megatron_epp.schedule.chunk import Chunk, Segment
from megatron_epp.schedule.deps import deps
from megatron_epp.schedule.errors import EppError, InfeasibleError, PlanError
from megatron_epp.schedule.plan import Messages, Plan, Prediction, Step

__all__ = [
    "Action",
    "Chunk",
    "EppError",
    "InfeasibleError",
    "Messages",
    "Op",
    "Plan",
    "PlanError",
    "Prediction",
    "Segment",
    "Step",
    "deps",
]
