"""Time and memory of every action: the cost model and the sources of its coefficients."""

from megatron_epp.cost.analytic import analytic_costs, analytic_profile
from megatron_epp.cost.blocks import BlockCosts, StageCosts
from megatron_epp.cost.device import on_device
from megatron_epp.cost.hardware import CPU, H100, H100_NODE, Rates
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.model_shape import ModelShape
from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.cost.profile import ModelPart, Profile
from megatron_epp.cost.work import ChunkWork, LinearTime, ModeCosts, causal_pairs, work_of

Costs = PipelineCosts
"""Costs as the planners know them."""

__all__ = [
    "CPU",
    "H100",
    "H100_NODE",
    "BlockCosts",
    "ChunkWork",
    "Costs",
    "LinearTime",
    "ModeCosts",
    "ModelShape",
    "OptimizerBytes",
    "ModelPart",
    "PipelineCosts",
    "Profile",
    "Rates",
    "StageCosts",
    "Static",
    "analytic_costs",
    "analytic_profile",
    "causal_pairs",
    "on_device",
    "work_of",
]
