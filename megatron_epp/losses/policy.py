"""Losses of policy gradients with clipped ratios, over tokens (PPO, GRPO, DAPO, Dr. GRPO) and over sequences (GSPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_epp.losses.loss import Average, Rows, Scope
from megatron_epp.plan.errors import EppError

OLD, ADVANTAGES, REFERENCE, IMPORTANCE = "old_logprobs", "advantages", "reference_logprobs", "importance"
"""Columns: log-probabilities under the policy that drew the samples, advantages, log-probabilities under the reference policy,
and importance weights, for samples that another engine drew."""


def _k1(difference: Tensor) -> Tensor:
    return -difference


def _k2(difference: Tensor) -> Tensor:
    return difference.square() / 2


def _k3(difference: Tensor) -> Tensor:
    return difference.expm1() - difference


KL = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Estimates of the divergence from the reference policy, given its log-probability less the policy's (Schulman 2020,
"Approximating KL divergence")."""


@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """Clipped ratio of every token (Schulman et al. 2017), by which GRPO, DAPO and Dr. GRPO train too.

    GRPO (Shao et al. 2024) averages by `Average.SEQUENCE_MEANS` and has a divergence of weight `kl_weight`. DAPO (Yu et al.
    2025) averages by `Average.TOKENS` with ``clip_high=0.28`` and has no divergence. Dr. GRPO (Liu et al. 2025) averages by
    `Average.SEQUENCES` and divides by `constant`, the most tokens of a response.

    Attributes:
        clip_low, clip_high: the ratio counts between ``1 - clip_low`` and ``1 + clip_high``.
        clip_negative: for negative advantages the loss is at most this times the advantage (dual clip, Ye et al. 2020); None
            for no such limit.
        average: of the batch.
        kl: estimate of the divergence from the reference policy, one of `KL`; None for none.
        kl_weight: of the divergence.
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
        ratio = (rows.logprobs - rows.columns[OLD]).exp()
        free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses = torch.maximum(free, clipped)
        if self.clip_negative is not None:
            losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * self.clip_negative), losses)
        if self.has_importance:
            losses = losses * rows.columns[IMPORTANCE]
        logged = {"clipped share": (weights * (clipped > free)).sum()}
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

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        advantages = rows.means(rows.columns[ADVANTAGES])
        ratio = rows.means(rows.logprobs - rows.columns[OLD]).exp()
        free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        trained = rows.trained
        return (trained * torch.maximum(free, clipped)).sum(), {"clipped share": (trained * (clipped > free)).sum()}
