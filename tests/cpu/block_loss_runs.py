"""What a rank does in the tests of losses by blocks."""

import torch

from megatron_epp.runtime.block_loss import Head, block_losses

ENTRIES, WIDTH = 26, 6


def losses_and_gradients(losses, grad, inputs):
    """The losses, and gradients of the inputs where the losses have `grad`."""
    return losses.detach(), *torch.autograd.grad(losses, inputs, grad)


def shared_vocabulary(rank, links, x, weight, labels, grad, block_tokens):
    """With this rank's part of the vocabulary."""
    own = weight.chunk(len(links.ranks))[rank].clone().requires_grad_()
    x = x.requires_grad_()
    losses = block_losses(x, x, own, labels, Head(block_tokens, links.activations))
    return losses_and_gradients(losses, grad, (x, own))
