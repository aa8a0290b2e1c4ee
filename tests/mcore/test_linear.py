"""Demands of `--epp-split-weight-gradient` on a model's linear layers."""

import contextlib
import functools
import queue
import sys
import types
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_epp.features.split_weights import linear_layers
from megatron_epp.mcore.model.block_loss import weight_gradient
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import EppError
from megatron_epp.runtime.autograd.saved import SavedTensors


class Store:
    def __init__(self, enabled):
        self.enabled, self.context = enabled, queue.Queue()

    def delay_wgrad_compute(self):
        return self.enabled

    def put(self, tensors, function):
        assert self.enabled
        self.context.put([tensors, function])

    def pop(self):
        tensors, function = self.context.get_nowait()
        return function(*tensors), tensors


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, x, layer, is_first_microbatch):
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.is_first_microbatch = layer, is_first_microbatch
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        entry = [x.flatten(0, -2), grad.flatten(0, -2)]
        compute = partial(layer.weight_gradient, is_first_microbatch=ctx.is_first_microbatch)
        if layer.wgrad_store.delay_wgrad_compute():
            layer.wgrad_store.put(entry, compute)
            found = None
        else:
            found, _ = compute(*entry)
        if layer.fuse_wgrad_accumulation and hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            found = layer.placeholder(weight)
        return found, grad @ weight, None, None


class StandInLinear(nn.Module):
    """``x @ weight.t()``, the weight's gradient now or in `backward_dw`.

    fuse_wgrad_accumulation: it is added to the weight's `main_grad` at once; in the first microbatch it takes its place.
    """

    def __init__(self, inputs, outputs, delays, fuse_wgrad_accumulation=False, use_bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.fuse_wgrad_accumulation, self.use_bias = fuse_wgrad_accumulation, use_bias
        self._placeholder = None
        self.wgrad_store, self.wgrad_accumulation_and_reduce_hooks = Store(delays), []
        if delays:
            self.weight.skip_backward_post_hook = True

    def forward(self, x, is_first_microbatch=None):
        return _Product.apply(self.weight, x, self, is_first_microbatch)

    def weight_gradient(self, x, grad, is_first_microbatch=None):
        if not self.fuse_wgrad_accumulation:
            return grad.t() @ x, None
        if is_first_microbatch:
            self.weight.main_grad.zero_()
        self.weight.main_grad.add_(grad.t() @ x)
        return None, None

    def placeholder(self, weight):
        """A gradient that only stands for the one in `main_grad`: one memory for all, as the engine has it."""
        if self._placeholder is None:
            self._placeholder = torch.full_like(weight, torch.nan)
        return self._placeholder.detach()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook):
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    def backward_dw(self):
        if not self.wgrad_store.delay_wgrad_compute():
            return
        (found, _), _ = self.wgrad_store.pop()
        if not self.fuse_wgrad_accumulation:
            self.weight.grad = found
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()


class StandInParallelLinear(StandInLinear):
    """Stand-in for Megatron's column- and row-parallel wrappers of such a layer, on one rank."""

    def __init__(self, input_size, output_size, *, config, init_method, bias, **_):
        assert not bias
        assert config.tensor_model_parallel_size == 1
        super().__init__(input_size, output_size, config.delay_wgrad_compute, fuse_wgrad_accumulation=True)
        init_method(self.weight)
        self.weight.allreduce = True
        self.is_first_microbatch = True

    def forward(self, x):
        first, self.is_first_microbatch = self.is_first_microbatch, False
        return super().forward(x, first), None


class OtherLinear(nn.Linear):
    """Neither Megatron's nor one that puts off its weight's gradient."""

    def backward_dw(self) -> None:
        """Nothing here asks for it."""


def unmarked() -> nn.Module:
    layer = StandInLinear(4, 4, delays=True)
    del layer.weight.skip_backward_post_hook
    return layer


def experts() -> nn.Module:
    layer = StandInLinear(4, 4, delays=True)
    layer.num_gemms = 2
    return layer


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (OtherLinear(4, 4), "transformer_impl local"),
        (StandInLinear(4, 4, delays=False), "transformer_impl local"),
        (unmarked(), "Transformer Engine 2.7 or newer"),
        (StandInLinear(4, 4, delays=True, use_bias=True), "add_bias_linear"),
        (experts(), "gradient_accumulation_fusion"),
    ],
)
def test_layers_that_cannot_be_split_are_refused_by_name(layer: nn.Module, says: str) -> None:
    kind = type(layer).__name__
    with pytest.raises(EppError, match=rf"--epp-split-weight-gradient cannot split 1 \({kind}\): .*{says}.*, or leave it out"):
        linear_layers.split_weight_gradients(nn.Sequential(nn.LayerNorm(4), layer), Namespace(), None)


@pytest.mark.parametrize("in_plan", [False, True])
def test_a_layer_has_an_edge_to_its_weight_in_a_programs_own_calls_alone(in_plan: bool) -> None:
    gradients, weight = linear_layers.WeightGradients(), nn.Parameter(torch.eye(2))
    gradients.in_plan = in_plan
    options = {"sequence_parallel": False, "allreduce_dgrad": False, "gradient_accumulation_fusion": False, "tp_group": None}
    output = linear_layers._forward(
        types.SimpleNamespace(weight=weight),  # type: ignore[arg-type]
        lambda input, weight, bias, **options: input @ weight.t(),
        gradients,
        torch.ones(3, 2, requires_grad=True),
        weight,
        None,
        **options,
    )
    (gradient,) = torch.autograd.grad(output.sum(), weight, allow_unused=True)
    assert (gradient is None) == in_plan


class PuttingOff:
    """Two layers that put off their gradients, and hooks as Megatron's data parallelism has them."""

    def __init__(self, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.layers = [StandInLinear(4, 4, delays=True, fuse_wgrad_accumulation=fused) for _ in range(2)]
        self.fired: list[int] = []
        for number, layer in enumerate(self.layers):
            nn.init.normal_(layer.weight)
            layer.weight.main_grad, layer.weight.grad_added_to_main_grad = torch.zeros(4, 4), False
            layer.register_wgrad_accumulation_and_reduce_hooks(functools.partial(self._accumulate, number))
        self.model = nn.Sequential(self.layers[0], nn.Tanh(), self.layers[1])
        linear_layers.split_where_possible(self.model)
        self.gradients = self.model.weight_gradients
        self.gradients.in_plan = True
        self.inputs = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]

    def _accumulate(self, number: int) -> None:
        weight = self.layers[number].weight
        assert weight.grad is not None  # as Megatron's with --overlap-grad-reduce
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None
        self.fired.append(number)

    def backward(self, chunk: int, keep: bool) -> None:
        with self.gradients.keeping(chunk) if keep else contextlib.nullcontext():
            self.model(self.inputs[chunk]).square().sum().backward()
            self.gradients.finish()

    def expected(self) -> list[torch.Tensor]:
        weights = [layer.weight.detach().clone().requires_grad_() for layer in self.layers]
        for x in self.inputs:
            (torch.tanh(x.detach() @ weights[0].t()) @ weights[1].t()).square().sum().backward()
        return [weight.grad for weight in weights]


@pytest.mark.parametrize("fused", [False, True])
def test_layers_that_put_off_their_gradients_wait_for_w_in_any_order(fused: bool) -> None:
    stage = PuttingOff(fused)
    stage.backward(0, keep=True)
    stage.backward(1, keep=True)
    assert stage.fired == []
    stage.backward(2, keep=False)
    assert stage.fired == [1, 0]
    stage.gradients.run(1)
    stage.gradients.run(0)
    assert stage.fired == [1, 0] * 3
    assert all(layer.wgrad_store.context.empty() for layer in stage.layers)
    for layer, gradient in zip(stage.layers, stage.expected(), strict=True):
        torch.testing.assert_close(layer.weight.main_grad, gradient)
        assert layer.weight.grad is None


class OfWeights(TorchDispatchMode):
    """Names of the operations on tensors as large as a weight, views excepted."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.names = shape, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shapes, aten = [x.shape for x in args if isinstance(x, torch.Tensor)], torch.ops.aten
        if self.shape in shapes and function in (aten.add_.Tensor, aten.add.Tensor, aten.clone.default):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_backwards_before_the_first_w_add_no_placeholders_and_what_they_keep_is_counted() -> None:
    stage = PuttingOff(fused=True)
    with OfWeights(stage.layers[0].weight.shape) as seen:
        for chunk in range(3):
            stage.backward(chunk, keep=True)
        assert seen.names == []
        stage.gradients.run(0)
    assert seen.names == ["aten.add_.Tensor"] * 2  # of the products, to the main gradients of two layers
    stage = PuttingOff()
    with SavedTensors([layer.weight for layer in stage.layers]) as meter:
        stage.backward(0, keep=False)
        assert meter.live_bytes == 0
        stage.backward(0, keep=True)
        assert meter.live_bytes == 2 * 2 * stage.inputs[0].nbytes  # of two layers inputs and gradients, all of one size
        stage.gradients.run(0)
        assert meter.live_bytes == 0


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, "fp32"), (torch.bfloat16, "fp16")])
def test_accumulation_fusion_adds_in_its_own_kernel(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: str) -> None:
    called = []

    def accumulate(name: str, x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        called.append(name)
        main_grad += grad.t() @ x

    kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
    for name in ("fp32", "fp16"):
        setattr(kernels, f"wgrad_gemm_accum_{name}", lambda *tensors, name=name: accumulate(name, *tensors))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    weight = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    weight.main_grad = torch.ones(3, 2, dtype=dtype)
    x, grad = torch.ones(5, 1, 2, dtype=dtype), torch.ones(5, 1, 3, dtype=dtype)
    stands_for_it = weight_gradient(weight, None, True, x, grad)
    assert called == [kernel]
    assert torch.equal(weight.main_grad, torch.full((3, 2), 6.0, dtype=dtype))
    assert weight.grad_added_to_main_grad
    assert stands_for_it.shape == weight.shape


def test_the_backward_of_the_first_forward_adds_to_the_others_wherever_it_comes():
    settings = {"delay_wgrad_compute": False, "tensor_model_parallel_size": 1, "context_parallel_size": 1}
    config = types.SimpleNamespace(**settings, sequence_parallel=False)
    layer = StandInParallelLinear(4, 4, config=config, init_method=nn.init.ones_, bias=False)
    weight = layer.weight
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 4), False
    model = nn.Module()
    model.decoder, model.linear = nn.Module(), layer
    model.decoder.layers = nn.ModuleList()
    MegatronStage(model, config, is_first=False, is_last=False, tp_size=1)
    inputs = [torch.full((2, 4), value, requires_grad=True) for value in (1.0, 10.0)]
    outputs = [layer(x)[0] for x in inputs]
    for output in reversed(outputs):  # as the slices of a sequence
        output.sum().backward()
    assert torch.equal(weight.main_grad, torch.full((4, 4), 2 * (1.0 + 10.0)))
