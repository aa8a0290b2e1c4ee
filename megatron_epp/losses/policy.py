"""Losses of policy gradients by clipped ratios of tokens (PPO, GRPO, DAPO, Dr. GRPO) or sequences (GSPO); PPO's of values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_epp.losses.loss import Average, Rows, Scope, check_settings
from megatron_epp.plan.errors import EppError

OLD, ADVANTAGES, REFERENCE, IMPORTANCE = "old_logprobs", "advantages", "reference_logprobs", "importance"
"""Columns: log-probabilities under the policy that drew the samples, advantages, log-probabilities under the reference policy,
and importance weights, for samples that another engine drew."""
OLD_VALUES, RETURNS = "old_values", "returns"
"""Columns: the values that the model gave when the samples were drawn, and what they are to come to."""
KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: -difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": lambda difference: difference.expm1() - difference,
}
"""Estimates of the divergence from the reference policy, given its log-probability less the policy's (Schulman 2020,
"Approximating KL divergence")."""


def _clipped(
    exponents: Tensor, advantages: Tensor, low: float, high: float, most: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the losses of ratios, given their logarithms, and where clipping changes them: ``[n]`` each.

    A ratio counts from ``1 - low``, where the advantage is negative, and to ``1 + high``, where it is not; where it is
    negative, also to `most`.
    """
    negative = advantages < 0
    limits = torch.full_like(exponents, 1 + high).masked_fill(negative, math.inf if most is None else most)
    # A ratio far above its limit is not computed: it may overflow, and the gradient where it is clipped be 0 times infinity.
    ratios = torch.minimum(exponents, limits.log() + 1).exp()
    counted = ratios.clamp(torch.zeros_like(ratios).masked_fill(negative, 1 - low), limits)
    return -advantages * counted, torch.where(negative, ratios < 1 - low, (ratios > 1 + high) & (advantages > 0))


@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """Clipped ratio of every token (Schulman et al. 2017), by which GRPO, DAPO and Dr. GRPO train too.

    GRPO (Shao et al. 2024) averages by `Average.SEQUENCE_MEANS` and has a divergence of weight `kl_weight`. DAPO (Yu et al.
    2025) averages by `Average.TOKENS` with ``clip_high=0.28`` and has no divergence. Dr. GRPO (Liu et al. 2025) averages by
    `Average.SEQUENCES` and divides by `constant`, the most tokens of a response.

    The logged ``policy loss`` is the whole loss that trains: the ratio's part, plus `kl_weight` times ``divergence``,
    less `entropy_weight` times ``entropy``.

    Attributes:
        clip_low, clip_high: the ratio counts between ``1 - clip_low`` and ``1 + clip_high``.
        clip_negative: for negative advantages the loss is at most this times the advantage (dual clip, Ye et al. 2020); None
            for no such limit.
        average: divisor of the batch's sum.
        kl: estimate of the divergence from the reference policy, ``k1``, ``k2`` or ``k3``; None for none.
        kl_weight: factor of the divergence.
        has_importance: the loss of every token is multiplied by the column of importance weights.
        entropy_weight: the loss of every token is less this times the entropy of its distribution.
        temperature: at which samples were drawn; logits are divided by it.
        constant: the loss is divided by it.
    """

    name: ClassVar[str] = "policy loss"
    scope: ClassVar[Scope] = Scope.TOKEN

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_negative: float | None = None
    average: Average = Average.TOKENS
    kl: str | None = None
    kl_weight: float = 0.001
    has_importance: bool = False
    entropy_weight: float = 0.0
    temperature: float = 1.0
    constant: float = 1.0

    def __post_init__(self) -> None:
        if self.kl is not None and self.kl not in KL:
            raise EppError(f"kl is {self.kl!r}; it must be one of {', '.join(KL)}, or None")
        above = {"clip_negative": 1, "temperature": 0, "constant": 0}
        check_settings(self, at_least={"clip_low": 0, "clip_high": 0}, above=above)

    @property
    def columns(self) -> tuple[str, ...]:
        return (OLD, ADVANTAGES, *[REFERENCE] * (self.kl is not None), *[IMPORTANCE] * self.has_importance)

    @property
    def logged(self) -> tuple[str, ...]:
        return ("clipped share", *["divergence"] * (self.kl is not None), *["entropy"] * self.has_entropy)

    @property
    def has_entropy(self) -> bool:
        return self.entropy_weight != 0

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        advantages, weights = rows.columns[ADVANTAGES], rows.weights / self.constant
        exponents = rows.logprobs - rows.columns[OLD]
        losses, clipped = _clipped(exponents, advantages, self.clip_low, self.clip_high, self.clip_negative)
        if self.has_importance:
            losses = losses * rows.columns[IMPORTANCE]
        logged = {"clipped share": (weights * clipped).sum()}
        if self.kl is not None:
            divergence = KL[self.kl](rows.columns[REFERENCE] - rows.logprobs)
            losses = losses + self.kl_weight * divergence
            logged["divergence"] = (weights * divergence).sum()
        if rows.entropy is not None:
            losses = losses - self.entropy_weight * rows.entropy
            logged["entropy"] = (weights * rows.entropy).sum()
        return (weights * losses).sum(), logged


@dataclass(frozen=True, slots=True)
class SequenceRatio:
    """Clipped ratio of every sequence: the geometric mean of its tokens' ratios (GSPO, Zheng et al. 2025).

    Attributes:
        clip_low, clip_high: the ratio counts between ``1 - clip_low`` and ``1 + clip_high``.
        temperature: at which samples were drawn; logits are divided by it.
    """

    name: ClassVar[str] = "policy loss"
    scope: ClassVar[Scope] = Scope.SEQUENCE
    average: ClassVar[Average] = Average.SEQUENCES
    columns: ClassVar[tuple[str, ...]] = (OLD, ADVANTAGES)
    logged: ClassVar[tuple[str, ...]] = ("clipped share",)

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_settings(self, at_least={"clip_low": 0, "clip_high": 0}, above={"temperature": 0})

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        exponents = rows.means(rows.logprobs - rows.columns[OLD])
        losses, clipped = _clipped(exponents, rows.means(rows.columns[ADVANTAGES]), self.clip_low, self.clip_high)
        trained = rows.trained
        return (trained * losses).sum(), {"clipped share": (trained * clipped).sum()}


@dataclass(frozen=True, slots=True)
class ClippedValue:
    """Squared error of every token's value, clipped around the old one: the larger of both, halved.

    As in OpenAI's baselines (Dhariwal et al. 2017, ``ppo2``), TRL and verl (`compute_value_loss`).

    Attributes:
        clip: a value counts between the old one less `clip` and the old one plus `clip`; None for no such limit.
        average: divisor of the batch's sum.
    """

    name: ClassVar[str] = "value loss"
    scope: ClassVar[Scope] = Scope.TOKEN
    columns: ClassVar[tuple[str, ...]] = (OLD_VALUES, RETURNS)
    logged: ClassVar[tuple[str, ...]] = ("clipped share",)
    has_values: ClassVar[bool] = True

    clip: float | None = 0.2
    average: Average = Average.TOKENS

    def __post_init__(self) -> None:
        check_settings(self, at_least={"clip": 0})

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.values is not None  # which the loss asks for
        old, returns = rows.columns[OLD_VALUES], rows.columns[RETURNS]
        free = clipped = (rows.values - returns).square()
        if self.clip is not None:
            clipped = (rows.values.clamp(old - self.clip, old + self.clip) - returns).square()
        loss = (rows.weights * torch.maximum(free, clipped)).sum() / 2
        return loss, {"clipped share": (rows.weights * (clipped > free)).sum()}
