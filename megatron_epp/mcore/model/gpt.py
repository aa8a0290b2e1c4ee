"""A GPT for Megatron's training loop: its datasets, its forward step, its model, and the call to `pretrain`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import argument_utils, arguments, get_args, get_timers, training
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_epp.mcore import releases
from megatron_epp.mcore.data.stream import build_gpt_datasets
from megatron_epp.mcore.model.losses import token_loss

Batch = dict[str, Any]
"""Tensors by name, ``[microbatch, sequence]``; None on stages that need no tokens."""


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build Megatron's GPT datasets (train, valid, test): documents concatenated and cut every `--seq-length` tokens."""
    return build_gpt_datasets(
        get_args(),
        num_samples,
        lambda: mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage),
    )


build_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank


def read_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Read one microbatch on this tensor-parallel rank; all values are None on stages that need no tokens."""
    args = get_args()
    tokens = (args.micro_batch_size, args.seq_length)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "tokens": (tokens, torch.int64),
        "labels": (tokens, torch.int64),
        "loss_mask": (tokens, torch.float32),
        "attention_mask": ((args.micro_batch_size, 1, args.seq_length, args.seq_length), torch.bool),
        "position_ids": (tokens, torch.int64),
    }
    batch: Batch = dict.fromkeys(layout)
    if not is_first_or_last_pipeline_stage(vp_stage):
        return batch
    if not args.create_attention_mask_in_dataloader:
        del layout["attention_mask"]
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        batch |= {name: loaded[name].cuda(non_blocking=True).to(dtype) for name, (_, dtype) in layout.items()}
    else:
        batch |= {name: torch.empty(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in layout.items()}
    if mpu.get_tensor_model_parallel_world_size() > 1:
        for name in layout:
            source, group = mpu.get_tensor_model_parallel_src_rank(), mpu.get_tensor_model_parallel_group()
            torch.distributed.broadcast(batch[name], source, group=group)
    if mpu.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return batch


def forward_step(data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one forward of this stage; Megatron calls the returned loss function on the last stage."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = read_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(token_loss, batch["loss_mask"])


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> torch.nn.Module:
    """Build a model chunk as the command line, or `config`, describes it, for releases that do not do it themselves (0.18)."""
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
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        stack = hybrid_stack_spec if args.spec is None else import_module(args.spec)
        return HybridModel(hybrid_stack_spec=stack, hybrid_layer_pattern=args.hybrid_layer_pattern, **shared)
    spec = _layer_spec(args, config, vp_stage)
    if args.mtp_num_layers:
        use_te = args.transformer_impl == "transformer_engine"
        shared["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=use_te, vp_stage=vp_stage)
    return GPTModel(
        transformer_layer_spec=spec,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        **shared,
    )


def _layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage)
    use_te = args.transformer_impl == "transformer_engine"
    if args.num_experts is not None:
        return get_gpt_decoder_block_spec(config, use_te, normalization=args.normalization, vp_stage=vp_stage)
    options = {"qk_layernorm": args.qk_layernorm, "multi_latent_attention": args.multi_latent_attention}
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(**options)
    return get_gpt_layer_local_spec(**options, normalization=args.normalization)


def pretrain() -> None:
    """Train the model that the command line describes, by `megatron.training.pretrain` as currently patched."""
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}  # as in Megatron's own script
    args = arguments.parse_and_validate_args(args_defaults=defaults)
    models: tuple[Any, ...] = ()
    builders: tuple[Any, ...] = (build_model,)  # 0.18 gets a function that builds the model
    if releases.pretrain_builds_model():
        is_hybrid = args.hybrid_layer_pattern is not None
        describe = argument_utils.hybrid_config_from_args if is_hybrid else argument_utils.gpt_config_from_args
        models, builders = (describe(args),), ()
    config = argument_utils.pretrain_cfg_container_from_args(args, *models)
    training.pretrain(config, build_datasets, *builders, ModelType.encoder_or_decoder, forward_step)
