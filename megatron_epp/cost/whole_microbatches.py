"""Costs of stages that run a caller's microbatches whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_epp.cost.blocks import BlockCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts


def of_whole_microbatches(costs: PipelineCosts) -> PipelineCosts:
    """Return costs whose layers recompute in full only."""
    return _changed(costs, lambda block: replace(block, recompute={}))


def without_cache(costs: PipelineCosts) -> PipelineCosts:
    """Return costs without cached keys: a model's own recompute, which is measured, may keep fewer bytes than these take."""
    return _changed(costs, lambda block: replace(block, kv=block.kv and replace(block.kv, bytes_per_token=0.0)))


def _changed(costs: PipelineCosts, change: Callable[[BlockCosts], BlockCosts]) -> PipelineCosts:
    rows = (([*map(change, stage.blocks)], [*map(change, stage.unlike)]) for stage in costs.stages)
    stages = zip(costs.stages, rows, strict=True)
    return replace(costs, stages=tuple(replace(stage, blocks=(*own,), unlike=(*unlike,)) for stage, (own, unlike) in stages))


def with_static(costs: PipelineCosts, static_of: Callable[[int, Static], Static]) -> PipelineCosts:
    """Change the bytes that stages hold throughout: `static_of` gets the number of a stage, and what it holds so far."""
    stages = (replace(stage, static=static_of(number, stage.static)) for number, stage in enumerate(costs.stages))
    return replace(costs, stages=tuple(stages))
