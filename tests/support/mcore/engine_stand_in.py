"""Linear layers that put their weights' gradients off as Transformer Engine's do, one by one and with faults.

Its own layers train in `test_transformer_engine.py`.
"""

import queue
from functools import partial

import torch
from torch import nn


class Store:
    """Queue of deferred weight gradients, first in, first out."""

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

    fused = False

    def __init__(self, input_size, output_size, *, config, init_method, bias, **_):
        assert not bias
        assert config.tensor_model_parallel_size == 1
        super().__init__(input_size, output_size, config.delay_wgrad_compute, self.fused)
        init_method(self.weight)
        self.weight.allreduce = True
        self.is_first_microbatch = True

    def forward(self, x):
        first, self.is_first_microbatch = self.is_first_microbatch, False
        return super().forward(x, first), None


class FusedStandInParallelLinear(StandInParallelLinear):
    fused = True
