"""Programs of the ranks in the tests of losses by blocks."""

import torch
from torch.nn import functional

from megatron_epp.runtime.loss.kernels import LossKernel
from megatron_epp.runtime.loss.token_blocks import Head, block_losses, block_values

ENTRIES, WIDTH = 26, 6


def losses_and_gradients(losses, grad, inputs):
    """The losses, and gradients of the inputs where the losses have `grad`."""
    return losses.detach(), *torch.autograd.grad(losses, inputs, grad)


def shared_vocabulary(rank, links, x, weight, labels, grad, block_tokens, rows=None):
    """With this rank's part of the vocabulary, of all tokens or some."""
    own = weight.chunk(len(links.ranks))[rank].clone().requires_grad_()
    x = x.requires_grad_()
    losses = block_losses(x, x, own, labels, Head(block_tokens, links.activations, rows=rows))
    return losses_and_gradients(losses, grad, (x, own))


def shared_values(rank, links, x, weight, entries, grad, has_entropy):
    """Of several entries of each token, with this rank's part of the vocabulary."""
    own = weight.chunk(len(links.ranks))[rank].clone().requires_grad_()
    x = x.requires_grad_()
    values = block_values(x, x, own, entries, Head(4, links.activations, has_entropy=has_entropy))
    return losses_and_gradients(values, grad, (x, own))


def problem(tokens, entries=ENTRIES, width=WIDTH):
    """Hidden states and a weight that take gradients, and labels, in fp32."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator) for n in (tokens, entries))
    labels = torch.randint(entries, (tokens,), generator=generator)
    return x.requires_grad_(), (weight * width**-0.5).requires_grad_(), labels


def _losses(logits, labels):
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def _gradient(logits, labels):
    wide = logits.float().softmax(1)
    return logits.copy_(wide.scatter_add_(1, labels[:, None], -torch.ones_like(wide[:, :1])))


def exact_kernel(losses=_losses, gradient=_gradient):
    """Compute the result of Liger's kernel in fp32, rounded once."""
    return LossKernel("played", losses, gradient, lambda case: "")
