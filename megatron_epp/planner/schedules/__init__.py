"""The schedules and planners of others, as planners of ours: same costs, same caps, same plans."""

from __future__ import annotations

from collections.abc import Callable

from megatron_epp.cost import Costs
from megatron_epp.planner.schedules.chunkflow import chunkflow
from megatron_epp.planner.schedules.infinipipe.search import infinipipe
from megatron_epp.planner.schedules.seq1f1b import seq1f1b
from megatron_epp.planner.schedules.stock_1f1b import packed_1f1b, padded_1f1b
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.problem import Options, Problem

BASELINES: dict[str, Callable[[Problem, Costs, Options], Decisions]] = {
    "1f1b-padded": padded_1f1b,
    "1f1b-packed": packed_1f1b,
    "seq1f1b": seq1f1b,
    "chunkflow": chunkflow,
    "infinipipe": infinipipe,
}
"""Planners by their names in `Options.planner`."""
