"""Facts of a run that formulas ask for, as plain values, and what they answer before there is a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_epp.cost.optimizer import OptimizerBytes
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Options


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run by which formulas give costs."""

    flags: Mapping[str, Any]  # validated flags of Megatron and this package that have plain values
    optimizer: OptimizerBytes
    loss_block_tokens: int  # tokens of a block of the loss by the flags; 0 for the logits of a whole chunk at once
    kernel: str | None  # name of the kernel of attention; empty for one without published rates, None on a CPU

    def changed(self, **flags: Any) -> RunFacts:
        return replace(self, flags={**self.flags, **flags})


class AttentionSizes(NamedTuple):
    """Sizes of attention on a rank, as `ModelShape` has them."""

    heads_on_rank: int
    kv_heads_on_rank: int
    queries_per_key: int
    head_width: int
    value_head_width: int
    expanded_bytes_per_token: float
    expanded_heads: int
    bytes_per_value: int
    relays_latents: bool


class CostsFile(NamedTuple):
    """A file with costs, or the name of a shipped one, and the setting that names it, for errors."""

    name: str
    setting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """Input of the choice of a layout."""

    batches: tuple[tuple[int, ...], ...]  # lengths in one replica's share of typical batches
    first: Layout  # even layers, or those that flags ask for
    placements: tuple[Placement, ...]  # that are tried, the first one's first
    search: str  # how layers are found: "auto", "balanced", or empty for those of `first`
    cap_bytes: int
    token_multiple: int
    options: Options
    vocabulary: str  # "on", "off", or "auto" to try both
    opens_weights: bool = False  # weight gradients may be split off
    longest: int = 0  # tokens of the longest sequence, where the logits of whole chunks may be chosen; else 0


class LayoutAnswer(NamedTuple):
    """The choice of a layout, and the share of time that it saves over even layers with whole backwards."""

    layout: Layout
    splits_weights: bool = False
    has_whole_logits: bool = False
    gain: float = 0.0
