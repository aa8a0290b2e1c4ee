"""Construction of a model from Megatron's arguments, for releases whose training loop takes a function (0.17 and 0.18)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    """Build one model chunk as the command line describes it. The signature is that of Megatron's ``model_provider``."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    shared = {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "pre_process": pre_process,
        "post_process": post_process,
        "fp16_lm_cross_entropy": args.fp16_lm_cross_entropy,
        "parallel_output": True,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "position_embedding_type": args.position_embedding_type,
        "rotary_percent": args.rotary_percent,
        "rotary_base": args.rotary_base,
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "pg_collection": pg_collection,
        "vp_stage": vp_stage,
    }
    if args.hybrid_layer_pattern is not None:
        return _hybrid(args, shared)
    return GPTModel(
        transformer_layer_spec=_layer_spec(args, config, vp_stage),
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        **shared,
    )


def _hybrid(args: Any, shared: dict[str, Any]) -> torch.nn.Module:
    from megatron.core.models.mamba import MambaModel  # the name that both releases know

    if args.spec is not None:
        spec = import_module(args.spec)
    else:
        try:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
        except ImportError:  # before 0.18
            from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec as spec
    return MambaModel(mamba_stack_spec=spec, hybrid_layer_pattern=args.hybrid_layer_pattern, **shared)


def _layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        return import_module(args.spec)
    use_te = args.transformer_impl == "transformer_engine"
    if args.num_experts is not None:
        return get_gpt_decoder_block_spec(config, use_te, normalization=args.normalization, vp_stage=vp_stage)
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    return get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
