"""The costs of one chunk table as plain rows ``[stage][chunk]``, computed once and read many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost import Costs, work_of
from megatron_epp.cost.work import IntColumn
from megatron_epp.planner.problem import Problem
from megatron_epp.schedule import Chunk

Times = list[list[float]]
Sizes = list[list[int]]


@dataclass(frozen=True, slots=True)
class Tables:
    """Times in microseconds and sizes in bytes, ``[stage][chunk]``.

    Attributes:
        num_layers: of each stage.
        forward_us, backward_us: of a pass without recompute.
        layer_us: added to the backward by each recomputed layer.
        message_us: of each chunk's message, ``[chunk]``.
        activation: kept from forward to backward with nothing recomputed.
        saved: less for each recomputed layer.
        workspace: of a backward that recomputes, gone at its end.
        forward_alloc, forward_free: of the forward, `activation` apart: caches of keys and values, and in a forward-only plan
            what is gone at its end.
        backward_alloc, backward_free: of the backward, `activation` and `workspace` apart: gradients of keys and values.
        static: bytes of each stage held throughout.
    """

    num_layers: tuple[int, ...]
    forward_us: Times
    backward_us: Times
    layer_us: Times
    message_us: list[float]
    activation: Sizes
    saved: Sizes
    workspace: Sizes
    forward_alloc: Sizes
    forward_free: Sizes
    backward_alloc: Sizes
    backward_free: Sizes
    static: tuple[int, ...]


def tabulate(chunks: Sequence[Chunk], problem: Problem, costs: Costs) -> Tables:
    """Evaluate the costs of every stage and chunk.

    A sliced sequence's keys and values are allocated by the forward of its first slice, their gradient by the backward of its
    last; both are freed when the backward of the first slice ends. Without backward, the forward of the last slice frees them.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple)
    none = np.zeros(len(chunks), dtype=np.int64)
    columns: list[tuple[IntColumn, ...]] = []
    forward_us: Times = []
    backward_us: Times = []
    layer_us: Times = []
    for stage in range(problem.num_stages):
        cache = costs.cache_bytes(stage, work)
        opened, closed = np.where(work.first, cache, 0), np.where(work.last, cache, 0)
        forward_us.append(costs.forward_us(stage, work).tolist())
        if problem.forward_only:
            transient = costs.transient_bytes(stage, work)
            columns.append((none, none, none, opened + transient, closed + transient, none, none))
            continue
        backward_us.append(costs.backward_us(stage, work).tolist())
        layer_us.append(costs.recompute_us(stage, work, 1).tolist())
        kept = costs.activation_bytes(stage, work, 0)
        saved = np.minimum(kept - costs.activation_bytes(stage, work, 1), kept // max(1, costs.num_layers[stage]))
        columns.append((kept, saved, costs.workspace_bytes(stage, work), opened, none, closed, 2 * opened))
    sizes: list[Sizes] = [[column.tolist() for column in rows] for rows in zip(*columns, strict=True)]
    static = tuple(costs.static_bytes(stage) for stage in range(problem.num_stages))
    return Tables(costs.num_layers, forward_us, backward_us, layer_us, costs.message_us(work).tolist(), *sizes, static)
