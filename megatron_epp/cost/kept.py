"""Learnt costs as data that is kept with checkpoints, with what they were learnt on: they hold for the same run only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import EppError
from megatron_epp.plan.codec import Codec, FileFormat
from megatron_epp.plan.reading import brief, brief_text

SCHEMA = "megatron-epp/learnt-costs"
FILE_NAME = "epp_learnt_costs.json"
"""File in a folder of checkpoints."""
WARM_UP = 1
"""Iterations that are not recorded: kernels are chosen and buffers allocated in them."""
RECORDED = 3
"""Iterations whose times costs are fitted to: as many as grains that the planner is asked for in them."""


@dataclass(frozen=True, slots=True)
class KeptCosts:
    """Learnt costs of a pipeline, and by name the model, layout and machine that they were learnt on, as numbers or text."""

    costs: PipelineCosts
    learnt_with: Mapping[str, Any]

    def obstacle(self, now: Mapping[str, Any]) -> str:
        """Return how a run differs from the one that learnt these costs; empty if it does not."""
        return ", ".join(
            f"{brief_text(name)} was {brief_text(before)} and is {brief_text(after)}"
            for name in sorted(self.learnt_with.keys() | now.keys())
            if (before := self.learnt_with.get(name, "not told")) != (after := now.get(name, "not told"))
        )


@dataclass(frozen=True, slots=True)
class _Pipelines:
    pipelines: tuple[KeptCosts, ...]


_FORMAT = FileFormat(
    name="learnt costs",
    schema=SCHEMA,
    version=1,
    codec=Codec({PipelineCosts: lambda body: PipelineCosts.from_json(json.dumps(body))}, ignores_unknown=True),
)


def to_state(pipelines: Iterable[KeptCosts]) -> dict[str, Any]:
    """Return learnt costs as a dictionary that JSON can write; `from_state` gives equal ones."""
    entries = [{"learnt_with": dict(learnt.learnt_with), "costs": json.loads(learnt.costs.to_json())} for learnt in pipelines]
    return _FORMAT.head | {"pipelines": entries}


def from_state(state: object) -> tuple[KeptCosts, ...]:
    """Read what `to_state` returned. Raises `EppError` if it is something else."""
    if not isinstance(state, dict):
        raise EppError(f"learnt costs are not a dictionary: {brief(state)}")
    _FORMAT.check(state, "learnt costs have ")
    try:
        return _FORMAT.codec.read(_Pipelines, state).pipelines
    except EppError as error:
        raise EppError(f"learnt costs are damaged: {error}") from None
