"""Cross entropy of an output layer, a block of tokens at a time: the logits of all tokens are never in memory at once.

Forward keeps two numbers of every token, its label and its log-sum-exp. Backward recomputes a block's logits, turns them into
their gradient in place, and computes from it the gradients of the input and of the weight, which gets it through autograd. The
cost is one more product with the weight.

A block's logits are processed by Liger's kernel, if `loss.kernels` chooses it, else by plain torch. Liger's fused linear cross
entropy would avoid the second product, but hold a gradient of the weight for every chunk between forward and backward; and it
supports no vocabulary split over ranks, and cannot add to a main gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp.runtime.loss.kernels import LossCase, explain


class Head(NamedTuple):
    """Options of the loss computation."""

    block_tokens: int  # largest number of tokens of a block. Blocks are as even as whole tokens allow.
    # Ranks that split the vocabulary: equal shares, in the order of ranks. None if this rank has all of it.
    group: dist.ProcessGroup | None = None
    # Returns the layer's input, given the part of it that was kept; with sequence parallelism ranks keep a part each
    gather: Callable[[Tensor], Tensor] = lambda x: x
    # Adds a block's part to the weight's main gradient, given input ``[tokens, in]`` and the logits' gradient ``[tokens,
    # out]``; returns a placeholder for the weight's gradient. None if autograd receives the gradient itself.
    accumulate: Callable[[Tensor, Tensor], Tensor] | None = None
    # Indices of the tokens that count, rising, at least one; None for all. Others are not multiplied with the weight.
    rows: Tensor | None = None
    has_entropy: bool = False


def block_losses(x: Tensor, saved_x: Tensor, weight: Tensor, labels: Tensor, head: Head) -> Tensor:
    """Return the cross entropy of every token, ``[tokens]``, in fp32 (in fp64 for fp64 input); 0 for tokens not in `head.rows`.

    Args:
        x: the output layer's input, ``[tokens, in]``. If ranks split the vocabulary its gradient is this rank's part.
        saved_x: the part of `x` that `head.gather` needs; often `x` itself.
        weight: ``[entries of this rank, in]``.
        labels: ``[tokens]``, indices in the whole vocabulary.
    """
    return block_values(x, saved_x, weight, labels[:, None], head).squeeze(0)


def block_values(x: Tensor, saved_x: Tensor, weight: Tensor, entries: Tensor, head: Head) -> Tensor:
    """Return the cross entropies of several entries of every token, ``[m, tokens]``; see `block_losses`.

    With `head.has_entropy` the entropies of the tokens' distributions follow: ``[m + 1, tokens]``. Entries are ``[tokens, m]``,
    indices in the whole vocabulary: the label and others, of which some may be equal.
    """
    return _BlockLosses.apply(x, saved_x, weight, entries, head)


class _BlockLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved_x: Tensor, weight: Tensor, entries: Tensor, head: Head) -> Tensor:
        counted = entries if head.rows is None else entries[head.rows]
        index, is_here = _entries(counted, weight, head)
        blocks, log_sum, kernel = blocks_of(len(counted), head.block_tokens), None, None
        if counted.shape[1] == 1 and not head.has_entropy:
            kernel, _ = explain(LossCase(x.device.type, x.dtype, len(weight), head.group is not None))
        if kernel is None:
            rows = [_summary(x[_tokens(head, part)], weight, index[part], head.has_entropy) for part in blocks]
            values, log_sum = _combined(torch.cat(rows, dim=1), is_here, head.group)
        else:
            labels = index.squeeze(1)
            values = torch.cat([kernel.losses(x[_tokens(head, part)] @ weight.t(), labels[part]) for part in blocks])[None]
        ctx.save_for_backward(saved_x, weight, counted, log_sum, *values[counted.shape[1] :])
        ctx.head, ctx.kernel = head, kernel
        if head.rows is not None:
            values = values.new_zeros(len(values), len(x)).index_copy_(1, head.rows, values)
        return values

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        saved_x, weight, entries, log_sum, *more = ctx.saved_tensors
        head: Head = ctx.head
        x = head.gather(saved_x.detach())
        index, is_here = _entries(entries, weight, head)
        if head.rows is not None:
            grad_values = grad_values[..., head.rows]
        grad_losses = grad_values[: entries.shape[1]].t()
        grad_x = torch.empty_like(x) if head.rows is None else torch.zeros_like(x)
        blocks = blocks_of(len(entries), head.block_tokens)
        grad_weight = WeightGradient(weight, head, len(blocks)) if ctx.needs_input_grad[2] else None
        for part in blocks:
            tokens = _tokens(head, part)
            rows, of_losses = x[tokens], grad_losses[part]
            grad_rows = grad_x[part] if head.rows is None else torch.empty_like(rows)
            if ctx.kernel is None:
                grad = subtract_column(rows @ weight.t(), log_sum[part, None])
                if len(grad_values) == 1:
                    grad.exp_().scatter_add_(1, index[part], -is_here[part].to(grad.dtype))
                    # In one pass, in place if the input has this type; a name for `out` would keep it for the next block.
                    grad = torch.mul(
                        grad, of_losses, out=grad if grad.dtype == x.dtype else torch.empty_like(grad, dtype=x.dtype)
                    )
                else:
                    factor = of_losses.sum(1, keepdim=True)
                    if more:  # the gradient of an entropy is -p (log p + entropy)
                        factor = (grad + more[0][part, None]).mul_(-grad_values[-1, part, None]).add_(factor)
                    of_entries = (is_here[part] * of_losses).to(grad.dtype)
                    grad = grad.exp_().mul_(factor).scatter_add_(1, index[part], -of_entries).to(x.dtype)
                    del factor
                torch.mm(grad, weight, out=grad_rows)
            else:  # which knows no gradient of losses: it goes to what is not as wide as the vocabulary
                grad = ctx.kernel.gradient(rows @ weight.t(), index[part].squeeze(1))
                torch.mm(grad, weight, out=grad_rows).mul_(of_losses)
                rows = torch.mul(rows, of_losses, out=torch.empty_like(rows))
            if head.rows is not None:
                grad_x[tokens] = grad_rows
            del grad_rows
            if grad_weight is not None:
                grad_weight.add(rows, grad)
            del grad
        return grad_x, None, None if grad_weight is None else grad_weight.result(), None, None


class WeightGradient:
    """Gradient of a weight, summed over blocks: in fp32, because low precision would round every partial sum."""

    def __init__(self, weight: Tensor, head: Head, num_blocks: int) -> None:
        self._weight, self._accumulate, self._several = weight, head.accumulate, num_blocks > 1
        self._sum: Tensor | None = None

    def add(self, x: Tensor, grad: Tensor) -> None:
        if self._accumulate is not None:
            self._sum = None  # before there is another
            self._sum = self._accumulate(x, grad)
        elif self._sum is None:
            part = grad.t() @ x
            self._sum = to_fp32(part) if self._several else part
        elif self._sum.dtype == x.dtype:
            self._sum.addmm_(grad.t(), x)
        else:
            self._sum.add_(grad.t() @ x)

    def result(self) -> Tensor:
        assert self._sum is not None  # there is at least one block
        return self._sum.to(self._weight.dtype)


def _summary(x: Tensor, weight: Tensor, index: Tensor, has_entropy: bool) -> Tensor:
    """Return per token the largest logit, the sum of exponentials relative to it, and the logits at `index` ``[tokens, m]``.

    With `has_entropy` the sum of exponentials times relative logits follows: ``[m + 2, tokens]``, or one more.
    """
    logits = x @ weight.t()
    most, predicted = to_fp32(logits.amax(1)), to_fp32(logits.gather(1, index)).unbind(1)
    relative = subtract_column(logits, most[:, None])
    if not has_entropy:
        return torch.stack([most, relative.exp_().sum(1), *predicted])
    exponentials = relative.exp()
    return torch.stack([most, exponentials.sum(1), *predicted, relative.mul_(exponentials).sum(1)])


def _combined(rows: Tensor, is_here: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Combine the ranks' summaries of their parts of the vocabulary; `is_here` is ``[tokens, m]``.

    Returns losses ``[m, tokens]``, or with entropies ``[m + 1, tokens]``; and log-sum-exps ``[tokens]``.
    """
    own_most, summed, num_entries = rows[0], rows[1], is_here.shape[1]
    predicted, of_logits = rows[2 : 2 + num_entries], rows[2 + num_entries :]
    most = own_most
    if group is not None:
        dist.all_reduce(most := own_most.clone(), dist.ReduceOp.MAX, group=group)
        factor = (own_most - most).exp()
        of_logits = (of_logits + summed * (own_most - most)) * factor
        summed = summed * factor
    parts = torch.cat([summed[None], torch.where(is_here.t(), predicted - most, 0.0), of_logits])
    if group is not None:
        dist.all_reduce(parts, group=group)
    log_sum = parts[0].log()
    parts[1 + num_entries :] /= parts[0]
    return log_sum - parts[1:], log_sum + most


def blocks_of(num_tokens: int, most: int) -> list[slice]:
    """Split tokens into the fewest blocks of at most `most` tokens, as even as whole tokens allow."""
    count = max(1, -(-num_tokens // most))
    return [slice(num_tokens * i // count, num_tokens * (i + 1) // count) for i in range(count)]


def _tokens(head: Head, part: slice) -> slice | Tensor:
    return part if head.rows is None else head.rows[part]


def _entries(labels: Tensor, weight: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Return every label's index among this rank's vocabulary entries (clamped), and True if it is one of them; as `labels`."""
    entries = len(weight)
    local_labels = labels if head.group is None else labels - dist.get_rank(head.group) * entries
    return local_labels.clamp(0, entries - 1), (local_labels >= 0) & (local_labels < entries)


def subtract_column(logits: Tensor, column: Tensor) -> Tensor:
    """Return ``logits - column`` in the column's type, in one pass: in place, or in new memory if the logits are narrower."""
    return logits.sub_(column) if logits.dtype == column.dtype else logits - column


def to_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or in fp64 if it is fp64. May be `x` itself."""
    return x if x.dtype == torch.float64 else x.float()
