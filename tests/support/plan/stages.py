"""Stages of equal layers, in few words."""

from __future__ import annotations

from typing import Any

from megatron_epp.cost import BlockCosts, StageCosts
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.older import stage_of as blocks_of


def stage_of(*, is_last: bool = True, **costs: Any) -> StageCosts:
    """Return a stage by the names of version 1 of its file, with lines as they are."""
    made = blocks_of(costs, "the stage", is_last)
    blocks = [block | ({"kv": KVBytes(**block["kv"])} if "kv" in block else {}) for block in made.pop("blocks")]
    return StageCosts(tuple(BlockCosts(**block) for block in blocks), **made)
