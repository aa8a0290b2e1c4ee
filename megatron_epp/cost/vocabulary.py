"""Costs of an output layer whose vocabulary is sharded over the pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.cost.work import ChunkWork, IntColumn, Line, TimeColumn
from megatron_epp.plan import EppError, Op
from megatron_epp.plan.operations import OperationRows

PASS_US = 50.0
"""Fixed time of a pass of a shard besides its share of the output layer's: kernel launches, statistics. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShards:
    """Times and bytes of the shards of an output layer, one on each pipeline rank.

    Attributes:
        shares: of the vocabulary, one per rank; their sum is 1.
        logits: time of the logits, their softmax and their part of the input's gradient, for the whole vocabulary (`S`).
        gradient: time of the weight gradient, for the whole vocabulary (`T`).
        kept_bytes_per_token: held from `S` to `T` for the whole vocabulary: the gradient of the logits; 0 if `T` recomputes it.
        input_bytes_per_token: held from `S` to `T` by each shard: the broadcast input, and its part of the input's gradient.
        passing_bytes_per_token: held only while `S` runs, for the whole vocabulary: fp32 logits.
        workspace_bytes: held only while `S` or `T` runs, whatever its tokens: a block's logits; for the whole vocabulary.
        spread: time of the broadcast of a chunk's tokens to all ranks.
        gather: time of the reductions over all ranks.
    """

    shares: tuple[float, ...]
    logits: Line
    gradient: Line
    kept_bytes_per_token: float = 0.0
    input_bytes_per_token: float = 0.0
    passing_bytes_per_token: float = 0.0
    workspace_bytes: float = 0.0
    spread: Line = Line()  # noqa: RUF009 - frozen
    gather: Line = Line()  # noqa: RUF009 - frozen

    def of_shard(self, whole: Line, rank: int) -> Line:
        """Return the time of a rank's pass, given the time of the whole vocabulary without `PASS_US`.

        Every shard launches as many kernels as the whole vocabulary.
        """
        return replace(Line(PASS_US) + whole.scaled(self.shares[rank]), launch_us=whole.launch_us)

    def of_whole(self, own: Line, rank: int) -> Line:
        """Return the time of a pass of the whole vocabulary without `PASS_US`, given the time of a rank's pass."""
        return replace(own.without(Line(PASS_US)).scaled(1.0 / self.shares[rank]), launch_us=own.launch_us)

    def rows(self, op: Op, num_sites: int, work: ChunkWork, fragmentation: float = 0.0) -> OperationRows:
        """Times and bytes of an operation (`plan.vocabulary`).

        Args:
            op: `S`, `N` or `T`.
            num_sites: of the operation: ranks for `S` and `T`.
            work: of the chunks; only trained tokens pass the output layer.
            fragmentation: share of bytes that an allocator loses.

        Raises:
            EppError: the costs are of another number of ranks.
        """
        tokens = np.asarray(work.tokens if work.trained is None else work.trained, dtype=np.float64)
        nothing = np.zeros(len(tokens), dtype=np.int64)
        if op is Op.N:
            return OperationRows([[PASS_US] * len(tokens)], [nothing.tolist()], [nothing.tolist()], {})
        if num_sites != len(self.shares):
            raise EppError(f"the costs have vocabulary shards of {len(self.shares)} ranks, the pipeline has {num_sites}")
        whole = self.logits if op is Op.S else self.gradient
        times = [whole.launched(PASS_US + share * whole.device_us(tokens, 0.0)).tolist() for share in self.shares]

        def size(amount: TimeColumn) -> IntColumn:
            return np.asarray(np.ceil(amount * (1 + fragmentation)), dtype=np.int64)

        takes, gives = [], []
        for share in self.shares:
            to_gradient = size((share * self.kept_bytes_per_token + self.input_bytes_per_token) * tokens)
            in_logits = size(share * (self.passing_bytes_per_token * tokens + self.workspace_bytes))
            in_gradient = size(share * self.workspace_bytes + 0.0 * tokens)
            takes.append((to_gradient + in_logits if op is Op.S else in_gradient).tolist())
            gives.append((in_logits if op is Op.S else in_gradient + to_gradient).tolist())
        carried = {Op.SPREAD: self.spread, Op.GATHER: self.gather} if op is Op.S else {}
        return OperationRows(
            times, takes, gives, {name: line.device_us(tokens, 0.0).tolist() for name, line in carried.items()}
        )
