"""Models and losses that may share prefixes: those for which a token in common is the same token in every sample."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_epp.data.batch import InputColumns, LossColumns
from megatron_epp.data.samples import Samples
from megatron_epp.features.trees.prefixes import shared_prefixes
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.planners import begins_with_greedy


def obstacle(models: Sequence[Any], planner: str, asks: LossColumns, of_inputs: InputColumns) -> str:
    """Return why language models, this rank's chunks of one, run every sample by itself; empty if they may share prefixes."""
    config = models[0].config
    reasons = {
        "experts, whose losses and capacity count a token once for every sample": config.num_moe_experts,
        "dropout, which is another for every sample": config.hidden_dropout or config.attention_dropout,
        "FP8 or FP4, whose scales follow all tokens": config.fp8 or getattr(config, "fp4", None),
        "multi-token prediction": config.mtp_num_layers,
        "inputs of a function": of_inputs.names is not None or of_inputs.axes > 1 or of_inputs.routing is not None,
        "values of every token": asks.has_values,
        f"planner {planner}": not begins_with_greedy(planner),
    }
    return next((reason for reason, is_there in reasons.items() if is_there), "")


def share(samples: Samples) -> None:
    """Have samples that begin alike share what they have in common."""
    samples.borrowed = partial(_borrowed, samples)


def _borrowed(samples: Samples, indices: Sequence[int]) -> tuple[Borrowed, ...]:
    masks = [samples.trained(index, 1, len(samples[index].tokens)) for index in indices]
    first = [0 if mask is None else int(np.append(mask, 1).argmax()) for mask in masks]
    return shared_prefixes([samples[index].tokens for index in indices], first)
