"""Baselines as training runs use them: one setting for all batches of a run, against a plan for every batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from megatron_epp.data import sequence_lengths
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from scripts.bench.planner.fixed import FIXED, fixed_run
from scripts.bench.planner.suite import DRAWS, OURS, SEQUENCES, Case, facts, figures

BATCHES = 4
LONGEST = {"wikipedia": sequence_lengths.WIKIPEDIA[-1][1], "equal": 8192}
"""Longest length of the whole corpus; other corpora have sequences beyond any context."""


class RunCase(Case):
    """A case of the suite as a run of several batches, on a pipeline with room for the longest sequence that may come."""

    @property
    def longest(self) -> int:
        return min(self.context, LONGEST.get(self.lengths_like, self.context))

    @cached_property
    def batches(self) -> list[Problem]:
        """The case's own batch, and others drawn as it was."""
        draw = DRAWS[self.lengths_like]
        count = SEQUENCES[self.lengths_like]
        more = [np.minimum(draw(count, self.seed + 1000 * i), self.longest).tolist() for i in range(1, BATCHES)]
        return [self.problem, *(replace(self.problem, lengths=tuple(lengths)) for lengths in more)]

    @cached_property
    def worst(self) -> Problem:
        """A batch with the longest sequence."""
        lengths = sorted(self.lengths)
        return replace(self.problem, lengths=(self.longest, *lengths[:-1]))


def run_row(case: RunCase) -> dict[str, Any]:
    """All figures of one run: total makespans over its batches."""
    row = facts(case) | {"longest": case.longest, "batches": BATCHES, "tokens": sum(sum(p.lengths) for p in case.batches)}
    options = Options(planner=OURS, context=case.context)
    try:
        plans = [plan(problem, case.costs, options) for problem in case.batches]
    except InfeasibleError:
        return row | {"refused": True, "rivals": {rival: {"makespan_us": None} for rival in FIXED}}
    recompute = [figures(plan)["recompute_share"] for plan in plans]
    row |= {
        "makespan_us": sum(plan.predicted.makespan_us for plan in plans),
        "recompute_share": sum(recompute) / len(recompute),
    }
    return row | {"rivals": {name: _theirs(case, name) for name in FIXED}}


def _theirs(case: RunCase, name: str) -> dict[str, Any]:
    """The best setting's total; its plans are built, so they have passed `check`."""
    options = Options(planner=name, context=case.context)
    try:
        run = fixed_run(case.batches, [case.worst], case.costs, options)
    except InfeasibleError:
        return {"makespan_us": None}
    plans = [
        build_plan(batch, case.costs, options, decisions) for batch, decisions in zip(case.batches, run.decisions, strict=True)
    ]
    setting = run.setting
    return {
        "makespan_us": sum(plan.predicted.makespan_us for plan in plans),
        "chunk_tokens": setting.chunk_tokens,
        "recompute": setting.recompute,
        "retain": setting.retain,
    }
