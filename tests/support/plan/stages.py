"""Stages of equal layers, in few words."""

from typing import Any

from megatron_epp.cost.blocks import HEAD, INPUT, LAYER, BlockCosts, StageCosts
from megatron_epp.cost.kv_costs import KVBytes
from megatron_epp.cost.memory import NO_STATIC, Static
from megatron_epp.cost.work import NO_TIME, LinearTime

THREE_LAYERS: dict[str, Any] = {"num_layers": 3, "layer_bytes_per_token": 100.0, "recomputed_layer_bytes_per_token": 8.0}
THREE_LAYERS |= {"kv_bytes_per_token": 16.0, "extra_bytes_per_token": 5.0, "head_bytes_per_token": 2.0}
"""Sizes of a stage with which one can count."""


def stage_of(
    *,
    num_layers: int,
    layer_bytes_per_token: float,
    recomputed_layer_bytes_per_token: float,
    kv_bytes_per_token: float,
    kv_gradient_bytes_per_token: float | None = None,
    kv_heads: int = 1,
    extra_forward: LinearTime = NO_TIME,
    extra_bytes_per_token: float = 0.0,
    head_bytes_per_token: float = 0.0,
    workspace_bytes: int = 0,
    static: Static = NO_STATIC,
    **of_layer: Any,
) -> StageCosts:
    """Return a stage with lines as they are: extra bytes are the input's and the head's, other extra costs the head's."""
    kv = KVBytes(kv_bytes_per_token, kv_gradient_bytes_per_token, heads=kv_heads)
    sizes = {"bytes_per_token": layer_bytes_per_token, "input_bytes_per_token": recomputed_layer_bytes_per_token}
    blocks = [
        BlockCosts(kind=INPUT, bytes_per_token=extra_bytes_per_token - head_bytes_per_token),
        BlockCosts(kind=LAYER, count=num_layers, kv=kv, **sizes, **of_layer),
    ]
    if head_bytes_per_token or workspace_bytes or extra_forward != NO_TIME:
        head = {"bytes_per_token": head_bytes_per_token, "workspace_bytes": workspace_bytes}
        blocks.append(BlockCosts(kind=HEAD, forward=extra_forward, **head))
    return StageCosts(tuple(blocks), static)
