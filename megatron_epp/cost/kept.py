"""Learnt costs as data that is kept with checkpoints, with what they were learnt on: they hold for the same run only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import EppError
from megatron_epp.plan.reading import shown, told

SCHEMA, VERSION = "megatron-epp/learnt-costs", 1
FILE_NAME = "epp_learnt_costs.json"
"""File in a folder of checkpoints."""


@dataclass(frozen=True, slots=True)
class KeptCosts:
    """Learnt costs of a pipeline.

    Attributes:
        costs: the costs.
        learnt_with: what they were learnt on: model, parallel layout and machine, by name; values are numbers or text.
    """

    costs: PipelineCosts
    learnt_with: Mapping[str, Any]

    def obstacle(self, now: Mapping[str, Any]) -> str:
        """Return how a run differs from the one that learnt these costs; empty if it does not."""
        names = sorted(self.learnt_with.keys() | now.keys())
        before = {name: self.learnt_with.get(name, "not told") for name in names}
        after = {name: now.get(name, "not told") for name in names}
        return ", ".join(
            f"{told(name)} was {told(before[name])} and is {told(after[name])}" for name in names if before[name] != after[name]
        )


def to_state(all_costs: Iterable[KeptCosts]) -> dict[str, Any]:
    """Return learnt costs as a dictionary that JSON can write; `from_state` gives equal ones."""
    pipelines = [{"learnt_with": dict(costs.learnt_with), "costs": json.loads(costs.costs.to_json())} for costs in all_costs]
    return {"schema": SCHEMA, "version": VERSION, "pipelines": pipelines}


def from_state(state: object) -> tuple[KeptCosts, ...]:
    """Read what `to_state` returned. Raises `EppError` if it is something else."""
    if not isinstance(state, dict):
        raise EppError(f"learnt costs are not a dictionary: {shown(state)}")
    if (form := (state.get("schema"), state.get("version"))) != (SCHEMA, VERSION):
        raise EppError(
            f"learnt costs have schema {shown(form[0])} version {shown(form[1])}, where this reads {SCHEMA!r} {VERSION}"
        )
    pipelines = state.get("pipelines")
    if not isinstance(pipelines, list) or not all(isinstance(pipeline, dict) for pipeline in pipelines):
        raise EppError("learnt costs have no list of pipelines")
    all_costs = []
    for pipeline in pipelines:
        learnt_with = pipeline.get("learnt_with")
        if not isinstance(learnt_with, dict):
            raise EppError("learnt costs do not say what they were learnt with")
        all_costs.append(KeptCosts(PipelineCosts.from_json(json.dumps(pipeline.get("costs"))), learnt_with))
    return tuple(all_costs)
