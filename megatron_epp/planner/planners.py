"""The default planner. Baselines are in `baselines.table`, and planners of papers in `contrib`, by the same registry."""

from __future__ import annotations

from megatron_epp.planner.registry import PlannerEntry
from megatron_epp.planner.result import greedy

PLANNERS = {
    "greedy": PlannerEntry(
        greedy,
        "the default: slices of equal time, packed short sequences, the best of several orders, recompute and copies",
        begins_with_greedy=True,
        has_own_size=True,
        may_offload=True,
        keeps_groups=True,
    ),
}
"""By their names in `Options.planner`."""
