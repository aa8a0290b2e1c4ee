"""Exact plans of small chunk tables by integer programming.

This is the manner of OptPipe (arXiv 2510.05186).

Kept: the order of F, B and W of every microbatch and stage, and which activations are copied to host memory and when, are the
unknowns of one program, which minimises the makespan under the memory of every rank; a rank runs one action at a time, a link
one copy, and ranks that share a link take turns. It starts from a plan that fits (`refine.milp`: the greedy plan; there
AdaOffload), and stops with the best found in time and a bound.

Left out: OptPipe's refinement during training. Batches of unequal documents hardly ever come again.

Changed: chunks are of unequal length, and recompute by stage and chunk is an unknown as well. Intervals without overlap, for
CP-SAT (OR-tools), stand in place of order variables, large constants and cuts for a mixed-integer solver. Activations are
copied in shares of `choices.SHARES`, not whole or not at all. Times are from the cost model, not from warm-up iterations.
"""

from __future__ import annotations

from megatron_epp.contrib.exact.refine import milp
from megatron_epp.plan.planners import PlannerEntry

PLANNERS = {
    "milp": PlannerEntry(
        milp,
        "a solver around greedy: order, recompute, weight gradients and copies of small batches",
        "OptPipe, 2510.05186",
        begins_with_greedy=True,
        has_own_size=True,
        may_offload=True,
        lacks="the time that its solver takes for every batch",
    )
}
"""By their names in `Options.planner`."""
