"""Time and memory of every action: the cost model and the sources of its coefficients."""

from megatron_epp.cost.blocks import BlockCosts, StageCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import ChunkWork, LinearTime, ModeCosts, causal_pairs, work_of

Costs = PipelineCosts
"""Costs as the planners know them."""

__all__ = [
    "BlockCosts",
    "ChunkWork",
    "Costs",
    "LinearTime",
    "ModeCosts",
    "PipelineCosts",
    "StageCosts",
    "Static",
    "causal_pairs",
    "work_of",
]
