"""Layers of a hybrid model's stages under a placement other than Megatron's looped one.

A hybrid model's pattern has a segment for every stage, and chunk c of rank r takes segment ``c * ranks + r``. Here the segments
are reordered so that each chunk takes its own stage's segment. Megatron would count the layers before a chunk in the new order
too, so their number is corrected where the chunk's stack of layers is built.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import mpu
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from megatron_epp.plan import EppError
from megatron_epp.plan.placement import Placement

_BETWEEN_STAGES = "|"


def placed_pattern(pattern: str, placement: Placement) -> str:
    """Reorder a pattern so that Megatron gives each chunk the segment of its stage in a placement.

    Raises:
        EppError: it does not have a segment for every stage.
    """
    segments = pattern.split(_BETWEEN_STAGES)
    if len(segments) != placement.num_stages:
        raise EppError(
            f"--epp-placement {placement.kind} needs a | before every stage but the first; --hybrid-layer-pattern {pattern} "
            f"has {len(segments)} stages of {placement.num_stages}"
        )
    stages = [placement.stages(rank)[chunk] for chunk in range(placement.num_chunks) for rank in range(placement.num_ranks)]
    return _BETWEEN_STAGES.join(segments[stage] for stage in stages)


def placed_stack(spec: ModuleSpec, pattern: str, placement: Placement, vp_stage: int | None) -> ModuleSpec:
    """Return the spec of a stack of layers with the right number of layers before a chunk of this rank."""
    stage = placement.stages(mpu.get_pipeline_model_parallel_rank())[vp_stage or 0]
    before = sum(map(len, pattern.split(_BETWEEN_STAGES)[:stage]))
    stack: Any = get_module(spec)

    class PlacedStack(stack):  # type: ignore[misc]
        """Stack of layers of a stage."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named | {"pp_layer_offset": before})  # the model has counted in the reordered pattern

    return dataclasses.replace(spec, module=PlacedStack)
