"""Stands in for Transformer Engine's linear layers where there is no GPU: what Megatron and this package see of them.

Written from Transformer Engine's documentation of `delay_wgrad_compute`, `WeightGradStore` and `backward_dw` (2.7 to 2.18).
With `--spec tests.support.mcore.engine_stand_in layer_spec` a GPT has these layers, on one tensor-parallel rank.
"""

import queue
from functools import partial

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
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


def _layer(linear):
    attention = SelfAttentionSubmodules(linear_qkv=linear, core_attention=DotProductAttention, linear_proj=linear)
    parts = MLPSubmodules(linear_fc1=linear, linear_fc2=linear)
    in_layer = hasattr(MLP, "as_mlp_submodule")  # since 0.18
    mlp = partial(MLP.as_mlp_submodule, submodules=parts) if in_layer else ModuleSpec(module=MLP, submodules=parts)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


layer_spec, fused_layer_spec = _layer(StandInParallelLinear), _layer(FusedStandInParallelLinear)


def pretend():
    """Megatron asks for the version of Transformer Engine before it lets layers delay anything."""
    from megatron.training import arguments

    arguments.is_te_min_version = lambda *_: True
