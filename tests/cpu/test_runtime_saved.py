"""The meter counts every storage that autograd keeps, once, as long as it keeps it."""

import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_epp.runtime.autograd.saved import SavedTensors

KIB = 1024


def leaf(kib):
    """A float32 tensor of so many KiB that requires gradients."""
    return torch.ones(kib * KIB // 4, requires_grad=True)


def test_bytes_live_from_forward_to_backward():
    x = leaf(1)
    with SavedTensors() as meter:
        y = x.exp()  # keeps its output
        assert meter.live_bytes == KIB
        z = y.sin()  # keeps its input, the same tensor
        assert meter.live_bytes == KIB
        w = z.exp()
        assert meter.live_bytes == 2 * KIB
        w.sum().backward()
        assert meter.live_bytes == 0
    assert meter.peak_bytes == 2 * KIB


def test_a_graph_that_is_dropped_counts_no_longer():
    x = leaf(1)
    with SavedTensors() as meter:
        y = x.exp()
        assert meter.live_bytes == KIB
        del y
        assert meter.live_bytes == 0


def test_views_count_as_the_storage_they_hold():
    x = leaf(8) * 1.0
    with SavedTensors() as meter:
        y = x[: KIB // 4].sin(), x[KIB // 4 : KIB // 2].sin()
        assert meter.live_bytes == 8 * KIB
        del y
    assert meter.live_bytes == 0


def test_parameters_do_not_count_nor_do_views_of_them():
    weight = torch.nn.Parameter(torch.ones(16, 16))
    x = torch.ones(4, 16, requires_grad=True) * 1.0
    with SavedTensors([weight]) as meter:
        y = x @ weight.t()
        assert meter.live_bytes == x.nbytes
        y.sum().backward()
    assert meter.live_bytes == 0


class Product(torch.autograd.Function):
    """``x @ weight.t()``, and what its backward finds of two parameters, one of which it was not given as an argument."""

    @staticmethod
    def forward(ctx, x, weight, beside, found):
        ctx.save_for_backward(x, None, weight, beside[0])
        ctx.found = found
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, nothing, weight, beside = ctx.saved_tensors
        assert nothing is None
        ctx.found += [weight, beside]
        return grad @ weight, grad.t() @ x, None, None


@pytest.mark.parametrize("trains", [True, False])
def test_a_functions_backward_finds_the_very_parameters_that_its_forward_has_saved(trains):
    """Megatron's layers and Transformer Engine's read attributes of theirs, and set some."""
    weight, beside = (torch.nn.Parameter(torch.ones(4, 4), requires_grad=trains) for _ in range(2))
    x, found = torch.ones(2, 4, requires_grad=True), []
    with SavedTensors() as meter:
        Product.apply(x, weight, [beside], found).sum().backward()
    assert found[0] is weight
    assert found[1] is beside
    assert meter.peak_bytes == x.nbytes
    torch.testing.assert_close(x.grad, torch.full_like(x, 4.0))
    if trains:
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 2.0))


def test_a_saved_parameter_lives_as_long_as_the_graph():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    gone = weakref.ref(weight)
    with SavedTensors():
        y = Product.apply(torch.ones(2, 4, requires_grad=True), weight, [weight], [])
    del weight
    assert gone() is not None
    del y
    assert gone() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_does_not_count_between_forward_and_backward(reentrant):
    x = leaf(4) * 1.0
    with SavedTensors() as meter:
        y = checkpoint(lambda x: x.exp().exp().exp(), x, use_reentrant=reentrant)
        assert meter.live_bytes == x.nbytes
        y.sum().backward()
    assert meter.live_bytes == 0


def test_a_parameter_that_is_gone_does_not_hide_what_takes_its_address():
    memory = bytearray(KIB)
    parameter = torch.frombuffer(memory, dtype=torch.float32)
    meter = SavedTensors([parameter])
    del parameter
    x = torch.frombuffer(memory, dtype=torch.float32).requires_grad_()
    with meter:
        y = x.sin()
        assert meter.live_bytes == KIB
        del y
    assert meter.live_bytes == 0


def test_memory_that_is_swapped_under_a_saved_tensor_still_counts_and_is_still_there():
    x = leaf(1) * 1.0
    with SavedTensors() as meter:
        y = x.sin()
        x.data = torch.empty(1)
        assert meter.live_bytes == KIB
        others = [(leaf(1) * 1.0).sin() for _ in range(9)]
        assert meter.live_bytes == 10 * KIB
        del y, others
    assert meter.live_bytes == 0


def test_gradients_do_not_depend_on_the_meter():
    def gradient():
        x = leaf(1)
        (x.exp() * x.sigmoid()).tanh().sum().backward()
        return x.grad

    with SavedTensors():
        metered = gradient()
    assert torch.equal(metered, gradient())


def test_other_bytes_add_to_the_peak_whenever_they_rise():
    caches = 0
    x = leaf(1)

    class Grow(torch.autograd.Function):
        """Makes a buffer in backward, as the first backward of a sliced sequence does."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            nonlocal caches
            caches = 10 * KIB
            return grad

    with SavedTensors(others=lambda: caches) as meter:
        y = Grow.apply(x.exp()).sum()
        y.backward()
        caches = 0
    assert meter.peak_bytes == 11 * KIB
