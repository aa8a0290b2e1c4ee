"""Construction of a rank's model chunks as the stages that a placement assigns to it.

Megatron takes chunk c of rank r for stage ``c * ranks + r``, which is the looped placement. For any other, a layout gives the
layers of a chunk and their numbers, arguments of the model's constructor say which chunk has the embedding and the output
layer, and the weight that these two may share on one rank is tied here.

The segments of a hybrid model's pattern are reordered so that each chunk takes its own stage's. Megatron would count the layers
before a chunk in the new order too, so their number is corrected where the chunk's stack of layers is built.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import weakref
from typing import Any

from megatron.core import mpu
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_epp.mcore.arguments.layout import AHEAD, BETWEEN_STAGES, SEARCHED, asked_layout, hybrid_pattern, placement_of
from megatron_epp.plan.attributes import having
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement

_unsettled: list[weakref.ref[Any]] = []
"""Configs that were made before the run has found its layout."""


class PlacedLayout(PipelineParallelLayerLayout):
    """Layout of the layers of every chunk of every rank under a placement.

    `stages` has the names of every stage's layers: ``embedding``, ``decoder``, ``mtp``, ``loss``.
    """

    def __init__(self, stages: list[list[str]], placement: Placement) -> None:
        super().__init__(stages, placement.num_ranks)
        self._placement = placement
        self._stages = [[LayerType[name] for name in names] for names in stages]
        self.layout = [[self._stages[stage] for stage in placement.stages(rank)] for rank in range(placement.num_ranks)]

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """Return the number of layers of a type on all stages before a chunk's; None means chunk 0, and this rank."""
        rank = mpu.get_pipeline_model_parallel_rank() if pp_rank is None else pp_rank
        return sum(names.count(layer_type) for names in self._stages[: self._placement.stages(rank)[vp_stage or 0]])


def layout_of(args: argparse.Namespace, transformer: Any) -> Layout:
    """Return the layout of a GPT: `--epp-layout`'s, or the division of layers in its `transformer` config at the placement."""
    if (layout := asked_layout(args)) is not None:
        return layout
    placement = placement_of(args)
    return Layout(tuple(layers_of_stages(transformer, placement.num_ranks, placement.num_chunks)), placement)


def assign_stages(transformer: Any, args: argparse.Namespace) -> None:
    """Divide a model's layers by its layout, and clear the settings that it replaces, unless Megatron's own say the same."""
    setting = getattr(args, "epp_layout", None)
    if hybrid_pattern(args) or (placement_of(args).is_looped and setting is None):  # segments of the pattern say it
        return
    if setting in SEARCHED:
        _unsettled.append(weakref.ref(transformer))
    if isinstance(transformer.pipeline_model_parallel_layout, PlacedLayout):  # a copy of a config that has been through this
        return
    layout = layout_of(args, transformer)
    if layout.to_megatron() is None:
        _place(transformer, layout)


def settle_stages(args: argparse.Namespace) -> None:
    """Divide layers by the layout that the run has found, in configs that were made earlier with even layers."""
    layout = asked_layout(args)
    assert layout is not None
    while _unsettled:
        transformer = _unsettled.pop()()
        if transformer is None or layout.placement.num_stages == 1:
            continue
        transformer.virtual_pipeline_model_parallel_size = args.virtual_pipeline_model_parallel_size
        transformer.overlap_p2p_comm, transformer.batch_p2p_comm = args.overlap_p2p_comm, not args.overlap_p2p_comm
        text = layout.to_megatron(transformer.mtp_num_layers or 0)
        if text is None:
            _place(transformer, layout)
        else:
            transformer.pipeline_model_parallel_layout = PipelineParallelLayerLayout.from_str(text, layout.placement.num_ranks)


def check_stage(transformer: Any, args: argparse.Namespace, vp_stage: int | None) -> None:
    """Raise `EppError` if a config, such as a copy made too early, gives a chunk of this rank other layers than the layout."""
    layout = asked_layout(args)
    if layout is None or layout.placement.num_stages == 1:
        return
    stage = layout.placement.stages(mpu.get_pipeline_model_parallel_rank())[vp_stage or 0]
    planned = layout.layers[stage]
    configured = get_num_layers_to_build(transformer, vp_stage, mpu.get_pipeline_model_parallel_rank())
    if configured != planned:
        raise EppError(
            f"stage {stage} was configured with {configured} layers before the layout was found, which gives it {planned}: "
            f"start with --epp-layout {args.epp_layout}"
        )


def _place(transformer: Any, layout: Layout) -> None:
    stages = [["decoder"] * count for count in layout.layers]
    stages[0].insert(0, "embedding")
    stages[-1] += [*["mtp"] * (getattr(transformer, "mtp_num_layers", None) or 0), "loss"]
    transformer.pipeline_model_parallel_layout = PlacedLayout(stages, layout.placement)
    # The layout says it all, and Megatron lets it stand alone only.
    transformer.num_layers_in_first_pipeline_stage = transformer.num_layers_in_last_pipeline_stage = None
    transformer.account_for_embedding_in_pipeline_split = transformer.account_for_loss_in_pipeline_split = False


def layers_of_stages(transformer: Any, num_ranks: int, num_chunks: int) -> list[int]:
    """Return the number of layers of every stage as Megatron's flags divide them in a looped pipeline."""
    layout = transformer.pipeline_model_parallel_layout
    chunks_of_ranks = [(rank, chunk) for chunk in range(num_chunks) for rank in range(num_ranks)]
    if layout is not None:
        return [layout.layout[rank][chunk].count(LayerType.decoder) for rank, chunk in chunks_of_ranks]
    return [get_num_layers_to_build(transformer, chunk if num_chunks > 1 else None, rank) for rank, chunk in chunks_of_ranks]


def ends(args: argparse.Namespace, vp_stage: int | None) -> dict[str, bool]:
    """Return `pre_process` and `post_process` of a chunk of this rank: True for the model's first and its last stage."""
    placement = placement_of(args)
    own = placement.stages(mpu.get_pipeline_model_parallel_rank())[vp_stage or 0 :: placement.num_chunks]
    return {"pre_process": 0 in own, "post_process": placement.num_stages - 1 in own}


_first_stage: weakref.ref[Any] | None = None
"""The model chunk with the embedding, once it is built."""


def tie(model: Any, args: argparse.Namespace) -> None:
    """Replace the embedding's copy on a last stage, for a tied output layer or multi-token prediction, by the first's own.

    Megatron creates a copy wherever the two are different model chunks, which in its placement are on different ranks. To be
    called with every model chunk as soon as it is built.
    """
    global _first_stage
    predicts = bool(model.config.mtp_num_layers)
    if not (placement_of(args).ends_share_rank and (model.share_embeddings_and_output_weights or predicts)):
        return
    if model.pre_process:
        _first_stage = weakref.ref(model)
    if not model.post_process:
        return
    assert _first_stage is not None
    first: Any = _first_stage()
    first.embedding.word_embeddings.weight.zero_out_wgrad = True  # as where both ends are one chunk
    # A checkpoint has the weight once, under the embedding's name.
    model.tie_embeddings_and_output_weights_state_dict = lambda *_: None
    if predicts:
        del model.embedding
        vars(model)["embedding"] = first.embedding  # no submodule: the first chunk has its parameters
        model.sharded_state_dict = functools.partial(_without_embedding, model)
    if model.share_embeddings_and_output_weights:
        model.output_layer.weight = None  # its forward is given the shared weight
        model.shared_embedding_or_output_weight = first.shared_embedding_or_output_weight


def _without_embedding(model: Any, *rest: Any, **named: Any) -> Any:
    """Return the sharded state dict of a last stage that reads the first stage's embedding: Megatron's asks for a copy."""
    with having(model, mtp_process=False):
        return type(model).sharded_state_dict(model, *rest, **named)


def placed_pattern(pattern: str, placement: Placement) -> str:
    """Reorder a pattern so that Megatron gives each chunk the segment of its stage in a placement. Raises `EppError` if it does
    not have a segment for every stage, or has multi-token prediction.
    """
    if AHEAD in pattern:
        raise EppError(
            f"Megatron builds the multi-token prediction of --hybrid-layer-pattern {pattern} on its own last stage, which has "
            f"another rank with --epp-placement {placement.kind}: leave one of them out"
        )
    segments = pattern.split(BETWEEN_STAGES)
    if len(segments) != placement.num_stages:
        raise EppError(
            f"--epp-placement {placement.kind} needs a | before every stage but the first; --hybrid-layer-pattern {pattern} "
            f"has {len(segments)} stages of {placement.num_stages}"
        )
    stages = [placement.stages(rank)[chunk] for chunk in range(placement.num_chunks) for rank in range(placement.num_ranks)]
    return BETWEEN_STAGES.join(segments[stage] for stage in stages)


def placed_stack(spec: ModuleSpec, pattern: str, placement: Placement, vp_stage: int | None) -> ModuleSpec:
    """Return the spec of a stack of layers with the right number of layers before a chunk of this rank."""
    stage = placement.stages(mpu.get_pipeline_model_parallel_rank())[vp_stage or 0]
    before = sum(map(len, pattern.split(BETWEEN_STAGES)[:stage]))
    stack: Any = get_module(spec)

    class PlacedStack(stack):  # type: ignore[misc]
        """Stack of layers of a stage."""

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named | {"pp_layer_offset": before})  # the model has counted in the reordered pattern

    return dataclasses.replace(spec, module=PlacedStack)
