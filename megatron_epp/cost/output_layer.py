"""Costs of an output layer whose vocabulary is divided over the pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.cost.work import ChunkWork, IntColumn, LinearTime, TimeColumn
from megatron_epp.plan import EppError, Op
from megatron_epp.plan.operations import OperationRows

PASS_US = 50.0
"""Fixed time of a pass of a shard besides its share of the output layer's: kernel launches, statistics. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBytes:
    """Bytes that the shards of an output layer hold of a chunk (`features.vocabulary.shards`)."""

    # From `S` to `T`, for the whole vocabulary: exponentials in the weights' type; 0 if `T` recomputes
    kept_bytes_per_token: float = 0.0
    # From `S` to `T`, on each shard: the broadcast input, gathered over tensor-parallel ranks, and in fp32 its part of the
    # input's gradient
    input_bytes_per_token: float = 0.0
    passing_bytes_per_token: float = 0.0  # only while `S` runs, for the whole vocabulary: fp32 exponentials
    workspace_bytes: float = 0.0  # only while `S` or `T` runs, whatever its tokens, for the whole vocabulary: a block's logits
    gradient_workspace_bytes: float = 0.0  # only while `T` runs: the weight gradient, summed over blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShards(ShardBytes):
    """Times and bytes of the shards of an output layer, one on each pipeline rank.

    Attributes:
        shares: of the vocabulary, one per rank; their sum is 1.
        logits: for the whole vocabulary (`S`): the logits, their softmax and their part of the input's gradient.
        gradient: of the weight, for the whole vocabulary (`T`).
        spread, gather: the broadcast of a chunk's tokens to all ranks, and the reductions over all ranks.
    """

    shares: tuple[float, ...]
    logits: LinearTime
    gradient: LinearTime
    spread: LinearTime = LinearTime()  # noqa: RUF009 - frozen
    gather: LinearTime = LinearTime()  # noqa: RUF009 - frozen

    def of_shard(self, whole: LinearTime, rank: int) -> LinearTime:
        """Return a rank's time, given that of the whole vocabulary without `PASS_US`: every shard launches as many kernels."""
        return replace(LinearTime(PASS_US) + whole.scaled(self.shares[rank]), launch_us=whole.launch_us)

    def of_whole(self, own: LinearTime, rank: int) -> LinearTime:
        """Return the time of a pass of the whole vocabulary without `PASS_US`, given the time of a rank's pass."""
        return replace(own.without(LinearTime(PASS_US)).scaled(1.0 / self.shares[rank]), launch_us=own.launch_us)

    def rows(self, op: Op, num_sites: int, work: ChunkWork, fragmentation: float = 0.0) -> OperationRows:
        """Times and bytes of `S`, `N` or `T` for trained tokens. Raises `EppError` for another number of ranks."""
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
            in_gradient = size(share * (self.workspace_bytes + self.gradient_workspace_bytes) + 0.0 * tokens)
            takes.append((to_gradient + in_logits if op is Op.S else in_gradient).tolist())
            gives.append((in_logits if op is Op.S else in_gradient + to_gradient).tolist())
        carried = {Op.SPREAD: self.spread, Op.GATHER: self.gather} if op is Op.S else {}
        return OperationRows(
            times, takes, gives, {name: line.device_us(tokens, 0.0).tolist() for name, line in carried.items()}
        )
