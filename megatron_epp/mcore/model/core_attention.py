"""Core attention for Megatron layers, which layer specs use instead of the stock one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_epp.plan import EppError
from megatron_epp.runtime.attention import context_parallel
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.context import ChunkContext


def is_causal(mask: AttnMaskType | None) -> bool:
    """Return True where a layer's attention asks for no other mask than that of earlier tokens of its sequence."""
    return mask in (None, AttnMaskType.causal, AttnMaskType.padding_causal)


RELAY = "relay"
"""Attribute of a model's own core attention with the `RelayAttention` that runs in its place."""


def relay_of(module: torch.nn.Module) -> RelayAttention | None:
    """Return our attention that a module is, or that runs in its place; None for other modules."""
    return module if isinstance(module, RelayAttention) else vars(module).get(RELAY)


class ChunkParams(PackedSeqParams):
    """Packed-sequence parameters that carry a chunk's context through Megatron's layers.

    Megatron passes them untouched to core attention, and again when a layer is recomputed. The format stays "sbhd": the
    branches for "thd" are Megatron's own variable-length path, which supports no prefix.
    """

    def __init__(self, context: ChunkContext, ahead: Any = None) -> None:
        super().__init__(qkv_format="sbhd", max_seqlen_q=context.table.max_query, max_seqlen_kv=context.table.max_key)
        self.context = context
        self.ahead = ahead  # `predictions.ChunkPredictions` on a stage with multi-token prediction, else None


class RelayAttention(torch.nn.Module):
    """Causal attention over the segments of a chunk, with earlier slices' keys and values from the KV cache.

    Replaces Megatron's and Transformer Engine's attention, with their names of parameters. Under context parallelism heads are
    exchanged for tokens (`runtime.attention.context_parallel`), whatever ``cp_comm_type`` says.

    The cache's `number` is unique in the model chunk (`adopt.number_attentions`), unlike Megatron's numbers of layers, which
    begin again in multi-token prediction. A layer that runs at all of its depths has numbers `stride` apart. `attend` is
    `chunk_attention`, or takes what a kind of layers hands on instead of keys and values.
    """

    attend: Callable[..., Tensor] = staticmethod(chunk_attention)

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        softmax_offset: Tensor | None = None,  # of an attention whose place it takes
        **_: Any,  # what else a release gives its attention, as `cp_comm_type`
    ) -> None:
        super().__init__()
        if attention_type != "self":
            raise EppError(f"plans run self attention only; layer {layer_number} asks for {attention_type} attention")
        if not is_causal(attn_mask_type):
            raise EppError(f"plans run causal attention only; layer {layer_number} asks for {attn_mask_type}")
        self.config = config
        self.layer_number = self.number = layer_number
        self.stride = 0
        channels = k_channels or config.kv_channels
        assert channels is not None
        self.channels, self.value_channels = channels, v_channels or channels
        self.preference = config.attention_backend.name
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(channels)
        group = getattr(pg_collection, "cp", None) or mpu.get_context_parallel_group()
        self.context_parallel = context_parallel.of_group(group)
        self.tp_group = getattr(pg_collection, "tp", None) or mpu.get_tensor_model_parallel_group()
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window and config.window_size[0] >= 0 else None
        if self.window is not None:
            self.attend = resolve_name("megatron_epp.runtime.attention.windows:window_attention")
        if softmax_offset is None and config.softmax_type != "vanilla":
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            heads = config.num_attention_heads // self.tp_group.size()
            softmax_offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
            if config.softmax_type == "learnable":
                softmax_offset = torch.nn.Parameter(softmax_offset)
                # Transformer Engine's sinks begin at zero, and draw no random numbers.
                if config.perform_initialization and config.transformer_impl == "local":
                    config.init_method(softmax_offset)
        self.softmax_offset = softmax_offset

    @property
    def has_sinks(self) -> bool:
        return self.softmax_offset is not None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> Any:
        """Return the sinks as Megatron's checkpoints have them; nothing without."""
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(own, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> Tensor:
        """Return the attention output of a chunk's tokens on this rank, ``[tokens, 1, query_heads * value_channels]``.

        Arguments are ``[tokens, 1, heads, channels]``; latent attention leaves the second dimension out.
        """
        if not isinstance(packed_seq_params, ChunkParams):
            raise EppError("a model built with --epp was run outside its plan: call it through Megatron's training loop")
        context = packed_seq_params.context
        # A chunk is one row: the batch dimension is 1. Latent attention squeezes it out whenever it gets packed parameters.
        if query.dim() == 4 and query.shape[1] != 1:
            raise EppError(
                f"layer {self.layer_number}: attention got queries {list(query.shape)}, and a chunk is one row of tokens"
            )
        query, key, value = (x[:, 0] if x.dim() == 4 else x for x in (query, key, value))
        number = self.number + self.stride * (packed_seq_params.ahead.depth - 1) if self.stride else self.number
        options = context, number, self.scale, context.context_parallel or self.context_parallel, self.preference
        # Latents know neither: such a model is refused (`kinds.KINDS`).
        more = {"sinks": self.softmax_offset} if self.has_sinks else {}
        more |= {} if self.window is None else {"window": self.window}
        out = self.attend(query, (key, value), *options, **more)
        return out.reshape(out.shape[0], 1, -1)
