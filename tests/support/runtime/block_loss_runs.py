"""Problems of losses by blocks, a kernel in Liger's place, and what ranks that share the vocabulary run."""

import torch
from torch.nn import functional

from megatron_epp.runtime.loss.kernels import LossKernel
from megatron_epp.runtime.loss.token_blocks import Head, block_values

ENTRIES, WIDTH = 26, 6


def losses_and_gradients(losses, grad, inputs):
    return losses.detach(), *torch.autograd.grad(losses, inputs, grad)


def shared_values(rank, links, x, weight, entries, grad, rows, has_entropy):
    """Of entries of each token, of all tokens or some, with this rank's part of the vocabulary."""
    own = weight.chunk(len(links.ranks))[rank].clone().requires_grad_()
    x = x.requires_grad_()
    values = block_values(x, x, own, entries, Head(4, links.activations, rows=rows, has_entropy=has_entropy))
    return losses_and_gradients(values, grad, (x, own))


def problem(tokens, entries=ENTRIES, width=WIDTH, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator, dtype=torch.float64) for n in (tokens, entries))
    labels = torch.randint(entries, (tokens,), generator=generator)
    return x.to(dtype).requires_grad_(), (weight * width**-0.5).to(dtype).requires_grad_(), labels


def plain(x, weight, labels):
    """Cross entropy of all tokens at once, in fp32 at least."""
    logits = x @ weight.t()
    return functional.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), labels, reduction="none")


def bf16_errors(losses_of, grad, entries):
    """Relative errors of the losses, and of the gradients of input and weight, from those in fp64 of the same bf16 values."""
    x, weight, labels = problem(len(grad), entries, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = losses_and_gradients(plain(*exact, labels), grad.double(), exact)
    actual = losses_and_gradients(losses_of(x, weight, labels), grad, (x, weight))
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]


def _losses(logits, labels):
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def _gradient(logits, labels):
    wide = logits.float().softmax(1)
    return logits.copy_(wide.scatter_add_(1, labels[:, None], -torch.ones_like(wide[:, :1])))


def exact_kernel(losses=_losses, gradient=_gradient):
    """Compute the result of Liger's kernel in fp32, rounded once."""
    return LossKernel("played", losses, gradient, lambda case: "")
