"""Layers of a stage that begins or ends inside a layer: the half that the stage lacks is left out of the layer's spec.

As in Megatron's hybrid models, identities stand in its place. Names of weights and numbers of layers are those of whole layers,
so checkpoints do not depend on where layers are cut.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.core import mpu
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import _get_block_submodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_epp.plan import EppError
from megatron_epp.plan.layout import StageLayers

ATTENTION = (
    "input_layernorm",
    "self_attention",
    "self_attn_bda",
    "pre_cross_attn_layernorm",
    "cross_attention",
    "cross_attn_bda",
)
MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")
"""Parts of a layer's spec that make its attention and its MLP, each with its norm and its residual connection."""


def cut_spec(spec: Any, config: Any, vp_stage: int | None, layers: StageLayers) -> Any:
    """Return the spec of a stage's block with the halves that it has of its first and last layer, from the model's.

    Raises `EppError` if the spec is not of Megatron's transformer layers. The config's layout counts cut layers on both stages.
    """
    # Megatron's own expansion of a layer's or a block's spec to this stage's layers, which the constructor would do.
    block = _get_block_submodules(config, spec, vp_stage, mpu.get_pipeline_model_parallel_rank())
    specs = list(block.layer_specs or ())
    assert len(specs) == layers.num_modules
    if layers.begins_with_mlp:
        specs[0] = without(specs[0], ATTENTION)
    if layers.ends_with_attention:
        specs[-1] = without(specs[-1], MLP)
    return dataclasses.replace(block, layer_specs=specs)


def without(spec: ModuleSpec, parts: tuple[str, ...]) -> ModuleSpec:
    """Return a layer's spec with identities in the place of some parts. Raises `EppError` if the layer is not Megatron's."""
    submodules = spec.submodules
    if not isinstance(submodules, TransformerLayerSubmodules):
        raise EppError(
            f"--epp-layout cuts a layer of {type(submodules).__name__}, and only Megatron's TransformerLayer has halves: give "
            "whole layers"
        )
    bare = TransformerLayerSubmodules()
    own = dataclasses.replace(submodules, **{name: getattr(bare, name) for name in parts})
    return dataclasses.replace(spec, submodules=own)


def numbers(layers: StageLayers) -> list[int]:
    """Return each module's number among the layers that plans count, from 0, in the order in which modules run.

    Whole layers come first. An MLP at the start and an attention at the end recompute together as one more layer; one of them
    alone has a number that no plan recomputes.
    """
    whole = range(layers.num_whole)
    return [layers.num_whole] * layers.begins_with_mlp + [*whole] + [layers.num_whole] * layers.ends_with_attention
