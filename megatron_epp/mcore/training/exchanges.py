"""Exchanges of Megatron's layers, at which the two actions of a step take turns."""

from __future__ import annotations

from typing import Any

import torch.distributed
from megatron.core import mpu
from megatron.core.tensor_parallel import mappings

from megatron_epp.runtime.turns import Collective, Exchanges, exchanges_of

_LAUNCHED = (
    *(Collective(torch.distributed, name) for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")),
    *(Collective(mappings, name) for name in ("dist_all_gather_func", "dist_reduce_scatter_func")),
)
"""Functions by which Megatron and Transformer Engine exchange activations.

The linear layers' own gather with sequence parallelism is not one of them: it fills a buffer that all layers share, which
another action must not fill before it has been used.
"""


def tensor_parallel_exchanges(config: Any) -> Exchanges | None:
    """Return the exchanges between the ranks that share the layers; None where two actions can only run one after the other.

    That is without tensor parallelism, where nothing is exchanged; with experts, whose layers keep what they have dispatched
    until they combine it; with dropout, which draws from one state for both; and with timers of level 2, of which one runs.

    Args:
        config: the model's `TransformerConfig`.
    """
    group = mpu.get_tensor_model_parallel_group()
    has_timers = config.timers is not None and getattr(config.timers, "_log_level", 0) >= 2
    if group.size() == 1 or config.num_moe_experts or config.hidden_dropout or config.attention_dropout or has_timers:
        return None
    return exchanges_of([one for one in _LAUNCHED if hasattr(one.module, one.name)], group)
