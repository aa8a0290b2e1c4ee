"""Liger's own kernel against exact numbers, where `TRITON_INTERPRET=1` has it run on the CPU."""

import torch

from megatron_epp.runtime.loss import token_blocks as block_loss
from megatron_epp.runtime.loss.kernels import LIGER, LossCase, errors
from megatron_epp.runtime.loss.token_blocks import Head, block_losses
from tests.support.runtime.block_loss_runs import losses_and_gradients, problem

ENTRIES = (1000, 40000)
"""Vocabulary sizes for which the kernel takes one block of columns, and two."""


def check_numbers():
    """In fp32 as exact as fp32 is. In bf16 the interpreter cuts off what a GPU rounds: a unit in the last place, not half."""
    assert LIGER.obstacle(LossCase("cuda", torch.bfloat16, 1000)) == ""
    for entries in ENTRIES:
        of_losses, of_gradient = errors(LIGER, LossCase("cpu", torch.float32, entries))
        assert of_losses < 1e-6, of_losses
        assert of_gradient < 2e-4, of_gradient  # of a probability of 0.999, less 1, a digit in ten thousand is left
        of_losses, of_gradient = errors(LIGER, LossCase("cpu", torch.bfloat16, entries))
        assert of_losses < 1e-6, of_losses
        assert of_gradient < 1.02 * 2**-7, of_gradient


def check_blocks():
    """Losses by blocks with Liger's kernel are those without."""
    x, weight, labels = problem(tokens=11)
    grad = torch.tensor([0.3, 0.0, -1.7, 2.9, 1.0]).repeat(3)[:11]
    expected = losses_and_gradients(block_losses(x, x, weight, labels, Head(4)), grad, (x, weight))
    block_loss.explain = lambda case: (LIGER, "")
    found = losses_and_gradients(block_losses(x, x, weight, labels, Head(4)), grad, (x, weight))
    for wanted, tensor in zip(expected, found, strict=True):
        torch.testing.assert_close(tensor, wanted)


if __name__ == "__main__":
    check_numbers()
    check_blocks()
