"""A loop's model in Megatron's data parallelism, trained on whole samples by its schedule: what slices are compared with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.mcore.jobs.frameworks import Loop, megatrons_schedule


class DataParallel:
    """The chunks of a model, or of others in the place of the loop's, with their gradients reduced over replicas (`overlaps`:
    while others are computed), and the samples of this replica. A forward step of a whole sample is given where one is run.
    """

    def __init__(
        self,
        loop: Loop,
        samples: Sequence[dict[str, Any]],
        step: Callable[..., Any] | None = None,
        models: Sequence[Any] | None = None,
        *,
        overlaps: bool = False,
        distributed: bool = False,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

        models = models or loop.models
        self.config, self.samples = models[0].config, samples
        own = DistributedDataParallelConfig(use_distributed_optimizer=distributed, overlap_grad_reduce=overlaps)
        self.chunks = [DistributedDataParallel(self.config, own, model) for model in models]
        if overlaps:  # as Megatron's training does
            functions = ((chunk.no_sync, chunk.start_grad_sync) for chunk in self.chunks)
            (self.config.no_sync_func,), (self.config.grad_sync_func,) = zip(*functions, strict=True)
        self.config.finalize_model_grads_func = finalize_model_grads
        replica, replicas = (getattr(parallel_state, f"get_data_parallel_{name}")() for name in ("rank", "world_size"))
        self.mine = samples[replica::replicas]
        self._loop = loop
        if step is not None:
            loop.forward_step, loop.models, loop.lengths = step, self.chunks, tuple(range(len(self.mine)))
            loop.batches = lambda: iter(self.mine)

    @property
    def parameters(self) -> list[Any]:
        return [weight for chunk in self.chunks for weight in chunk.parameters()]

    def weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.parameters]

    def load(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for weight, value in zip(self.parameters, weights, strict=True):
                weight.copy_(value)

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def gradients(self) -> list[Tensor]:
        return [weight.main_grad.clone() for weight in self.parameters if weight.requires_grad]

    def step(self) -> None:
        with torch.no_grad():
            for weight in self.parameters:
                if weight.requires_grad:
                    weight -= 0.01 * weight.main_grad

    def whole(self) -> tuple[list[Tensor], list[dict[str, Any]]]:
        """Return the gradients of this replica's samples by Megatron's schedule, and what the loss functions returned."""
        self.zero()
        results = self._loop.call(megatrons_schedule())
        return self.gradients(), results

    def sliced(self, schedule: Any, samples: Sequence[dict[str, Any]] | None = None, **named: Any) -> tuple[list[Tensor], Any]:
        """Return the gradients of a call with all samples, or with others, and its report."""
        self.zero()
        report = schedule(model=self.chunks, samples=self.samples if samples is None else samples, **named)
        return self.gradients(), report
