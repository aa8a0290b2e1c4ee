"""Emulated runs of plans, with times of compute as timed waits, for benchmarks with more ranks than this machine has cores."""

from __future__ import annotations

from megatron_epp.contrib.demos.emulate import emulate
from megatron_epp.plan import Plan

TIMEOUT_S = 300.0


def emulated_us(plan: Plan, scale: float) -> float:
    """Emulate a plan, with `scale` seconds of waiting per planned second; return its makespan in the plan's time."""
    emulated = emulate(plan, scale, TIMEOUT_S)
    return max(end_us for events in emulated.events for _, _, end_us in events)
