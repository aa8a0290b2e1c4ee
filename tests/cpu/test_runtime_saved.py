"""The meter counts every storage that autograd keeps, once, as long as it keeps it."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_epp.runtime.autograd.saved import SavedTensors

KIB = 1024


def leaf(kib):
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


WEIGHT = torch.nn.Parameter(torch.ones(16, 16))


def thrice(x):
    return x.exp().exp().exp()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[: KIB // 4].sin() + x[KIB // 4 : KIB // 2].sin(),
        lambda x: x.view(-1, 16) @ WEIGHT.t(),
        lambda x: checkpoint(thrice, x, use_reentrant=False),
        lambda x: checkpoint(thrice, x, use_reentrant=True),
    ],
    ids=["views of one storage", "views of parameters do not count", "recomputed", "recomputed, reentrant"],
)
def test_kept_until_the_backward_is_the_storage_of_the_input_alone(function):
    x = leaf(8) * 1.0
    with SavedTensors([WEIGHT]) as meter:
        y = function(x)
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
    assert list(map(id, found)) == [id(weight), id(beside)]
    assert meter.peak_bytes == x.nbytes
    torch.testing.assert_close(x.grad, torch.full_like(x, 4.0))
    if trains:
        torch.testing.assert_close(weight.grad, torch.full_like(weight, 2.0))


class Flattened(torch.autograd.Function):
    """Doubles rows that its forward has flattened, as Transformer Engine's norms do; its backward asks for what was saved."""

    @staticmethod
    def forward(ctx, x):
        rows = x.view(-1, x.shape[-1])  # a leaf that requires gradients, as far as torch says
        ctx.save_for_backward(rows)
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        (rows,) = ctx.saved_tensors
        assert rows.shape == (6, 4)
        return 2 * grad


@pytest.mark.parametrize("when", ["within", "afterwards"])
def test_a_view_that_a_functions_forward_has_saved_comes_back_also_without_hooks(when):
    x = torch.ones(2, 3, 4, requires_grad=True)
    with SavedTensors():
        if when == "within":
            Flattened.apply(x + 1).sum().backward()
    if when == "afterwards":
        Flattened.apply(x + 1).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_a_saved_parameter_lives_as_long_as_the_graph():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    gone = weakref.ref(weight)
    with SavedTensors():
        y = Product.apply(torch.ones(2, 4, requires_grad=True), weight, [weight], [])
    del weight
    assert gone() is not None
    del y
    assert gone() is None


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


class Tagged(torch.Tensor):
    """A subclass with a storage, which may have functions of its own."""


class Scaled(torch.autograd.Function):
    """``weight * tagged``, whose backward needs the subclass."""

    @staticmethod
    def forward(ctx, weight, tagged):
        ctx.save_for_backward(tagged)
        return weight * tagged.as_subclass(torch.Tensor)

    @staticmethod
    def backward(ctx, grad):
        (tagged,) = ctx.saved_tensors
        assert type(tagged) is Tagged
        return grad * tagged.as_subclass(torch.Tensor), None


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3))


def gradient_of(function, *shape, dtype=torch.float32):
    weight = torch.ones(shape, dtype=dtype, requires_grad=True)
    result = function(weight)
    (result.real if result.is_complex() else result).sum().backward()
    return weight.grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize(
    ("make", "function", "shape"),
    [
        (lambda: jagged(3, 5), lambda x, w: (x @ w).sin().values(), (4, 4)),
        (lambda: numbers(4, 4), lambda x, w: padded(torch.nested.as_nested_tensor([w * x, x[:2] * w[:2]])), (4, 4)),
        (lambda: numbers(4, 4).to_sparse(), torch.sparse.mm, (4, 4)),
        (lambda: numbers(4, 4).to_sparse_csr(), lambda x, w: x @ w, (4, 4)),
        (lambda: numbers(4, 4).to_mkldnn(), lambda x, w: (x * w.to_mkldnn()).to_dense(), (4, 4)),
        (lambda: numbers(4).as_subclass(Tagged), lambda x, w: Scaled.apply(w, x), (4,)),
        (lambda: numbers(4, dtype=torch.complex64).conj(), lambda x, w: x * w, (4,)),
        (lambda: numbers(4, dtype=torch.complex64).conj().imag, lambda x, w: x * w, (4,)),
    ],
    ids=["jagged", "nested", "sparse", "rows", "opaque", "subclass", "conjugate", "negative"],
)
def test_a_tensor_that_is_no_plain_view_of_a_storage_comes_back_as_it_is(make, function, shape):
    x = make()
    dtype = x.dtype if x.is_complex() else torch.float32
    wanted = gradient_of(lambda w: function(x, w), *shape, dtype=dtype)
    with SavedTensors() as meter:
        found = gradient_of(lambda w: function(x, w), *shape, dtype=dtype)
    assert torch.equal(found, wanted)
    assert meter.live_bytes == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_graph_with_jagged_outputs_is_gone_when_it_is_dropped_and_its_plain_tensors_count():
    class Nothing(torch.autograd.Function):
        """Saves its output, which is jagged, and a plain tensor."""

        @staticmethod
        def forward(ctx, x, plain):
            ctx.save_for_backward(y := x.clone(), plain)
            return y

        @staticmethod
        def backward(ctx, grad):
            y, _ = ctx.saved_tensors
            assert type(y) is type(grad)
            assert torch.equal(y.offsets(), torch.tensor([0, 3, 8]))
            return grad, None

    x, plain = jagged(3, 5).requires_grad_(), torch.ones(KIB // 4)
    gc.collect()
    gc.disable()
    try:
        with SavedTensors() as meter:
            y = Nothing.apply(x, plain)
            assert meter.live_bytes == KIB
            y.values().sum().backward()
            y = Nothing.apply(x, plain)
            gone = weakref.ref(y.values().untyped_storage()), weakref.ref(y.grad_fn)
            del y
            assert ([ref() for ref in gone], meter.live_bytes) == ([None, None], 0)
    finally:
        gc.enable()
    assert torch.equal(x.grad.values(), torch.ones(8, 4))


def jagged(*rows):
    return torch.nested.nested_tensor([numbers(row, 4) for row in rows], layout=torch.jagged)


def padded(x):
    return torch.nested.to_padded_tensor(x * x, 0.0)


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
        Grow.apply(x.exp()).sum().backward()
        caches = 0
    assert meter.peak_bytes == 11 * KIB
