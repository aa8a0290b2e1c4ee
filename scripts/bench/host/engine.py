"""Stand-ins for the modules of Transformer Engine: one dispatched operation for each kernel that they launch, without results.

Operations have shapes and no kernels, so they run on fake tensors only. Weight gradients are added to `main_grad` by the matrix
product that makes them, as with Megatron's `--gradient-accumulation-fusion`. The Python of Transformer Engine's own modules is
not there: counts of calls are lower bounds.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import experts, moe_utils
from torch import Tensor, nn

from megatron_epp.mcore.model.core_attention import RelayAttention
from megatron_epp.runtime.attention import kernels

_SHAPES: dict[str, tuple[str, Callable[..., Any]]] = {
    "gemm": ("(Tensor x, Tensor weight) -> Tensor", lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[0])),
    "gemm_dgrad": ("(Tensor grad, Tensor weight) -> Tensor", lambda grad, w: grad.new_empty(*grad.shape[:-1], w.shape[1])),
    "gemm_wgrad": ("(Tensor grad, Tensor x, Tensor(a!) total) -> ()", lambda grad, x, total: None),
    "norm": ("(Tensor x, Tensor weight) -> (Tensor, Tensor)", lambda x, w: (torch.empty_like(x), x.new_empty(x.shape[:-1]))),
    "norm_backward": (
        "(Tensor grad, Tensor x, Tensor scale, Tensor weight) -> (Tensor, Tensor)",
        lambda grad, x, scale, weight: (torch.empty_like(x), torch.empty_like(weight)),
    ),
    "rope": ("(Tensor x, Tensor angles) -> Tensor", lambda x, angles: x.new_empty(x.shape)),
    "swiglu": ("(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2)),
    "swiglu_backward": ("(Tensor grad, Tensor x) -> Tensor", lambda grad, x: torch.empty_like(x)),
    "weighted_swiglu_backward": (
        "(Tensor grad, Tensor x, Tensor probs) -> (Tensor, Tensor)",
        lambda grad, x, probs: (torch.empty_like(x), torch.empty_like(probs)),
    ),
    "attention": (
        "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)",
        lambda q, k, v: (q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2])),
    ),
    "attention_backward": (
        "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out) -> (Tensor, Tensor, Tensor)",
        lambda grad, q, k, v, out: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    ),
    "row_map": ("(Tensor routing) -> Tensor", lambda routing: routing.new_empty(routing.shape, dtype=torch.int32)),
    "permute": ("(Tensor x, Tensor rows, int count) -> Tensor", lambda x, rows, count: x.new_empty(count, x.shape[1])),
    "permute_with_probs": (
        "(Tensor x, Tensor probs, Tensor rows, int count) -> (Tensor, Tensor)",
        lambda x, probs, rows, count: (x.new_empty(count, x.shape[1]), probs.new_empty(count)),
    ),
    "permute_with_probs_backward": (
        "(Tensor grad, Tensor probs, Tensor rows, int count) -> (Tensor, Tensor)",
        lambda grad, probs, rows, count: (grad.new_empty(count, grad.shape[1]), torch.empty_like(probs)),
    ),
}
"""Schema of each operation, and its result by shapes."""

for _name in ("gemm", "gemm_dgrad", "gemm_wgrad"):
    _SHAPES[f"expert_{_name}"] = _SHAPES[_name]
_library = torch.library.Library("epp_host_bench", "DEF")
for _name, (_schema, _result) in _SHAPES.items():
    _library.define(f"{_name}{_schema}")
    _library.impl(_name, _result, "Meta")
ops = torch.ops.epp_host_bench
OPERATIONS = frozenset(name for name in _SHAPES if not name.startswith("expert_"))
"""Operations that Transformer Engine's Python launches one by one; those of experts leave in one call of it."""
ROW_MAP_LAUNCHES = 3
"""Kernels that make the map of rows by which tokens are permuted."""


class Store:
    """Queue of delayed weight gradients, as Transformer Engine's linear layers have one."""

    def __init__(self, delays: bool) -> None:
        self.delays, self.context = delays, queue.Queue[Any]()

    def delay_wgrad_compute(self) -> bool:
        return self.delays

    def put(self, entry: Sequence[Any], function: Callable[..., Any]) -> None:
        self.context.put((entry, function))


class _Products(torch.autograd.Function):
    """Matrix products with one weight, or with an expert's for each part of the tokens, behind a norm if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear, splits: list[int] | None, norm: Tensor | None, *weights: Tensor) -> Tensor:
        normed, scale = (x, None) if norm is None else ops.norm(x, norm)
        product = ops.gemm if splits is None else ops.expert_gemm
        outputs = [product(part, weight) for part, weight in zip(_parts(normed, splits), weights, strict=True)]
        ctx.layer, ctx.splits, ctx.has_norm = layer, splits, norm is not None
        ctx.save_for_backward(x, normed, *(() if norm is None else (scale, norm)), *weights)
        return outputs[0] if splits is None else x.new_empty(len(x), weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, normed, *rest = ctx.saved_tensors
        scale, norm, *weights = rest if ctx.has_norm else (None, None, *rest)
        (grad,), layer = grads, ctx.layer
        product = ops.gemm_dgrad if ctx.splits is None else ops.expert_gemm_dgrad
        products = [product(part, weight) for part, weight in zip(_parts(grad, ctx.splits), weights, strict=True)]
        compute = partial(layer.weight_gradients, ctx.splits)
        if layer.wgrad_store.delay_wgrad_compute():
            layer.wgrad_store.put([normed, grad], compute)
        else:
            compute(normed, grad)
        dx = products[0] if ctx.splits is None else torch.empty_like(normed)
        dnorm = None
        if ctx.has_norm:
            dx, dnorm = ops.norm_backward(dx, x, scale, norm)
        delays = layer.wgrad_store.delay_wgrad_compute()
        return dx, None, None, dnorm, *(None if delays else layer.placeholder.detach() for _ in weights)


def _parts(x: Tensor, splits: list[int] | None) -> Sequence[Tensor]:
    return (x,) if splits is None else torch.split(x, splits)


class Linear(nn.Module):
    """Stand-in for a linear layer, for one with a norm before it, and for a grouped one: their launches are the arguments."""

    has_norm = False

    def __init__(self, inputs: int, outputs: int, *, config: Any, num_gemms: int = 0, **_: Any) -> None:
        super().__init__()
        self.fuse_wgrad_accumulation, self.use_bias = True, False
        self.wgrad_store = Store(config.delay_wgrad_compute)
        if num_gemms:
            self.num_gemms = num_gemms
        for number in range(max(1, num_gemms)):
            weight = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.bfloat16))
            weight.main_grad = torch.empty(outputs, inputs)  # type: ignore[attr-defined]
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]
            setattr(self, f"weight{number if num_gemms else ''}", weight)
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs, dtype=torch.bfloat16)) if self.has_norm else None
        self.placeholder = torch.empty(outputs, inputs, dtype=torch.bfloat16)

    @property
    def weights(self) -> list[Tensor]:
        return [parameter for name, parameter in self.named_parameters() if name.startswith("weight")]

    def forward(self, x: Tensor, splits: list[int] | None = None) -> tuple[Tensor, None]:
        output: Tensor = _Products.apply(x, self, splits, self.layer_norm_weight, *self.weights)
        return output, None

    def weight_gradients(self, splits: list[int] | None, x: Tensor, grad: Tensor) -> None:
        product = ops.gemm_wgrad if splits is None else ops.expert_gemm_wgrad
        for own_grad, own_x, weight in zip(_parts(grad, splits), _parts(x, splits), self.weights, strict=True):
            product(own_grad, own_x, weight.main_grad)  # type: ignore[attr-defined]

    def backward_dw(self) -> None:
        entry, function = self.wgrad_store.context.get_nowait()
        function(*entry)


class NormLinear(Linear):
    has_norm = True


class GroupedLinear(Linear):
    """A matrix product, and so a launch, for each expert."""

    def __init__(self, num_gemms: int, inputs: int, outputs: int, *, config: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, config=config, num_gemms=num_gemms)


class Norm(nn.Module):
    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = _Normed.apply(x, self.weight)
        return normed


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Return an autograd function of two static methods."""
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def _keeping(run: Callable[..., Tensor | tuple[Tensor, ...]], count: int | None = None) -> Callable[..., Any]:
    """Return a forward that keeps its tensors, and the results from the one at `count` on, which it does not return."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        result = run(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.others = [value for value in inputs if not isinstance(value, Tensor)]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), *outputs[count:] if count else ())
        return outputs[0] if count == 1 or len(outputs) == 1 else outputs

    return forward


_Normed = _function(
    "_Normed",
    _keeping(ops.norm, 1),
    lambda ctx, grad: ops.norm_backward(grad, ctx.saved_tensors[0], ctx.saved_tensors[2], ctx.saved_tensors[1]),
)
_Rotated = _function("_Rotated", _keeping(ops.rope), lambda ctx, grad: (ops.rope(grad, ctx.saved_tensors[1]), None))
_Gated = _function("_Gated", _keeping(ops.swiglu), lambda ctx, grad: ops.swiglu_backward(grad, *ctx.saved_tensors))
_WeightedGated = _function(
    "_WeightedGated",
    _keeping(lambda x, probs: ops.swiglu(x)),
    lambda ctx, grad: ops.weighted_swiglu_backward(grad, *ctx.saved_tensors),
)
_Permuted = _function(
    "_Permuted",
    _keeping(ops.permute_with_probs),
    lambda ctx, grad, _: (
        *ops.permute_with_probs_backward(grad, *ctx.saved_tensors[1:3], len(ctx.saved_tensors[0])),
        *(None, None),
    ),
)
_Unpermuted = _function(
    "_Unpermuted",
    _keeping(ops.permute),
    lambda ctx, grad: (ops.permute(grad, ctx.saved_tensors[1], len(ctx.saved_tensors[0])), None, None),
)


def _permute(x: Tensor, probs: Tensor, routing: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = routing
    for _ in range(ROW_MAP_LAUNCHES):
        rows = ops.row_map(rows)
    return *_Permuted.apply(x, probs, rows, num_out_tokens), rows


def _unpermute(x: Tensor, rows: Tensor, merging_probs: Tensor | None, restore_shape: Sequence[int], **_: Any) -> Tensor:
    unpermuted: Tensor = _Unpermuted.apply(x, rows, restore_shape[0])
    return unpermuted


def _sort(x: Tensor, probs: Tensor, sizes: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    permuted: tuple[Tensor, Tensor] = _Permuted.apply(x, probs, ops.row_map(sizes), len(x))
    return permuted


def _sort_alone(x: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    unpermuted: Tensor = _Unpermuted.apply(x, ops.row_map(sizes), len(x))
    return unpermuted


class Backend(LocalSpecProvider):
    """Modules of a layer spec, as `TESpecProvider` names them."""

    def column_parallel_linear(self) -> type:
        return Linear

    def row_parallel_linear(self) -> Any:
        return Linear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return Norm

    def core_attention(self) -> type:
        return RelayAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        parts = experts.GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return partial(experts.TEGroupedMLP, submodules=parts)


KERNEL = replace(
    kernels.EXACT_ATTENTION,
    forward=lambda q, k, v, table, scale: ((result := ops.attention(q, k, v))[0], result[1:]),
    backward=lambda grad, q, k, v, out, saved, table, scale: ops.attention_backward(grad, q, k, v, out),
)
"""Attention kernel: one launch, as a fused one is."""


@contextmanager
def in_place() -> Iterator[None]:
    """Put the stand-ins into the places of Transformer Engine's modules and functions in a block."""
    replaced = (
        (gpt_layer_specs, "TESpecProvider", Backend),
        (kernels, "choose", lambda *_, **__: KERNEL),
        (rope_utils, "fused_apply_rotary_pos_emb", lambda x, angles, interleaved: _Rotated.apply(x, angles)),
        (mlp, "bias_swiglu_impl", lambda x, *_: _Gated.apply(x)),
        (experts, "weighted_bias_swiglu_impl", lambda x, bias, probs, *_: _WeightedGated.apply(x, probs)),
        (moe_utils, "HAVE_TE", True),
        (moe_utils, "fused_permute_with_probs", _permute),
        (moe_utils, "fused_unpermute", _unpermute),
        (moe_utils, "fused_permute", partial(_permute, probs=None)),
        (moe_utils, "fused_sort_chunks_by_index", _sort_alone),
        (moe_utils, "fused_sort_chunks_by_index_with_probs", _sort),
    )
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield
