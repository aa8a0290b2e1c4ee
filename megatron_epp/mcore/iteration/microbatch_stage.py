"""A caller's model chunk as a pipeline stage: runs the caller's forward step and loss on whole microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor

from megatron_epp.mcore.iteration.microbatch_agreement import AgreedShapes
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatches
from megatron_epp.mcore.iteration.schedule_call import ScheduleCall, checked_step, numbered_by
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.model.layer_recompute import run_again
from megatron_epp.mcore.model.replaced import marked, problems, put
from megatron_epp.mcore.model.stage import ModelStage
from megatron_epp.plan import EppError, Plan
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.memory_use import kept_bytes


class MicrobatchStage(ModelStage):
    """One model chunk of a caller. Implements `runtime.context.Stage` by Megatron's own forward and backward steps.

    `virtual_stage` is the number of the chunk on its rank; None if that has one.
    """

    around: Callable[[ChunkContext], AbstractContextManager[None]] = staticmethod(lambda context: nullcontext())
    """Returns the context in which the forward step of a chunk runs."""

    def __init__(self, model: torch.nn.Module, config: Any, is_last: bool, virtual_stage: int | None, shards: int) -> None:
        super().__init__(model, unwrap_model(model), config, shards)
        self.is_last, self._virtual_stage = is_last, virtual_stage
        self.kv_cache = SlicedKVCache()  # stays empty: microbatches are whole
        # By the layers' `forward`: Megatron's own recompute has one setting for all microbatches, and a plan one for each.
        self._num_recomputed = 0
        for number, layer in enumerate(() if self.recompute_obstacle else layers_of(model)):
            put(layer, "forward", partial(self._run_layer, number, layer.forward))
        self._replaced = marked(model)

    @property
    def recompute_obstacle(self) -> str:
        """Reason why plans cannot choose which layers recompute, with a remedy; empty if they can."""
        language_model = language_model_of(self.model)
        if language_model is None:
            name = type(unwrap_model(self.model)).__name__
            return f"{name} has no decoder with layers, nor a language_model with one, so its own settings decide"
        for config in (self.config, getattr(language_model.decoder, "config", None)):
            if (own := getattr(config, "recompute_granularity", None)) is not None:
                return (
                    f"the model's own recompute_granularity={own} decides: leave it out, and plans recompute as many layers as "
                    "the memory cap needs"
                )
        return ""

    def begin(
        self,
        call: ScheduleCall,
        microbatches: Microbatches,
        agreed: AgreedShapes,
        plan: Plan,
        order: Sequence[int],
        saved: SavedTensors | None,
        before_last_gradient: Callable[[], None],
        reduce_gradients: Callable[[], None],
    ) -> None:
        """Start an iteration: `order` has the microbatch of every chunk of the plan."""
        self._call, self._microbatches, self._shapes, self._order = call, microbatches, agreed.here, order
        self.reads_all = not agreed.is_unread
        """True if losses may read logits of all tokens."""
        self._tokens = {index: plan.padded_tokens(chunk) for chunk, index in enumerate(order)}
        self._saved = saved
        if problem := next(problems(self.model, self._replaced), ""):
            raise EppError(problem)
        self.enter(before_last_gradient, reduce_gradients)
        self.results: dict[int, list[Any]] = {}
        self.kept_bytes: dict[int, int] = {}
        """Bytes that each chunk's forward left allocated, or saved for its backward."""
        self.weight_bytes: dict[int, int] = {}
        """Bytes that each chunk's backward kept for its weight gradients."""
        self.total_tokens = torch.zeros([], dtype=torch.int, device=self._device)

    def end(self) -> None:
        """Let go of the iteration's microbatches, and leave layers as they were, should another schedule run them."""
        del self._call, self._microbatches
        super().end()
        self._num_recomputed = 0

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Any:
        index, call = self._order[context.chunk], self._call
        store: list[Any] = []
        before, self._num_recomputed = kept_bytes(self._saved), context.recompute.num_layers
        # Megatron's function, since it also sets the scales of auxiliary losses and divides losses of two and of three parts.
        with numbered_by(index), self.around(context):
            output, num_tokens = schedules.forward_step(
                checked_step(call, index) if self.is_last else call.forward_step_func,
                self._microbatches.at(index),
                self.model,
                call.num_microbatches,
                None if hidden is None else hidden.view(self._shape(index)),
                store,
                self.config,
                cp_group_size=call.context_ranks,
                collect_non_loss_data=call.collect_non_loss_data,
                is_first_microbatch=False,  # `forget_casts` renews casts, and the first backward adds to gradients, too
                current_microbatch=index,
                vp_stage=self._virtual_stage,
                is_last_stage=self.is_last,
            )
        get_attr_wrapped_model(self.model, "set_input_tensor")([None])  # or it would hold the last one
        self.kept_bytes[context.chunk] = kept_bytes(self._saved) - before
        if self.is_last:
            self.results[index] = store
            self.total_tokens += num_tokens
        else:
            self._check(index, output)
        return output

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            grad = grad.view(self._shape(self._order[context.chunk]))
        before = kept_bytes(self._saved)
        with nullcontext() if self.weights is None else self.weights.backward_of(context.chunk):
            schedules.backward_step(input_tensor=None, output_tensor=output, output_tensor_grad=grad, config=self.config)
        if self.weights is not None and context.chunk in self.weights.kept:
            self.weight_bytes[context.chunk] = self.kept_bytes[context.chunk] + kept_bytes(self._saved) - before

    def _run_layer(self, number: int, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if number >= self._num_recomputed or not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return run_again(_as_now(run, self._device.type), args, kwargs, self._in_fp8)

    def _shape(self, index: int) -> tuple[int, int, int]:
        shape = self._shapes[index]
        return self._tokens[index] // shape.rows // self._shards, shape.rows, self.config.hidden_size

    def _check(self, index: int, output: object) -> None:
        wanted = self._shape(index)
        if not isinstance(output, Tensor) or tuple(output.shape) != wanted:
            got = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise EppError(
                f"the forward step of microbatch {index} made {got} where lengths {_shown(self._shapes[index].lengths)} ask "
                f"for {list(wanted)}: give the function that finds lengths in a microbatch, shape_of"
            )
        if output.dtype != (sent := self.message(1)[1]):
            raise EppError(
                f"the forward step of microbatch {index} made {output.dtype}, but messages between stages are {sent}: set "
                "pipeline_dtype in the model's configuration"
            )


def _as_now(run: Callable[..., Any], device: str) -> Callable[..., Any]:
    if not torch.is_autocast_enabled(device):
        return run
    dtype = torch.get_autocast_dtype(device)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype):
            return run(*args, **kwargs)

    return call


def _shown(lengths: Sequence[int]) -> str:
    return f"{list(lengths)}" if len(lengths) <= 8 else f"{list(lengths[:8])} and {len(lengths) - 8} more"


def layers_of(model: torch.nn.Module) -> Sequence[Any]:
    """Return the layers of a model chunk's decoder, which a multimodal model has inside; none if there is no decoder."""
    language_model = language_model_of(model)
    return () if language_model is None else language_model.decoder.layers
