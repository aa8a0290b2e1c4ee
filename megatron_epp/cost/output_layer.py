"""The output layer: tokens and workspace of a loss by blocks, and costs of a vocabulary sharded over the pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.cost.work import ChunkWork, IntColumn, LinearTime, TimeColumn
from megatron_epp.plan import EppError, Op
from megatron_epp.plan.operations import OperationRows

AUTO = "auto"
FP32_BYTES = 4
BLOCK_BYTES = 2**30
"""Size of a block's fp32 logits if the number of tokens of a block is not set. With a vocabulary of 128,256 a block has 2,048
tokens, so that the matrix products reach 94 % of their rate (`Rates.saturation_tokens`)."""
PASS_US = 50.0
"""Fixed time of a pass of a shard besides its share of the output layer's: kernel launches, statistics. Assumed."""


def loss_block_tokens(setting: str | int, vocabulary: int, longest: int) -> int:
    """Tokens of a block of the loss; 0 if the logits of a whole chunk are computed at once.

    A block's backward recomputes its logits, one more product with the output layer's weight. So ``auto`` uses blocks only if
    the fp32 logits of the `longest` sequence on a rank (0 if unknown) would take more than the bytes of two blocks.
    """
    if setting != AUTO:
        return int(setting)
    per_token = FP32_BYTES * vocabulary
    if longest * per_token <= 2 * BLOCK_BYTES:
        return 0
    return 1 << (max(1, BLOCK_BYTES // per_token).bit_length() - 1)


def loss_workspace_bytes(
    block_tokens: int,
    vocabulary: int,
    hidden_size: int,
    bytes_per_value: int,
    *,
    fused_accumulation: bool = False,
    in_place: bool = False,
    has_entropy: bool = False,
) -> int:
    """Bytes of workspace, in addition to activations, while a pass computes a loss by blocks.

    Logits are fp32; if values are narrower, there is also a copy of them or of their gradient in that type. The weight gradient
    is summed over the blocks in fp32; if values are narrower, a block's contribution is one more tensor.

    Args:
        block_tokens: tokens of a block; 0 for no blocks, which takes no memory.
        fused_accumulation: blocks accumulate into the weight's main gradient; only a placeholder tensor is allocated.
        in_place: a kernel overwrites logits, in the type of the values, with their gradient; then there is a second copy of a
            block's input, scaled by the weights of its tokens.
        has_entropy: the loss reads entropies, for which every logit has one more factor in fp32.
    """
    if block_tokens == 0:
        return 0
    factors = FP32_BYTES * block_tokens * vocabulary if has_entropy else 0
    copy = bytes_per_value if bytes_per_value < FP32_BYTES else 0
    gradient = bytes_per_value if fused_accumulation else FP32_BYTES + copy
    if in_place:
        return factors + bytes_per_value * block_tokens * (vocabulary + hidden_size) + vocabulary * hidden_size * gradient
    return factors + vocabulary * (block_tokens * (FP32_BYTES + copy) + hidden_size * gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBytes:
    """Bytes that the shards of an output layer hold of a chunk (`features.vocabulary.shards`).

    Attributes:
        kept_bytes_per_token: from `S` to `T`, for the whole vocabulary: exponentials in the weights' type; 0 if `T` recomputes.
        input_bytes_per_token: from `S` to `T`, on each shard: the broadcast input, gathered over tensor-parallel ranks, and in
            fp32 its part of the input's gradient.
        passing_bytes_per_token: only while `S` runs, for the whole vocabulary: fp32 exponentials.
        workspace_bytes: only while `S` or `T` runs, whatever its tokens, for the whole vocabulary: a block's logits.
        gradient_workspace_bytes: only while `T` runs: the weight gradient, summed over blocks.
    """

    kept_bytes_per_token: float = 0.0
    input_bytes_per_token: float = 0.0
    passing_bytes_per_token: float = 0.0
    workspace_bytes: float = 0.0
    gradient_workspace_bytes: float = 0.0


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
