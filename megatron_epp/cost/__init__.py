"""Time and memory of every action: the cost model, and where its coefficients come from."""

from megatron_epp.cost.analytic import CPU, H100, ModelShape, Rates, analytic_costs
from megatron_epp.cost.protocol import Costs
from megatron_epp.cost.stage import Line, PipelineCosts, StageCosts
from megatron_epp.cost.work import ChunkWork, causal_pairs, work_of

__all__ = [
    "CPU",
    "H100",
    "ChunkWork",
    "Costs",
    "Line",
    "ModelShape",
    "PipelineCosts",
    "Rates",
    "StageCosts",
    "analytic_costs",
    "causal_pairs",
    "work_of",
]
