"""Cross entropy of an output layer whose rows are divided over ranks: what one rank computes of it, without communication.

`logits_pass` runs ahead of any exchange. Its part of the gradient of the layer's input is relative to the rank's largest logit,
until `scale_part` completes it with all ranks' statistics. The label's term of that gradient, ``p - 1`` for its probability
``p``, is made from log-probabilities: a difference of two sums would nearly cancel where the model is certain of the label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_epp.runtime.loss.token_blocks import Head, WeightGradient, blocks_of, subtract_column, to_fp32

_SCALED_AT_ONCE = 1024
"""Number of tokens whose labels' rows are in memory at a time. Not measured: much fewer launch more kernels, many more take as
much memory as the input of the output layer in fp32.
"""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of an output layer's weight that one rank holds."""

    weight: Tensor  # ``[rows, in]``; the rows may be none
    start: int  # number of the first row in the whole vocabulary
    # Most tokens whose logits are in memory at once; then logits are recomputed for the weight's gradient. 0 for all of a
    # chunk; their exponentials are kept then.
    block_tokens: int = 0
    accumulate: Callable[[Tensor, Tensor], Tensor] | None = None  # as in `token_blocks.Head`

    def index(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return every label's row on this rank (clamped), and True if it is one of them."""
        local = labels - self.start
        return local.clamp(0, max(0, len(self.weight) - 1)), (local >= 0) & (local < len(self.weight))

    def blocks(self, num_tokens: int) -> list[slice]:
        return blocks_of(num_tokens, self.block_tokens or max(1, num_tokens))


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """Statistics of logits, ``[tokens]`` each, in fp32 (fp64 for fp64 logits)."""

    most: Tensor  # largest logit of this rank
    summed: Tensor  # sum of exponentials of this rank's logits less `most`
    predicted: Tensor  # logit of the label, if it is one of this rank's rows
    is_here: Tensor  # True where it is

    def addends(self, most: Tensor) -> Tensor:
        """Return what ranks add up, given the largest logits: sums of exponentials and logits of labels, ``[2, tokens]``."""
        here = torch.where(self.is_here, self.predicted - most, 0.0)
        return torch.stack([self.summed * (self.most - most).exp(), here])

    @staticmethod
    def combined(most: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and log-sum-exps, ``[tokens]``, given the largest logits and the sum of all ranks' `addends`."""
        log_sum = added[0].log()
        return log_sum - added[1], log_sum + most


@dataclass(slots=True)
class Logits:
    summary: ShardSummary
    # ``exp(logits - most) @ weight`` without the label's term, ``[tokens, in]`` in fp32; None if no gradient is wanted
    part: Tensor | None = None
    # ``exp(logits - most)`` with 0 for labels, ``[tokens, rows]`` in the weight's type; None if recomputed
    exponentials: Tensor | None = None


@torch.no_grad()
def logits_pass(x: Tensor, labels: Tensor, shard: Shard, needs_gradient: bool) -> Logits:
    """Compute a rank's logits of a chunk by blocks of tokens, and what is needed of them.

    `x` is the layer's input, ``[tokens, in]``; labels, ``[tokens]``, are rows of the whole vocabulary. The shard has some.
    """
    index, is_here = shard.index(labels)
    parts, rounded, rows = [], None, []
    for tokens in shard.blocks(len(x)):
        at, here = index[tokens, None], is_here[tokens, None]
        logits = x[tokens] @ shard.weight.t()
        most, predicted = to_fp32(logits.amax(1)), to_fp32(logits.gather(1, at).squeeze(1))
        exponentials = subtract_column(logits, most[:, None]).exp_()
        del logits
        rows.append(torch.stack([most, exponentials.sum(1), predicted]))
        if not needs_gradient:
            continue
        exponentials.scatter_(1, at, exponentials.gather(1, at).masked_fill(here, 0.0))
        rounded = exponentials.to(x.dtype)
        del exponentials
        parts.append(to_fp32(rounded @ shard.weight))
        if shard.block_tokens:
            rounded = None  # before the next block's logits are there
    most, summed, predicted = torch.cat(rows, dim=1)
    summary = ShardSummary(most, summed, predicted, is_here)
    if not needs_gradient:
        return Logits(summary)
    return Logits(summary, parts[0] if len(parts) == 1 else torch.cat(parts), rounded)


@torch.no_grad()
def scale_part(logits: Logits, log_sum: Tensor, labels: Tensor, shard: Shard) -> Tensor:
    """Complete a rank's part of the gradient of the layer's input in place, for tokens of weight one; return it.

    The sum over all ranks is the gradient, ``[tokens, in]`` in fp32. `log_sum`, ``[tokens]``, is of all ranks' logits.
    """
    assert logits.part is not None
    summary, index = logits.summary, shard.index(labels)[0]
    logits.part.mul_((summary.most - log_sum).exp()[:, None])
    of_label = _label_terms(summary, log_sum)
    for tokens in blocks_of(len(labels), _SCALED_AT_ONCE):
        logits.part[tokens].addcmul_(of_label[tokens, None], to_fp32(shard.weight[index[tokens]]))
    return logits.part


@torch.no_grad()
def weight_gradient(x: Tensor, labels: Tensor, logits: Logits, log_sum: Tensor, weights: Tensor, shard: Shard) -> Tensor:
    """Return the gradient of a rank's rows, ``[rows, in]``; a placeholder if `shard.accumulate` adds it to the main gradient.

    What `logits` has kept is overwritten. `log_sum` is of all ranks' logits, `weights` the loss's, ``[tokens]``.
    """
    summary, (index, is_here) = logits.summary, shard.index(labels)
    of_label = (_label_terms(summary, log_sum) * weights)[:, None]
    blocks = shard.blocks(len(x))
    total = WeightGradient(shard.weight, Head(shard.block_tokens, accumulate=shard.accumulate), len(blocks))
    for tokens in blocks:
        rows, at, here = x[tokens], index[tokens, None], is_here[tokens, None]
        if logits.exponentials is not None:
            grad = logits.exponentials.mul_(((summary.most - log_sum).exp() * weights)[:, None])
        else:
            exact = subtract_column(rows @ shard.weight.t(), log_sum[tokens, None]).exp_()
            grad = exact.mul_(weights[tokens, None]).to(x.dtype)
            del exact
        grad.scatter_(1, at, torch.where(here, of_label[tokens].to(grad.dtype), grad.gather(1, at)))
        total.add(rows, grad)
        del grad
    return total.result()


def _label_terms(summary: ShardSummary, log_sum: Tensor) -> Tensor:
    """Return ``p - 1`` for the probability of the label where it is one of the rank's rows, else 0: ``[tokens]``."""
    return torch.where(summary.is_here, torch.expm1(summary.predicted - log_sum), 0.0)
