"""Models and losses that may share prefixes: those for which a token in common is the same token in every sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_epp.data.batch import InputColumns, LossColumns
from megatron_epp.data.samples import columns_of
from megatron_epp.features.trees.batch_prefixes import borrowed_of
from megatron_epp.features.trees.obstacles import obstacle_of
from megatron_epp.losses import NextToken
from megatron_epp.mcore.iteration.sliced_run import SlicedRun
from megatron_epp.mcore.model.language_model import axes_of, language_model_of
from megatron_epp.runtime.links.objects import AgreedError, from_each_of_job


def obstacle(models: Sequence[Any], planner: str, asks: LossColumns, of_inputs: InputColumns) -> str:
    """Return why language models, this rank's chunks of one, run every sample by itself; empty if they may share prefixes."""
    reasons = {
        "inputs of a function": of_inputs.names is not None or of_inputs.axes > 1 or of_inputs.routing is not None,
        "values of every token": asks.has_values,
        f"planner {planner}": planner != "greedy",
    }
    of_model = obstacle_of(lambda name: getattr(models[0].config, name, None))
    return of_model or next((reason for reason, is_there in reasons.items() if is_there), "")


def share(run: SlicedRun) -> None:
    """Have sequences of a run that begin alike share what they have in common, if its model may. A collective call.

    Raises `AgreedError` if it may not, and was asked to.
    """
    models = [language_model_of(stage.model) for stage in run.stages.values()]
    of_inputs = InputColumns(None if run.own_inputs is None else run.own_inputs.names, max(map(axes_of, models)))
    own = obstacle(models, run.args.epp_planner, columns_of(run.loss or NextToken()), of_inputs)
    if not (reason := next(filter(None, from_each_of_job(own)), "")):
        run.find_prefixes = borrowed_of
    elif run.args.epp_share_prefixes == "on":
        raise AgreedError(f"{run.names.get('shares') or 'share_prefixes'} does not go with {reason}: leave it out")
