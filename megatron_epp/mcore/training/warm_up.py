"""Warm-up of a training's attention, with the properties of its layers on this rank."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch

from megatron_epp.mcore.costs.shape import model_shape
from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.mcore.training.caps import offloads
from megatron_epp.runtime.attention.warm_up import Heads, KernelWarmUp


def warm_up(args: argparse.Namespace, stages: Iterable[MegatronStage], device: torch.device) -> KernelWarmUp | None:
    """Return the warm-up of attention in a rank's stages; None if none of them needs one.

    Args:
        device: on which they run.
    """
    shape = model_shape(args)
    kv_heads = shape.expanded_heads or shape.kv_heads_on_rank
    heads = {
        Heads(
            kv_heads * shape.queries_per_key,
            kv_heads,
            part.channels,
            part.config.params_dtype,
            device,
            part.scale,
            part.preference,
            part.value_channels,
            shape.relays_latents,
        ): None
        for stage in stages
        for part in stage.decoder.modules()
        if isinstance(part, RelayAttention)
    }
    kernel_warm_up = KernelWarmUp(tuple(heads), args.seq_length, args.epp_warm_up, offloads(args))
    return kernel_warm_up if kernel_warm_up.is_active else None
