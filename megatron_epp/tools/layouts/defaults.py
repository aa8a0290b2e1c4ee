"""The defaults of a run where no flag says them: layout, output layer over the ranks, split weight gradients, logits at once.

A training, the commands and the benchmarks of public figures all choose by `settle`, so that what these say is what a run gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_epp.plan import InfeasibleError
from megatron_epp.plan.layout import Layout
from megatron_epp.planner import plan
from megatron_epp.port.run_facts import LayoutAnswer
from megatron_epp.tools.layouts import layout_choice
from megatron_epp.tools.layouts.layout_choice import LayoutChoice, Sample
from megatron_epp.tools.layouts.rank_work import CostsOf

type WholeLogits = tuple[CostsOf, int]
"""Costs of a run without blocks of its loss, and the tokens of its longest sequence, which must fit with them, too."""


def settle(
    sample: Sample,
    *,
    tensor_ranks: int,
    opens_weights: bool = True,
    layouts: Sequence[Layout] = (),
    logits: WholeLogits | None = None,
) -> tuple[LayoutChoice, LayoutAnswer]:
    """Choose the layout for a sample, then about split weight gradients (if open), then about the loss.

    Raises `InfeasibleError` if no layout fits the caps, and `EppError` for more ranks than layers. `layouts` are the only ones
    to choose from, the first that over which gains are; `logits` those of whole chunks at once.
    """
    choice = layout_choice.fastest(layouts, sample) if layouts else layout_choice.choose(sample)
    may_split = opens_weights and sample.num_ranks > 1
    split_gain = layout_choice.gain_of_split(choice, sample, tensor_ranks) if may_split else 0.0
    logits_gain = 0.0 if logits is None else _gain_of_logits(choice, split_gain, sample, logits)
    gain = 1 - (1 - choice.gain) * (1 - split_gain) * (1 - logits_gain)
    return choice, LayoutAnswer(choice.layout, split_gain > 0, logits_gain > 0, gain)


def _gain_of_logits(choice: LayoutChoice, split_gain: float, sample: Sample, logits: WholeLogits) -> float:
    """Return the share of time that logits at once save in a batch; 0 for too little, and where they do not fit.

    By formula 0.8 to 2.1 % for Qwen3 8B and 30B-A3B, Llama 3 8B and Moonlight: a loss by blocks has one product more.
    """
    costs_of, longest = logits
    costs, options = costs_of(choice.layout), layout_choice.steady(sample.options)
    options = replace(options, split_weight=options.split_weight or split_gain > 0)
    try:
        alone = replace(choice.batch, lengths=(longest,), trained=(), loss_groups=(), microbatches=(), spans=())
        plan(alone, costs, options)
        took_us = plan(choice.batch, costs, options).predicted.makespan_us
    except InfeasibleError:
        return 0.0
    saved = 1 - took_us / (choice.batch_us * (1 - split_gain))
    return saved if saved >= layout_choice.MIN_GAIN_SHARE else 0.0
