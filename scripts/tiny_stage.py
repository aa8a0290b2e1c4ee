"""A rank's stage of a small GPT of Megatron's in fp32, for loops of their own. Megatron's parallel state is set up."""

from __future__ import annotations

from typing import Any

import torch


def config_of(num_layers: int, hidden_size: int, num_attention_heads: int, **more: Any) -> Any:
    """Return the configuration of a model without dropout, which takes microbatches of any length."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # which Megatron asks for where lengths vary, experts or not
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **more,
    )
    config.batch_p2p_comm = False
    return config


def stage_of(config: Any, spec: Any, vocabulary: int, longest: int, **more: Any) -> Any:
    """Build the stage, with the embedding on the first rank and the output layer on the last."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    ends = {"pre_process": parallel_state.is_pipeline_first_stage(), "post_process": parallel_state.is_pipeline_last_stage()}
    return GPTModel(config, spec, vocabulary, longest, **ends, **more)
