"""The error of a batch that fits no memory cap: the figures, and only settings whose change can help."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError, Remedy
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.units import format_gib
from megatron_epp.planner.validation import static_bytes


def infeasible(
    problem: Problem, costs: Costs, options: Options, least_cap: int, least_host: int = 0, planner: str = ""
) -> InfeasibleError:
    """Build the error of a batch that fits no cap. `least_cap` would suffice on each rank, and of host memory `least_host`,
    with the caps as they are; 0 where none would. Without `planner` the message names the options'.
    """
    planner = planner or options.planner
    cap, alternative = min(problem.cap_bytes), ""
    whose = "" if planner == "greedy" else f" of {planner!r}"
    if least_host:
        host = problem.host_cap_bytes
        available = f"{format_gib(host, least_host)} ({host} bytes)"
        needed = f"{format_gib(least_host, host)} ({least_host} bytes)"
        alternative = f", or {needed} in host memory, where it may have {available}"
    static = static_bytes(problem, costs)
    rank = max(range(problem.num_ranks), key=lambda rank: static[rank] - problem.cap_bytes[rank])
    is_static = static[rank] > problem.cap_bytes[rank]
    if is_static:
        weights = format_gib(static[rank], problem.cap_bytes[rank])
        alternative += f"; weights, gradients and optimizer alone are {weights} on rank {rank}, whatever the batch"
    return InfeasibleError(
        f"no plan{whose} fits a memory cap of {format_gib(cap, least_cap)} per rank ({cap} bytes): the least that would do "
        f"is {format_gib(least_cap, cap)} ({least_cap} bytes){alternative}.\n",
        Remedy("raise", "cap_bytes", least_cap),
        *([Remedy("raise", "host_cap_bytes", least_host)] if least_host else []),
        *([] if is_static else _for_the_batch(costs, options, planner)),
        *_for_the_model(problem, costs, static),
        least_cap_bytes=least_cap,
    )


def _for_the_batch(costs: Costs, options: Options, planner: str) -> Iterator[Remedy]:
    if planner != "greedy":
        yield Remedy("set", "planner", "greedy")
    elif options.slices is not None:
        yield Remedy("drop", "slices")
    if options.recompute != "auto":
        yield Remedy("set", "recompute", "auto")
    elif planner == "greedy" and not options.offload and math.isfinite(costs.host_us(1)):
        yield Remedy("add", "offload")
    yield Remedy("lower", "context")


def _for_the_model(problem: Problem, costs: Costs, static: list[int]) -> Iterator[Remedy]:
    if problem.num_stages < sum(costs.num_layers):
        yield Remedy("raise", "num_stages")
    yield Remedy("raise", "tensor_parallel")
    if problem.num_ranks > 1 and costs.vocabulary is None and max(static) == static[problem.placement[-1]]:
        yield Remedy("set", "vocab_parallel", "on")
