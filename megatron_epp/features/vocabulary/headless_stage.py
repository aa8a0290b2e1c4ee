"""A last stage whose output layer is divided over the pipeline ranks: it ends with its hidden states, and takes the losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.mcore.model.stage import ChunkInputs, MegatronStage
from megatron_epp.mcore.model.trained_rows import own_functions
from megatron_epp.runtime.context import ChunkContext


class HeadlessStage(MegatronStage):
    """The last stage without output layer: its forward returns that layer's input, of which `finish` makes the loss."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._outputs: dict[int, Tensor] = {}
        self._finished: dict[int, Tensor] = {}

    @property
    def has_loss(self) -> bool:
        return False

    @property
    def obstacle(self) -> str:
        own = ", ".join(own_functions(unwrap_model(self.model)))
        changed = own and f"the model has got its own {own}, and shards of the vocabulary compute the loss"
        return changed or super().obstacle

    def begin(self, *args: Any, **named: Any) -> None:
        super().begin(*args, **named)
        self._outputs.clear()
        self._finished.clear()

    def forward(self, context: ChunkContext, hidden: Tensor | None) -> Tensor:
        model: Any = unwrap_model(self.model)
        output: Tensor = model._scale_logits(super().forward(context, hidden))  # muP scales logits: here their input instead
        output = output.to(self.message(1)[1])  # from which Megatron converts what a last stage returns to fp32
        self._outputs[context.chunk] = output
        return output

    def backward(self, context: ChunkContext, output: Tensor, grad: Tensor | None) -> None:
        self._outputs.pop(context.chunk, None)
        super().backward(context, output if grad is not None else self._finished.pop(context.chunk), grad)

    def output(self, chunk: int) -> Tensor:
        """Return the input of the output layer of a chunk, ``[tokens / shards, hidden]``, after its forward."""
        return self._outputs[chunk].detach().flatten(0, 1)

    def finish(self, chunk: int, inputs: ChunkInputs, losses: Tensor, gradient: Tensor | None) -> None:
        """Sum the losses of the tokens that have passed the output layer, ``[rows]``, for the report and for the backward.

        `gradient` is that of the layer's input for tokens of weight one, ``[rows, hidden]`` in fp32, or this tensor-parallel
        rank's part of it; None if no backward follows.
        """
        # Called at N, ahead of the backward, which then starts at this loss and finds the gradient in `_Losses`.
        output, mask, rows = self._outputs[chunk], inputs.loss_mask, inputs.rows
        assert mask is not None  # on a rank with a shard
        if rows is not None:
            losses = losses.new_zeros(mask.numel()).index_copy_(0, rows, losses)
        if gradient is None:
            del self._outputs[chunk]
        else:
            losses = _Losses.apply(output, losses, *self._of_own_tokens(gradient, rows, mask.numel()), self._sequence_shards)
        self._finished[chunk] = self._loss(losses, mask)
        if gradient is None:
            del self._finished[chunk]

    def _of_own_tokens(self, gradient: Tensor, rows: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Sum the tensor-parallel ranks' parts of a gradient in fp32, and return that and its rows in this rank's output."""
        group = mpu.get_tensor_model_parallel_group()
        if group.size() == 1:
            return gradient, rows
        if self._sequence_shards == 1:
            dist.all_reduce(gradient, group=group)
            return gradient, rows
        whole = gradient
        if rows is not None:
            whole = gradient.new_zeros((num_tokens, gradient.shape[1])).index_copy_(0, rows, gradient)
        own = gradient.new_empty((num_tokens // group.size(), gradient.shape[1]))
        dist.reduce_scatter_tensor(own, whole.contiguous(), group=group)
        return own, None


class _Losses(torch.autograd.Function):
    """Losses of a chunk's tokens, whose gradient with respect to the stage's output has been computed by the shards."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, losses: Tensor, gradient: Tensor, rows: Tensor | None, num_parts: int) -> Tensor:
        ctx.save_for_backward(gradient, rows)
        ctx.shape, ctx.dtype, ctx.num_parts = output.shape, output.dtype, num_parts
        return losses

    @staticmethod
    def backward(ctx: Any, of_losses: Tensor) -> tuple[Tensor | None, ...]:
        gradient, rows = ctx.saved_tensors
        if ctx.num_parts > 1:
            of_losses = of_losses.chunk(ctx.num_parts)[mpu.get_tensor_model_parallel_rank()]
        weights = of_losses if rows is None else of_losses[rows]
        scaled = (gradient * weights[:, None]).to(ctx.dtype)
        if rows is not None:
            scaled = scaled.new_zeros((len(of_losses), scaled.shape[1])).index_copy_(0, rows, scaled)
        return scaled.view(ctx.shape), None, None, None, None
