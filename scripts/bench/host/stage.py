"""Counts of what the host does for one action of a stage of two layers, at the widths of large models.

Tensors are fake: they have shapes and no memory, and `torch` dispatches the operations on them that it dispatches on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_submodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_epp.cost.library import load_flags
from megatron_epp.mcore.model.adopt import PositionedRotary
from megatron_epp.mcore.model.stage import ChunkInputs, MegatronStage
from megatron_epp.mcore.model.weight_gradients import split_weight_gradients
from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.segments import SegmentTable, SliceView
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.context import ChunkContext
from scripts.bench.alone_rank import one_rank
from scripts.bench.host import engine
from scripts.bench.host.worker import Counted

MODELS = "llama3-8b", "mixtral-8x7b"
NUM_LAYERS, TOKENS = 2, 4096
_SLICE, _PACKED = 1, 5
_CHUNKS = {
    _SLICE: Chunk((Segment(0, TOKENS, 2 * TOKENS),)),
    _PACKED: Chunk(tuple(Segment(number, 0, size) for number, size in enumerate((1024, 1024, 1024, 512, 512)))),
}
"""By their number of segments: the last of two slices of a sequence, and whole sequences."""


def write(path: Path) -> None:
    """Write the counts of the models' stages to a file, a line of JSON for each action."""
    with path.open("w", encoding="utf-8") as file:
        for model in MODELS:
            for op, segments, counted in count(model):
                of_engine = sum(number for name, number in counted.names.items() if name in engine.OPERATIONS)
                line = {"op": op, "segments": segments, "stage": model, "of_engine": of_engine, **counted.figures()}
                file.write(json.dumps(line) + "\n")


def count(model: str) -> Iterator[tuple[str, int, Counted]]:
    """Count every action of a middle stage.

    Yields:
        the operation (``B`` with the weight gradient, ``B-W`` without it), the segments of the chunk, and the counts.
    """
    with one_rank(), engine.in_place(), FakeTensorMode(allow_non_fake_inputs=True):
        for splits in (False, True):
            stage = _stage(load_flags(model), splits)
            for segments, chunk in _CHUNKS.items():
                _actions(stage, chunk, splits)  # the first builds tables of angles
                for op, counted in _actions(stage, chunk, splits).items():
                    if splits == (op in ("B-W", "W")):
                        yield op, segments, counted


def _actions(stage: MegatronStage, chunk: Chunk, splits: bool) -> dict[str, Counted]:
    """Run a chunk and count its actions, each by itself.

    Args:
        splits: keep the weight gradients for an action of their own.
    """
    (sequence, start, end), *others = chunk.segments
    view = None if others else SliceView(sequence, start, end, end, end)
    if view is not None:
        _forward(stage, Chunk((Segment(sequence, 0, start),)), replace(view, start=0, end=start))
    context, output, forward = _forward(stage, chunk, view)
    grad = torch.empty_like(output)
    with Counted(_EVEN_SHARE) as backward:
        stage.backward(context, output, grad, keep_weights=splits)
    counted = {"F": forward, "B-W" if splits else "B": backward}
    if splits:
        with Counted(_EVEN_SHARE) as counted["W"]:
            stage.weight(context.chunk)
    if view is not None:
        for layer in range(1, NUM_LAYERS + 1):
            stage.kv_cache.release(layer, view)
    return counted


def _forward(stage: MegatronStage, chunk: Chunk, view: SliceView | None) -> tuple[ChunkContext, torch.Tensor, Counted]:
    stage.begin(lambda _: ChunkInputs())
    shape, dtype, device = stage.message(chunk.num_tokens)
    hidden = ReceiveLeaf().enter(torch.empty(shape, dtype=dtype, device=device))
    context = ChunkContext(0, SegmentTable.build(chunk, chunk.num_tokens), stage.kv_cache, view)
    with Counted(_EVEN_SHARE) as counted:
        output = stage.forward(context, hidden)
    return context, output, counted


def _stage(flags: dict[str, Any], splits: bool) -> MegatronStage:
    """Build a stage of two layers, without embedding and loss."""
    config = _config(flags)
    config.delay_wgrad_compute = splits
    parts = get_gpt_layer_with_transformer_engine_submodules(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    model = GPTModel(
        config,
        ModuleSpec(module=TransformerLayer, submodules=parts),
        vocab_size=flags["vocab_size"],
        max_sequence_length=2 * TOKENS,
        pre_process=False,
        post_process=False,
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = PositionedRotary(model.rotary_pos_emb)
    if splits:
        split_weight_gradients(model)
    for weight in model.parameters():  # as Megatron's data parallelism, which adds to its own buffer
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    return MegatronStage(model, config, is_first=False, is_last=False, tp_size=1)


def _config(flags: dict[str, Any]) -> TransformerConfig:
    """Return the config of a model whose flags are given, with all of Megatron's fused kernels."""
    experts: dict[str, Any] = {}
    if flags.get("num_experts"):
        experts = {
            "num_moe_experts": flags["num_experts"],
            "moe_router_topk": flags["moe_router_topk"],
            "moe_ffn_hidden_size": flags["moe_ffn_hidden_size"],
            "moe_token_dispatcher_type": flags["moe_token_dispatcher_type"],
            "moe_aux_loss_coeff": flags["moe_aux_loss_coeff"],
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
        }
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=flags["hidden_size"],
        ffn_hidden_size=flags["ffn_hidden_size"],
        num_attention_heads=flags["num_attention_heads"],
        num_query_groups=flags["num_query_groups"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        apply_rope_fusion=True,
        perform_initialization=False,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **experts,
    )


_EVEN_SHARE = 2 * TOKENS // 8
"""Number that a fake tensor stands for where Megatron reads one: the tokens of an expert."""
