"""Memory of the gradients that attention's backward makes for a slice's prefix, in addition to those of the chunk's tokens."""

from __future__ import annotations

import numpy as np

from megatron_epp.cost.line import TimeColumn
from megatron_epp.cost.stage import StageCosts
from megatron_epp.cost.work import ChunkWork, IntColumn
from megatron_epp.plan.fresh import all_at_once, fresh_bytes
from megatron_epp.plan.kv_offload import head_parts


def prefix_bytes(costs: StageCosts, work: ChunkWork) -> TimeColumn:
    """Bytes of the newly made gradients of keys and values of one layer, before they are added to the sums, without those of
    the chunk's own tokens, which `working_bytes_per_token` includes. 0 if that is 0: then memory of passes is not counted.

    Every kernel is assumed to make them for each query head if key heads are shared, as all known kernels do, and in fp32, as
    the one with the largest memory does.
    """
    if not costs.working_bytes_per_token:
        return np.zeros(len(work.tokens))
    head, seen = costs.kv_bytes_per_token / costs.kv_heads, work.prefix_tokens + work.tokens

    def made(keys: IntColumn, kv_heads: int) -> TimeColumn:
        return fresh_bytes(keys, kv_heads, head, costs.queries_per_key)

    parts = head_parts(costs.kv_heads)
    all_heads, piece = made(seen, costs.kv_heads), made(seen, costs.kv_heads // parts)
    # Where all heads run at once and the sums are no wider, what the last slice makes becomes them, and counts there.
    wider = costs.kv_gradient_per_token(work) > costs.kv_bytes_per_token
    becomes = work.last & all_at_once(seen, costs.kv_heads, head, costs.queries_per_key) & ~wider
    resident = all_heads - np.where(becomes, costs.kv_bytes_per_token * seen, 0.0)
    return np.maximum(np.where(work.hosted, piece, resident) - made(work.tokens, costs.kv_heads), 0.0)
