"""Programs of the ranks of a test pipeline: a plan on plain stages."""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.offload.activations import ActivationOffload
from megatron_epp.runtime.offload.host import HostMemory
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part


@dataclass(frozen=True)
class StageResult:
    """State that a run left in one stage."""

    gradients: dict[str, np.ndarray | None]
    loss: float
    calls: list[str]
    live_bytes: int
    peak_bytes: int
    host_peak_bytes: int


def run_plan(rank, links, plan, dtype=torch.float32, reentrant=False, host=None):
    """Run this rank's part of a plan, with copies to and from a host. Returns {stage: StageResult}."""
    batch = batch_of(plan)
    stages = {
        s: PlainStage(build_part(plan.num_layers, s, dtype), batch, reentrant)
        for s, r in enumerate(plan.placement)
        if r == rank
    }
    parameters = [p for stage in stages.values() for p in stage.part.parameters()]
    host = host or HostMemory(torch.device("cpu"), 1 << 30)
    with SavedTensors(parameters, lambda: sum(stage.kv_cache.num_bytes for stage in stages.values())) as saved:
        offload = ActivationOffload(saved, host) if any(plan.copies) else None
        Executor(plan, rank, stages, links, offload=offload, host=host).run()
    kv_offload = [stage.kv_cache.offloaded for stage in stages.values() if stage.kv_cache.offloaded is not None]
    left = saved.live_bytes + sum(stage.kv_cache.num_bytes for stage in stages.values()) + sum(x.host_bytes for x in kv_offload)
    bytes_of = left, saved.peak_bytes, (offload.host_peak_bytes if offload else 0) + sum(x.host_peak_bytes for x in kv_offload)
    return {s: StageResult(_arrays(stage.gradients()), stage.loss, stage.calls, *bytes_of) for s, stage in stages.items()}


def _arrays(gradients):
    return {name: None if grad is None else grad.numpy() for name, grad in gradients.items()}
