"""Loading of the planner's compiled loops before the first batch is there."""

from __future__ import annotations

import functools
from dataclasses import replace

from megatron_epp import planner
from megatron_epp.cost import H100, ModelShape, analytic_costs
from megatron_epp.planner.problem import Options, Problem

SEVERAL = (Options(split_weight=True, steps=1), Options(offload=True))
"""Options that use all loops of the default planner."""


@functools.cache
def load_planner(options: tuple[Options, ...] = SEVERAL) -> None:
    """Plan a small batch with some options, without and with memory caps that matter, as a process does once.

    The compiled loops are read from disk, which takes longer than most plans. Missing ones are compiled, which takes 10 to 25 s
    of a core.

    Planners of other schedules and of users run as they are only where a batch is planned: they use some of these loops.

    Args:
        options: to plan with, by the default planner; of their local search one step is taken.
    """
    shape = ModelShape(
        num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=4, vocab_size=128
    )
    costs = analytic_costs(shape, H100, [2, 2], state_bytes_per_parameter=8.0)
    problem = Problem((70, 9, 33, 64, 12, 5), (0, 1), (planner.UNLIMITED_BYTES,) * 2)
    for asked in options:
        steps = int(asked.steps > 0 or asked.budget_ms is not None)
        settings = replace(asked, planner="greedy", steps=steps, budget_ms=None, chunk_tokens=None, slices=None, context=None)
        free = planner.plan(problem, costs, settings)
        cap_bytes = tuple(int(0.8 * peak) for peak in free.predicted.peak_bytes)
        planner.plan(replace(problem, cap_bytes=cap_bytes), costs, settings)
