"""What `--epp` puts in the place of Megatron's own: layer spec, data and schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.models.gpt import default_layer_spec

from megatron_epp.mcore import session as sessions
from megatron_epp.mcore.baseline import baseline_schedule
from megatron_epp.mcore.documents import build_document_iterators
from megatron_epp.mcore.layer_spec import relayed_spec_provider
from megatron_epp.mcore.linear import split_weight_gradients
from megatron_epp.mcore.model_chunks import place
from megatron_epp.mcore.placement import Placement
from megatron_epp.mcore.rotary import PositionedRotary
from megatron_epp.mcore.schedule import forward_backward_elastic
from megatron_epp.schedule import EppError


def adopt_model(cfg_container: Any, args: argparse.Namespace) -> None:
    """Have the model built with the relay's attention and with rotary angles by position.

    Args:
        cfg_container: what the entry script passes to `pretrain`; its model config is changed in place.
        args: Megatron's arguments.

    Raises:
        EppError: the script builds its model in another way.
    """
    config = getattr(cfg_container, "model", None)
    if config is None or not hasattr(config, "pre_wrap_hooks"):
        raise EppError("--epp needs the model as a config in pretrain()'s first argument; a model_provider function is in use")
    if not hasattr(config, "transformer_layer_spec"):
        raise EppError(f"--epp trains GPT models so far; the script asks for a {type(config).__name__.removesuffix('Config')}")
    place(config, Placement.of(args))
    if args.epp_schedule == "stock":
        return
    config.transformer_layer_spec = relayed_spec_provider(config.transformer_layer_spec, default_layer_spec)
    config.pre_wrap_hooks.append(_position_rotary)
    if args.epp_split_weight_gradient:
        config.pre_wrap_hooks.append(split_weight_gradients)


def _position_rotary(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    for model in models:
        rotary = getattr(model, "rotary_pos_emb", None)
        if rotary is not None:
            shard, num_shards = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
            model.rotary_pos_emb = PositionedRotary(rotary, shard, num_shards)
    return models


def provide_documents(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Iterators of global batches for train, validation and test, in the place of Megatron's datasets."""
    if vp_stage:  # a rank's chunks run from one batch, which the iterator of the first one gives
        return None, None, None
    args = get_args()
    session = sessions.start(args)
    elastic = args.epp_schedule == "elastic"
    return build_document_iterators(
        args,
        session.plan_source(forward_only=False) if elastic else None,
        session.plan_source(forward_only=True) if elastic else None,
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_world_size(),
        num_samples,
    )


provide_documents.is_distributed = True  # type: ignore[attr-defined]  # every rank reads lengths, so every rank builds them


def schedule_for(args: argparse.Namespace, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The schedule function `--epp-schedule` names."""
    return forward_backward_elastic if args.epp_schedule == "elastic" else baseline_schedule(stock)
