"""Planners of Megatron's own schedules and of other baselines, which a training by the default planner does not import."""

from __future__ import annotations

from megatron_epp.planner.baselines.seq1f1b import seq1f1b
from megatron_epp.planner.baselines.whole import baseline, packed_1f1b, padded_1f1b
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.registry import PlannerEntry

PLANNERS = {
    "1f1b": PlannerEntry(
        baseline(elastic_1f1b),
        "1F1B of whole sequences in the order of the batch, recompute as the cap requires",
        has_own_size=True,
        keeps_groups=True,
    ),
    "1f1b-padded": PlannerEntry(
        padded_1f1b, "1F1B, a sequence per microbatch, padded to the context", "Megatron-LM", keeps_groups=True
    ),
    "1f1b-packed": PlannerEntry(
        packed_1f1b,
        "1F1B, interleaved or not, whole sequences packed up to the context",
        "Megatron-LM",
        keeps_groups=True,
        interleaves=True,
    ),
    "seq1f1b": PlannerEntry(
        seq1f1b, "1F1B over slices of one size, uniform recompute", "2406.03488", has_own_size=True, keeps_groups=True
    ),
}
"""By their names in `Options.planner`.

A new order of whole sequences is a function (see `Schedule`) and an entry, `baseline(it)`. A planner that cuts its own chunks
is a function too: docs/your-own-schedule.md.
"""
