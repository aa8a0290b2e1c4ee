"""Losses of preferences between two samples: of the policy (DPO), and of a reward model (Bradley and Terry)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_epp.losses.loss import Average, Rows, Scope, check_settings
from megatron_epp.losses.policy import REFERENCE
from megatron_epp.plan.errors import EppError

PREFERRED = "preferred"
"""Column: 1 for the sample of a group that is preferred, 0 for the other one."""


def _pair_problem(columns: Sequence[Mapping[str, np.ndarray]]) -> str:
    values = [sample[PREFERRED] for sample in columns]
    marks = [np.unique(column[np.isfinite(column)]).tolist() for column in values]  # finite where trained
    if sorted(marks) == [[0.0], [1.0]]:
        return ""
    return f"has {len(columns)} samples; a preference is of two, {PREFERRED} 1 for all tokens of one and 0 of the other"


def _margins(rows: Rows, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the preferred sample's score less the other's, and 1 where there is a group, else 0: ``[sequences]`` each."""
    signs = 2 * rows.means(rows.columns[PREFERRED]) - 1
    trained = (rows.over_groups(rows.trained) > 0).to(scores.dtype)
    return rows.over_groups(scores * signs * rows.trained), trained


@dataclass(frozen=True, slots=True)
class Preference:
    """Loss of the margin between two responses' log-probabilities: DPO (Rafailov et al. 2023), and variations of it.

    Attributes:
        beta: factor of the margin.
        label_smoothing: share of the preferences that are taken to be the wrong way round (conservative DPO).
        has_reference: log-probabilities count less those under the reference policy.
        by_length: log-probabilities of a response are averaged over its tokens, not summed; with `has_reference` False and a
            `target`, SimPO (Meng et al. 2024).
        target: margin, after `beta`, that is asked for.
        squared: the loss is the squared distance of the margin from ``1 / (2 * beta)`` (IPO, Azar et al. 2023).
    """

    name: ClassVar[str] = "preference loss"
    scope: ClassVar[Scope] = Scope.GROUP
    average: ClassVar[Average] = Average.GROUPS
    logged: ClassVar[tuple[str, ...]] = ("accuracy", "margin")
    group_problem: ClassVar[Callable[[Sequence[Mapping[str, np.ndarray]]], str]] = staticmethod(_pair_problem)

    beta: float = 0.1
    label_smoothing: float = 0.0
    has_reference: bool = True
    by_length: bool = False
    target: float = 0.0
    squared: bool = False

    def __post_init__(self) -> None:
        check_settings(self, above={"beta": 0})
        if not 0 <= self.label_smoothing < 0.5:
            raise EppError(f"label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5")

    @property
    def columns(self) -> tuple[str, ...]:
        return (PREFERRED, *[REFERENCE] * self.has_reference)

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = rows.logprobs - rows.columns[REFERENCE] if self.has_reference else rows.logprobs
        margins, groups = _margins(rows, rows.means(logprobs) if self.by_length else rows.sums(logprobs))
        scaled = self.beta * margins - self.target
        if self.squared:
            losses = (margins - 1 / (2 * self.beta)).square()
        else:
            losses = -(1 - self.label_smoothing) * logsigmoid(scaled) - self.label_smoothing * logsigmoid(-scaled)
        logged = {"accuracy": (groups * (margins > 0)).sum(), "margin": (groups * self.beta * margins).sum()}
        return (groups * losses).sum(), logged


@dataclass(frozen=True, slots=True)
class Reward:
    """Loss of a reward model on preferences (Bradley and Terry 1952): a sample's reward is the mean value of trained tokens.

    Usually the last token of each sample is the only one that is trained.

    Attributes:
        centre: factor of the squared sum of both rewards, which keeps them near 0 (Eisenstein et al. 2023); 0 for none.
    """

    name: ClassVar[str] = "reward loss"
    scope: ClassVar[Scope] = Scope.GROUP
    average: ClassVar[Average] = Average.GROUPS
    columns: ClassVar[tuple[str, ...]] = (PREFERRED,)
    logged: ClassVar[tuple[str, ...]] = ("accuracy", "margin")
    group_problem: ClassVar[Callable[[Sequence[Mapping[str, np.ndarray]]], str]] = staticmethod(_pair_problem)
    has_values: ClassVar[bool] = True

    centre: float = 0.0

    def __post_init__(self) -> None:
        check_settings(self, at_least={"centre": 0})

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.values is not None  # asked for
        rewards = rows.means(rows.values)
        margins, groups = _margins(rows, rewards)
        losses = -logsigmoid(margins)
        if self.centre:
            losses = losses + self.centre * rows.over_groups(rewards * rows.trained).square()
        return (groups * losses).sum(), {"accuracy": (groups * (margins > 0)).sum(), "margin": (groups * margins).sum()}
