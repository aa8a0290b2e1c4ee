"""Loss of the value model of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_epp.losses.loss import Average, Rows, Scope, check_settings

OLD, RETURNS = "old_values", "returns"
"""Columns: the values that the model gave when the samples were drawn, and what they are to come to."""


@dataclass(frozen=True, slots=True)
class ClippedValue:
    """Squared error of every token's value, clipped around the old one: the larger of both, halved.

    As in OpenAI's baselines (Dhariwal et al. 2017, ``ppo2``), TRL and verl (`compute_value_loss`).

    Attributes:
        clip: a value counts between the old one less `clip` and the old one plus `clip`; None for no such limit.
        average: of the batch.
    """

    name: ClassVar[str] = "value loss"
    scope: ClassVar[Scope] = Scope.TOKEN
    columns: ClassVar[tuple[str, ...]] = (OLD, RETURNS)
    logged: ClassVar[tuple[str, ...]] = ("clipped share",)
    has_values: ClassVar[bool] = True

    clip: float | None = 0.2
    average: Average = Average.TOKENS

    def __post_init__(self) -> None:
        check_settings(self, at_least={"clip": 0})

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.values is not None  # which the loss asks for
        old, returns = rows.columns[OLD], rows.columns[RETURNS]
        free = clipped = (rows.values - returns).square()
        if self.clip is not None:
            clipped = (rows.values.clamp(old - self.clip, old + self.clip) - returns).square()
        loss = (rows.weights * torch.maximum(free, clipped)).sum() / 2
        return loss, {"clipped share": (rows.weights * (clipped > free)).sum()}
