"""Costs in which every stage is alike: F, B and W of a token take 1 us each, and what a forward keeps stays until its W."""

from __future__ import annotations

from megatron_epp.cost import Line, PipelineCosts, StageCosts


def unit_costs(num_stages: int, *, forward_us: float = 1.0, backward_us: float = 2.0, weight_us: float = 1.0) -> PipelineCosts:
    """Return costs without fixed times, messages, and bytes that recompute could save.

    Args:
        num_stages: of the pipeline, each of one layer.
        forward_us, backward_us: of a token, the weight gradient included.
        weight_us: of a token's weight gradient.
    """
    stage = StageCosts(
        num_layers=1,
        forward=Line(0.0, forward_us),
        backward=Line(0.0, backward_us),
        weight=Line(0.0, weight_us),
        layer_bytes_per_token=1.0,
        full_bytes_per_token=1.0,
        apart_bytes_per_token=1.0,
        apart_attended_bytes_per_token=1.0,
        attended_bytes_per_token=1.0,
        weight_bytes_per_token=1.0,
        recomputed_layer_bytes_per_token=1.0,
        kv_bytes_per_token=0.0,
    )
    return PipelineCosts("unit", (stage,) * num_stages, hidden_bytes_per_token=0.0)
