"""Refusals of a framework's features that only its model or its microbatches show, because no flag names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_epp.mcore.arguments.flag import GIVEN
from megatron_epp.plan import EppError, Remedy

_REPLAYS = ("router_replay", "routing_replay")
"""Attributes of a router that hold its queue of routes: of Megatron's and verl's, and of slime's."""


def refuse_router_replay(models: Sequence[torch.nn.Module], order: str) -> None:
    """Raise `EppError` for routers that take routes from a queue, unless microbatches run in their own order."""
    if order == GIVEN:
        return
    for name, module in (named for model in models for named in model.named_modules()):
        for replay in _REPLAYS:
            if getattr(module, replay, None) is not None:
                raise EppError(
                    f"{name}.{replay} hands out the routes of microbatches in the order in which these run: leave "
                    "router replay out",
                    Remedy("set", "order", GIVEN),
                )


def refuse_other_turns(config: Any, num_ranks: int, order: str) -> None:
    """Raise `EppError` where a rank's several model chunks would take turns in another order than in Megatron's schedule."""
    size = getattr(config, "microbatch_group_size_per_vp_stage", None)
    if order == GIVEN and size not in (None, num_ranks):
        raise EppError(
            f"order={GIVEN!r} runs {num_ranks} microbatches, one for each pipeline rank, on a model chunk before the next: set "
            f"microbatch_group_size_per_vp_stage to {num_ranks}; it is {size}"
        )


def refuse_group_sizes(item: Any) -> None:
    """Raise `EppError` for a microbatch that ranks of several replicas share (dynamic context parallelism).

    Only ``local_cp_size`` in the microbatch tells, the number of these ranks: verl leaves Megatron's own setting off.
    """
    for part in item if isinstance(item, (tuple, list)) else (item,):
        for holder in (part, _value(part, "packed_seq_params")):
            if _value(holder, "local_cp_size") is not None:
                raise EppError(
                    "microbatches are shared by replicas, as by dynamic context parallelism (they have local_cp_size): these "
                    "would wait for each other in their models, but each has a plan of its own; set dynamic_context_parallel "
                    "to False"
                )


def _value(holder: Any, name: str) -> Any:
    return holder.get(name, None) if isinstance(holder, Mapping) else getattr(holder, name, None)
