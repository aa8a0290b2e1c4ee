"""The choice of what slices of latent attention hand on, latents or keys and values, by plans with either."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_epp.cost.model import Costs
from megatron_epp.plan import InfeasibleError
from megatron_epp.planner import Options, Problem, plan


@dataclass(frozen=True, slots=True)
class LatentsChoice:
    """The faster of the two by the sums of all batches' makespans, infinite where one does not fit; latents where no plan fits
    with either, since they take less memory.
    """

    relays_latents: bool
    latents_us: float
    kv_us: float

    def __str__(self) -> str:
        if math.isinf(self.latents_us) and math.isinf(self.kv_us):
            return "slices hand on latents, which take less memory; no plan fits with either"
        if math.isinf(self.latents_us) or math.isinf(self.kv_us):
            only = "latents" if self.relays_latents else "keys and values"
            return f"slices hand on {only}, with which alone plans fit"
        names = ("latents", "keys and values") if self.relays_latents else ("keys and values", "latents")
        ratio = max(self.latents_us, self.kv_us) / (min(self.latents_us, self.kv_us) or 1.0)
        return f"slices hand on {names[0]}; plans with {names[1]} take {ratio:.2f} times as long"


class LatentsTrial(NamedTuple):
    """Batches to plan, typical ones and one of a sequence as long as may come; the costs with one choice, and the options."""

    problems: Sequence[Problem]
    costs: Costs
    options: Options


def choose_latents(trial: Callable[[str], LatentsTrial]) -> LatentsChoice:
    """Plan with latents (``on``) and with keys and values (``off``); `trial` may raise `InfeasibleError` where nothing fits."""
    latents_us, kv_us = _total_us(trial, "on"), _total_us(trial, "off")
    return LatentsChoice(latents_us < kv_us or math.isinf(kv_us), latents_us, kv_us)


def _total_us(trial: Callable[[str], LatentsTrial], choice: str) -> float:
    try:
        problems, costs, options = trial(choice)
        return sum(plan(problem, costs, options).predicted.makespan_us for problem in problems)
    except InfeasibleError:
        return math.inf
