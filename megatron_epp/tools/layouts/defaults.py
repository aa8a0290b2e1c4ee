"""The defaults of a run where no flag says them: layout, output layer over the ranks, split weight gradients, logits at once.

A training, the commands and the benchmarks of public figures all choose by `settle`, so that what these say is what a run gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.layout import Layout
from megatron_epp.planner import plan
from megatron_epp.tools.layouts import layout_choice
from megatron_epp.tools.layouts.layout_choice import LayoutChoice, Sample
from megatron_epp.tools.layouts.rank_work import CostsOf


@dataclass(frozen=True, slots=True)
class Settled:
    choice: LayoutChoice  # the layout, which says whether the output layer is divided
    # Share of time that weight gradients as actions of their own save with the layout; 0 if they are not split
    split_gain: float = 0.0
    # Share that the logits of whole chunks at once save over blocks of tokens; 0 if there are blocks, if asked
    logits_gain: float = 0.0

    @property
    def layout(self) -> Layout:
        return self.choice.layout

    @property
    def splits_weight(self) -> bool:
        return self.split_gain > 0

    @property
    def has_whole_logits(self) -> bool:
        return self.logits_gain > 0

    @property
    def gain(self) -> float:
        """Share of time saved over even layers, with whole backwards."""
        return 1 - (1 - self.choice.gain) * (1 - self.split_gain) * (1 - self.logits_gain)


type WholeLogits = tuple[CostsOf, int]
"""Costs of a run without blocks of its loss, and the tokens of its longest sequence, which must fit with them, too."""


def settle(
    sample: Sample,
    *,
    tensor_ranks: int,
    opens_weights: bool = True,
    layouts: Sequence[Layout] = (),
    logits: WholeLogits | None = None,
) -> Settled:
    """Choose the layout for a sample, then about split weight gradients (if open), then about the loss.

    Raises `InfeasibleError` if no layout fits the caps, and `EppError` for more ranks than layers. `layouts` are the only ones
    to choose from, the first that over which gains are; `logits` those of whole chunks at once.
    """
    choice = layout_choice.fastest(layouts, sample) if layouts else layout_choice.choose(sample)
    opens_weights = opens_weights and sample.num_ranks > 1
    settled = Settled(choice, layout_choice.gain_of_split(choice, sample, tensor_ranks) if opens_weights else 0.0)
    return settled if logits is None else replace(settled, logits_gain=_gain_of_logits(settled, sample, logits))


def _gain_of_logits(settled: Settled, sample: Sample, logits: WholeLogits) -> float:
    """Return the share of time that logits at once save in a batch; 0 for too little, and where they do not fit.

    By formula 0.8 to 2.1 % for Qwen3 8B and 30B-A3B, Llama 3 8B and Moonlight: a loss by blocks has one product more.
    """
    costs_of, longest = logits
    batch, costs, options = settled.choice.batch, costs_of(settled.layout), layout_choice.steady(sample.options)
    options = replace(options, split_weight=options.split_weight or settled.splits_weight)
    try:
        alone = replace(batch, lengths=(longest,), trained=(), loss_groups=(), microbatches=(), spans=())
        plan(alone, costs, options)
        took_us = plan(batch, costs, options).predicted.makespan_us
    except InfeasibleError:
        return 0.0
    saved = 1 - took_us / (settled.choice.batch_us * (1 - settled.split_gain))
    return saved if saved >= layout_choice.MIN_GAIN_SHARE else 0.0
