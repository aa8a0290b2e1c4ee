"""Megatron's own memory estimate from the flags of a model, for comparison with a plan's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from megatron.training import theoretical_memory_usage as megatrons

from megatron_epp.cost.library import shape_of
from megatron_epp.mcore import features
from megatron_epp.mcore.patches import fingerprints, patching

logger = logging.getLogger(__name__)


class _Flags(SimpleNamespace):
    """The arguments that Megatron's estimator reads; arguments that are not set are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def estimate(flags: dict[str, Any], stages: int, data_parallel: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Return Megatron's estimate in bytes for the first pipeline rank in its own schedule, padded to the longest sequence.

    `flags` are Megatron's of the model, with underscores. `data_parallel` is the number of replicas. The estimator shards the
    optimizer's state over these alone, and Megatron itself over context-parallel ranks too: it is told both.
    """
    if strange := patching.unknown(fingerprints.SHOWN):
        release, names = features.installed_version(), ", ".join(strange)
        logger.warning("megatron-core %s estimates memory in another way than the releases known here: %s", release, names)
    shape, tokens = shape_of(flags), max(lengths)
    tensor, context, expert = shape.tensor_parallel, shape.context_parallel, shape.expert_parallel
    args = _Flags(
        **flags
        | {
            "num_layers": shape.num_layers,
            "kv_channels": shape.kv_channels,
            "ffn_hidden_size": flags.get("ffn_hidden_size") or shape.ffn_hidden_size,
            "moe_ffn_hidden_size": shape.ffn_hidden_size,
            "moe_router_topk": shape.experts_per_token,
            "moe_layer_freq": [int(layer not in shape.dense_layers) for layer in range(shape.num_layers)],
            "padded_vocab_size": shape.vocab_size,
            "seq_length": -(-tokens // context),
            "micro_batch_size": 1,
            "pipeline_model_parallel_size": stages,
            "tensor_model_parallel_size": tensor,
            "expert_tensor_parallel_size": shape.ranks_of_an_expert,
            "expert_model_parallel_size": expert,
            "data_parallel_size": data_parallel * context,
            "world_size": stages * tensor * context * data_parallel,
            "use_distributed_optimizer": True,
            "virtual_pipeline_model_parallel_size": None,
        }
    )
    with_shared_tokens, without = megatrons.compute_activation_memory, megatrons.compute_activation_memory_without_sp
    activations = with_shared_tokens if shape.sequence_parallel else without  # as Megatron chooses
    return {
        "state_bytes": int(megatrons.compute_weight_and_optimizer_memory(args)),
        "activation_bytes": int(activations(args, len(lengths))),
        "microbatches": len(lengths),
        "tokens": tokens,
    }
