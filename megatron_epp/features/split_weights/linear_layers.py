"""Split weight gradients of linear layers: the changes of `--epp-split-weight-gradient` to a model.

Megatron's own layers compute their output here. Transformer Engine's delay their gradients with `delay_wgrad_compute`: a
backward puts the inputs of the weight gradient into the layer's `wgrad_store`, a queue, from which `backward_dw` takes them to
compute it and call the hooks of data parallelism. A queue would force W into the order of B, so a chunk keeps its entry, and
puts it back right before `backward_dw`. See WeightGradStore and TransformerEngineBaseModule, 2.7 to 2.18.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_epp.features.split_weights.deferred_gradients import Linear, WeightGradients
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.block_loss import all_tokens, weight_gradient
from megatron_epp.mcore.model.replaced import HOOKS, mark, put
from megatron_epp.mcore.model.stage import timed
from megatron_epp.plan import EppError, Op, Plan, Remedy
from megatron_epp.plan.flags import AUTO
from megatron_epp.runtime.executor import Handler
from megatron_epp.runtime.links.objects import from_each_of_job

if TYPE_CHECKING:
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

_OF_MEGATRON = ColumnParallelLinear, RowParallelLinear
_OF_A_CHUNK = 2
"""Number of leading items of a store entry that belong to a chunk (input, output's gradient); others belong to the layer."""


def split_weight_gradients(model: Any, args: argparse.Namespace, vp_stage: int | None) -> None:
    """Split the weight gradients of all linear layers of a model chunk, as Megatron builds it, or raise `EppError`.

    An output layer that is given the embedding's weight stays unchanged: its gradient is added to the embedding's.
    """
    _, obstacles = split_where_possible(model)
    if obstacles:
        raise EppError(f"--epp-split-weight-gradient cannot split {obstacles[0]}, or leave it out")


def split_built(models: Sequence[torch.nn.Module], args: argparse.Namespace) -> None:
    """Split weight gradients of the chunks of a program where layers can delay them, and where ``auto`` finds that all can.

    A collective call. Raises `EppError`, on every rank, if no layer can.
    """
    if args.epp_split_weight_gradient == AUTO:  # settled on all ranks together
        why = next(filter(None, from_each_of_job(next(_whole(args, models), ""))), "")
        args.epp_split_weight_gradient = not why
        if why and args.rank == 0 and args.pipeline_model_parallel_size > 1:
            logger.info("weight gradients are computed with their backwards, since %s", why)
    if not args.epp_split_weight_gradient:
        return
    total = 0
    for number, model in enumerate(models):
        num_split, obstacles = split_where_possible(model)
        total += num_split
        if obstacles:
            logger.warning(
                "chunk %d computes weight gradients of %d layers with their backward: %s", number, len(obstacles), obstacles[0]
            )
    if not any(from_each_of_job(total)):
        text, remedy = "no layer of this model can delay its weight gradient", Remedy("drop", "split_weight")
        raise EppError(text, remedy).with_context(names=names_of(args))


def split_where_possible(model: Any) -> tuple[int, list[str]]:
    """Make every linear layer of a model chunk that can delay its weight gradient pass it to the chunk's `weight_gradients`.

    Returns the number of these layers, and the others, which compute them in their backward, with the reason and a remedy.
    """
    able, obstacles = _linear_layers(model)
    if hasattr(model, "weight_gradients"):  # an earlier schedule has split them
        return len(able), obstacles
    model.weight_gradients = gradients = WeightGradients()
    for module in able:
        if isinstance(module, _OF_MEGATRON):
            # Not `forward`, which also gathers the output or adds it up over tensor-parallel ranks.
            put(module, "_forward_impl", functools.partial(_forward, module, module._forward_impl, gradients), wraps=False)
        else:
            _take_over(module, gradients)
    return len(able), obstacles


class SplitWeights(RunFeature):
    """Weight gradients of a run's stages as actions of their own."""

    def __init__(self, run: Run) -> None:
        self._stages = run.stages
        for stage in run.stages.values():
            # Of the configuration, whose timers a training sets late.
            stage.weights.timed = lambda config=stage.config: timed(config.timers, "backward-compute")

    def running(
        self, plan: Plan, inputs: Callable[[int], Any] | None, reduction: Any, handlers: Mapping[Op, Handler]
    ) -> AbstractContextManager[Mapping[Op, Handler]]:
        return nullcontext(weight_handlers(plan, self._stages))


def _whole(args: argparse.Namespace, models: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Yield why weight gradients are computed with their backwards where nothing else is asked for."""
    if args.pipeline_model_parallel_size == 1:
        yield "there is one stage"
    if args.epp_order == "given":
        yield "the order is given"
    if args.tensor_model_parallel_size > 1:  # which no costs say, and a model that is changed has no way back
        yield "whole backwards overlap their exchange between tensor-parallel ranks with them"
    config = get_model_config(models[0])
    if config.no_sync_func is not None and config.grad_sync_func is None:  # see `Reduction`
        yield "reductions start by hooks on gradients, which are to come in the last backward"
    for able, obstacles in map(_linear_layers, models):
        yield from obstacles
        if not able:
            yield "a stage has no linear layer of Megatron's or Transformer Engine's"


def _linear_layers(model: torch.nn.Module) -> tuple[list[Any], list[str]]:
    """Return the linear layers that can delay their weight gradients, and the others, each with the reason and a remedy."""
    able, obstacles = list[Any](), list[str]()
    for name, module in model.named_modules():
        if getattr(module, "is_expansion", False):  # core attention computes its gradient (`latents`)
            continue
        if isinstance(module, _OF_MEGATRON):
            able.append(module)
        elif _delays(module) and next(module.parameters(recurse=False), None) is not None:
            if reason := obstacle(module):
                obstacles.append(f"{name} ({type(module).__name__}): {reason}")
            else:
                able.append(module)
    return able, obstacles


def _delays(module: torch.nn.Module) -> bool:
    """Return True for a linear layer that can delay its weight's gradient; a layer of linear ones only asks these to."""
    return hasattr(module, "backward_dw") and not any(hasattr(child, "backward_dw") for child in module.children())


def _forward(
    module: torch.nn.Module,
    original: Callable[..., Tensor],
    gradients: WeightGradients,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """Replace `_forward_impl`. Outside of plans, without gradients, and with another module's weight the original runs."""
    needs_gradients = torch.is_grad_enabled() and input.requires_grad and weight.requires_grad
    if not (gradients.in_plan and needs_gradients and weight is module.weight):
        return original(input=input, weight=weight, bias=bias, **options)
    # The backwards of these are the reduce-scatter and the all-reduce of the input's gradient. Megatron's own function overlaps
    # them with the weight's gradient, which is not computed there now.
    tp_group, sequence_parallel = options["tp_group"], options["sequence_parallel"]
    shares_input = sequence_parallel or options["allreduce_dgrad"]
    x = all_tokens(input, sequence_parallel, tp_group) if shares_input else input
    product = functools.partial(
        weight_gradient, weight, tp_group if sequence_parallel else None, options["gradient_accumulation_fusion"]
    )
    output = gradients.linear(x, input, Linear(weight, product))
    return output if bias is None else output + bias


def obstacle(module: Any) -> str:
    """Return the reason why a layer cannot delay its weight's gradient, with a remedy; empty if it can."""
    store = getattr(module, "wgrad_store", None)
    if store is None or not store.delay_wgrad_compute():
        return "it does not put off its weight's gradient: build it with transformer_impl local"
    if not _weights(module):
        return "it leaves its weight's gradient to the backward's hooks: use Transformer Engine 2.7 or newer"
    if getattr(module, "use_bias", False):
        return "its bias takes a gradient with every weight's: build it without (add_bias_linear, add_qkv_bias)"
    if hasattr(module, "num_gemms") and not module.fuse_wgrad_accumulation:
        return "it would hold a gradient of all experts for every chunk: leave gradient_accumulation_fusion on"
    return ""


def _take_over(module: Any, gradients: WeightGradients) -> None:
    store, weights = module.wgrad_store, _weights(module)
    queue: Callable[[list[Any], Callable[..., Any]], None] = store.put

    def keep(entry: list[Any], function: Callable[..., Any]) -> None:
        leaves, shape = tree_flatten(entry[:_OF_A_CHUNK])
        tensors, rebuild = _tensors_of(leaves)
        rest = entry[_OF_A_CHUNK:]
        if module.fuse_wgrad_accumulation:
            for weight in weights:  # or autograd would add to the placeholders of earlier backwards by a large kernel
                weight.grad = None

        def compute(tensors: Sequence[Tensor]) -> None:
            queue([*tree_unflatten(rebuild(tensors), shape), *rest], function)
            if module.fuse_wgrad_accumulation:
                for weight in weights:  # hooks require one for every W, and a backward of fused kernels leaves only one
                    if weight.grad is None:
                        weight.grad = weight.new_zeros(()).expand_as(weight)
            module.backward_dw()

        gradients.put_off(weights[0], tensors, compute)

    store.put = keep
    mark(module, HOOKS)  # the weights that delay their gradients are known


def _tensors_of(leaves: Sequence[Any]) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], list[Any]]]:
    """Return the tensors of a store entry's items, and a function that makes the items of them again.

    Items cast to FP8 are no tensors, but objects with some: bytes and scales, by rows or by columns.
    """
    tensors: list[Any] = []
    shells: list[tuple[Any, list[int | None]]] = []  # of each item: its object without tensors, and where these are
    for leaf in leaves:
        parts, cast = ([leaf], None) if isinstance(leaf, Tensor) else _copied(leaf).prepare_for_saving()
        shells.append((cast, [None if part is None else len(tensors) + number for number, part in enumerate(parts)]))
        tensors += parts
    present = [number for number, tensor in enumerate(tensors) if tensor is not None]

    def rebuild(held: Sequence[Tensor]) -> list[Any]:
        by_number = dict(zip(present, held, strict=True))
        items = []
        for cast, numbers in shells:
            parts = [None if number is None else by_number[number] for number in numbers]
            if cast is not None:
                cast.restore_from_saved(parts)
            items.append(parts[0] if cast is None else cast)
        return items

    return [tensors[number] for number in present], rebuild


def _copied(cast: Any) -> Any:
    """Copy an object without its tensors' memory. Python's own copies cannot: the class takes tensors."""
    copied = object.__new__(type(cast))
    vars(copied).update(vars(cast))
    return copied


def _weights(module: torch.nn.Module) -> list[Tensor]:
    """Return the weights whose gradient hooks wait for `backward_dw`."""
    return [p for p in module.parameters(recurse=False) if getattr(p, "skip_backward_post_hook", False)]
