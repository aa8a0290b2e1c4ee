"""A last stage that computes a loss of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import mpu
from torch import Tensor

from megatron_epp.features.losses.scopes import ScopedLoss
from megatron_epp.features.losses.value_head import check_head
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.mcore.model.block_loss import AskedOfLogits, BlockLoss
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.model.stage import ChunkInputs, HeadSettings, MegatronStage
from megatron_epp.plan import EppError
from megatron_epp.runtime.context import ChunkContext

if TYPE_CHECKING:
    from megatron_epp.data.batch import GlobalBatch
    from megatron_epp.mcore.iteration.base_run import Run


class LossStage(MegatronStage):
    """The last stage with a loss of the labels' log-probabilities, or of a head's values."""

    def __init__(self, *args: Any, loss: ScopedLoss, **named: Any) -> None:
        self.loss, self.asks, self.gives_values = loss, loss.asks, loss.asks.has_values
        super().__init__(*args, **named)

    def arguments(self, inputs: ChunkInputs) -> dict[str, Tensor | None]:
        """Also give the loss by blocks the candidates of the chunk."""
        if isinstance(self.block_loss, BlockLoss):
            self.block_loss.candidates = None
            if inputs.of_loss is not None and inputs.labels is not None:
                self.block_loss.candidates = self.loss.candidates(inputs.of_loss, inputs.labels.numel())
        return super().arguments(inputs)

    def loss_of(self, context: ChunkContext, inputs: ChunkInputs, output: Tensor) -> Tensor:
        if self.gives_values and inputs.labels is not None and output.numel() != inputs.labels.numel():
            raise EppError(
                f"the model gives {output.numel()} values for {inputs.labels.numel()} tokens: its head must have one output, "
                "and gather the tokens of sequence-parallel ranks"
            )
        if inputs.of_loss is None:
            return super().loss_of(context, inputs, output)
        values = output.reshape(1, -1).float() if self.gives_values else -output.reshape(1, -1).float()
        if isinstance(self.block_loss, BlockLoss) and self.block_loss.more is not None:
            values = torch.cat([values, self.block_loss.more.float()])
        assert inputs.loss_mask is not None  # on the last stage
        output, sums = self.loss.forward(context, values, inputs.of_loss, inputs.loss_mask[0])
        self._report(sums, inputs.of_loss.counted.to(torch.int))
        return output

    def start_of_backward(self, context: ChunkContext, output: Tensor) -> tuple[Tensor, Tensor | None]:
        gradient, scale = self.loss.gradient(context.chunk), self.config.grad_scale_func
        if gradient is None:
            return super().start_of_backward(context, output)
        return output, gradient if scale is None else scale(gradient)

    def end(self) -> None:
        """Also say which token has a loss that is not finite."""
        super().end()
        self.problem = self.loss.end()


class SampleLoss(RunFeature):
    """A loss of the user's in a run: it names samples in its errors as the batch does."""

    def __init__(self, stage: LossStage) -> None:
        self._loss = stage.loss

    def before(self, batch: GlobalBatch) -> None:
        self._loss.name_of = batch.name_of


def compute(run: Run, models: Sequence[torch.nn.Module], head: HeadSettings) -> None:
    """Have the last stage compute the run's loss. Raises `EppError` if the model's head does not give what the loss reads."""
    own: Any = run.loss
    loss = ScopedLoss(own, mpu.get_context_parallel_group())
    if run.placement.num_stages - 1 in run.placement.stages(run.rank):
        check_head(language_model_of(models[-1]), own, run.args)
    width = loss.asks.widths.get(loss.asks.candidates or "", 0)
    head.make, head.has_head = partial(LossStage, loss=loss), not loss.asks.has_values
    head.asked = AskedOfLogits(getattr(own, "has_entropy", False), getattr(own, "temperature", 1.0), width)


def sample_loss(run: Run) -> SampleLoss | None:
    stage = run.stages.get(run.placement.num_stages - 1)
    return SampleLoss(stage) if isinstance(stage, LossStage) else None
