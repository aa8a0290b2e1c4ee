"""Hint, from the first logged batches of a run, to layers per stage with which ranks would wait less."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from megatron_epp.cost.balance import advice
from megatron_epp.mcore.arguments.layout import hybrid_pattern
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.plan import Chunk, Plan
from megatron_epp.plan.layout import layout_flag

if TYPE_CHECKING:
    from megatron_epp.cost.model import PipelineCosts
    from megatron_epp.mcore.iteration.base_run import Run

_BATCHES = 10
"""Number of logged iterations whose chunks are taken as typical of the run. Not measured."""


def layer_hint(run: Run) -> LayerHint | None:
    """Return the hint of a run whose layers are all alike, and which Megatron's flags give their number by stage."""
    is_alike = not hybrid_pattern(run.args) and getattr(run.args, "moe_layer_freq", 1) == 1
    return LayerHint(getattr(run.args, "mtp_num_layers", None) or 0) if is_alike and run.names is TRAINING else None


class LayerHint(RunFeature):
    """A hint, once, if other layers per stage, all equal, would have reduced waiting in the first iterations.

    Args:
        predictions: layers of multi-token prediction, which the last stage has besides.
    """

    def __init__(self, predictions: int) -> None:
        self._words = partial(layout_words, predictions)
        self._seen: list[tuple[Chunk, ...]] = []  # of every batch

    def hint(self, plan: Plan, costs: PipelineCosts) -> str:
        if len(self._seen) == _BATCHES:
            return ""
        self._seen.append(plan.chunks)
        if len(self._seen) < _BATCHES:
            return ""
        return advice(costs, plan.placement, [*chain.from_iterable(self._seen)], self._words) or ""


def layout_words(predictions: int, layers: Sequence[int]) -> str:
    """Format the flag that gives every stage its number of layers, and the last so many of multi-token prediction."""
    return f"--pipeline-model-parallel-layout '{layout_flag(layers, predictions)}'"
