"""The costs of one chunk table as plain rows ``[stage][chunk]``, computed once and read many times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost import ChunkWork, Costs, work_of
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
        forward_alloc, forward_free: of the forward, `activation` apart: caches of keys and values, and in a forward-only plan
            what is gone at its end.
        backward_first, backward_last: held at the first and the last layer of a backward, see `Costs.backward_bytes`.
        backward_free: by the backward, `activation` apart: keys, values and their gradient, less the gradient it leaves behind.
        static: bytes of each stage held throughout.
    """

    num_layers: tuple[int, ...]
    forward_us: Times
    backward_us: Times
    layer_us: Times
    message_us: list[float]
    activation: Sizes
    saved: Sizes
    forward_alloc: Sizes
    forward_free: Sizes
    backward_first: Sizes
    backward_last: Sizes
    backward_free: Sizes
    static: tuple[int, ...]

    def kept_bytes(self, stage: int, chunk: int, layers: int) -> int:
        """Activations from forward to backward when so many layers recompute."""
        return self.activation[stage][chunk] - layers * self.saved[stage][chunk]

    def rise_bytes(self, stage: int, chunk: int, layers: int) -> int:
        """The most a backward holds above what is live when it starts, when so many layers recompute.

        Fewer than all recompute after a plain layer has made room for them.
        """
        made = self.saved[stage][chunk] if 0 < layers == self.num_layers[stage] else 0
        first, last = self.backward_first[stage][chunk] + made, self.backward_last[stage][chunk]
        return max(0, first, last - self.kept_bytes(stage, chunk, layers))


def tabulate(chunks: Sequence[Chunk], problem: Problem, costs: Costs) -> Tables:
    """Evaluate the costs of every stage and chunk.

    A sliced sequence's keys and values are allocated by the forward of its first slice, their gradient by the backward of its
    last; both are freed when the backward of the first slice ends. Without backward, the forward of the last slice frees
    the keys and values, and of everything else a forward holds only what it needs while it runs.
    """
    work = work_of(chunks, problem.lengths, problem.token_multiple)
    stages = range(problem.num_stages)
    stage_sizes = [_sizes(stage, work, problem, costs) for stage in stages]
    sizes: dict[str, Sizes] = {name: [row[name].tolist() for row in stage_sizes] for name in stage_sizes[0]}
    with_backward = () if problem.forward_only else stages
    return Tables(
        num_layers=costs.num_layers,
        forward_us=[costs.forward_us(stage, work).tolist() for stage in stages],
        backward_us=[costs.backward_us(stage, work).tolist() for stage in with_backward],
        layer_us=[costs.recompute_us(stage, work, 1).tolist() for stage in with_backward],
        message_us=costs.message_us(work).tolist(),
        static=tuple(costs.static_bytes(stage) for stage in stages),
        **sizes,
    )


def _sizes(stage: int, work: ChunkWork, problem: Problem, costs: Costs) -> dict[str, IntColumn]:
    none = np.zeros(len(work.tokens), dtype=np.int64)
    cache = costs.cache_bytes(stage, work)
    opened, closed = np.where(work.first, cache, 0), np.where(work.last, cache, 0)
    if problem.forward_only:
        passing = costs.transient_bytes(stage, work)
        kept = saved = backward_first = backward_last = backward_free = none
        forward_alloc, forward_free = opened + passing, closed + passing
    else:
        kept = costs.activation_bytes(stage, work, 0)
        saved = np.minimum(kept - costs.activation_bytes(stage, work, 1), kept // max(1, costs.num_layers[stage]))
        forward_alloc, forward_free = opened, none
        backward_first, backward_last = costs.backward_bytes(stage, work)
        backward_free = 2 * opened - closed
    return {
        "activation": kept,
        "saved": saved,
        "forward_alloc": forward_alloc,
        "forward_free": forward_free,
        "backward_first": backward_first,
        "backward_last": backward_last,
        "backward_free": backward_free,
    }
