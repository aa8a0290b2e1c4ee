"""Figures of a plan that its texts and reports show."""

from __future__ import annotations

from megatron_epp.plan.plan import Plan
from megatron_epp.plan.units import format_bytes


def busy_us(plan: Plan, rank: int) -> float:
    """Compute time of a rank, recompute included."""
    return sum(step.time_us for step in plan.ranks[rank])


def bubble_fraction(plan: Plan, rank: int) -> float:
    """Share of the makespan in which the rank does not compute, 0 to 1."""
    makespan_us = plan.predicted.makespan_us
    return 1.0 - busy_us(plan, rank) / makespan_us if makespan_us else 0.0


def is_calibrated(plan: Plan) -> bool:
    """True if the plan's times come from measurements; False if from formulas over a model's shape and a device's rates."""
    return not plan.costs.startswith("analytic")


def recompute_share(plan: Plan) -> float:
    """Share of all ranks' compute time that is recompute, 0 to 1."""
    total_us = sum(busy_us(plan, rank) for rank in range(plan.num_ranks))
    return sum(map(sum, plan.recompute_us)) / total_us if total_us else 0.0


def copies_us(plan: Plan) -> float:
    """Time of all ranks' copies to and from the host in microseconds; they are overlapped with compute."""
    return sum(copy.time_us for copies in plan.copies for copy in copies)


def offload_share(plan: Plan) -> float:
    """Mean share of activations offloaded between forward and backward, over stages and chunks."""
    shares = [share for row in plan.offload_share for share in row]
    return sum(shares) / len(shares) if shares else 0.0


def kv_offload_bytes(plan: Plan) -> int:
    """Bytes of keys, values and their gradients that all ranks have in host memory (KV offload)."""
    return sum(entry.cache_bytes + entry.gradient_bytes for entry in plan.kv_offload)


def main_items(items: dict[str, int]) -> str:
    """Format the three largest items of a moment: ``12.00 GiB layers that keep everything, 3.31 GiB gradients, ...``."""
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in sorted(items.items(), key=lambda entry: -entry[1])[:3])
