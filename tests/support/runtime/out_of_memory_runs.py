"""What ranks run in the tests of memory that runs out: plans in which one action finds none."""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.offload.activations import Offload
from megatron_epp.runtime.offload.host import HostMemory
from megatron_epp.runtime.out_of_memory import ShortagePolicy, Usage
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."


class ScarceStage(PlainStage):
    """Finds no memory in one of its actions, given as ``F1``, ``B0`` or ``W2``: behind its work, as late as can be, so that
    what the action has made is there to be cleaned up. Counts what it computes.
    """

    action = None
    num_computed = 0

    def forward(self, context, hidden):
        output = super().forward(context, hidden)
        self._done(f"F{context.chunk}")
        return output

    def backward(self, context, output, grad, keep_weights):
        super().backward(context, output, grad, keep_weights)
        self._done(f"B{context.chunk}")

    def weight(self, chunk):
        super().weight(chunk)
        self._done(f"W{chunk}")

    def _done(self, action):
        self.num_computed += 1
        if action == self.action:
            raise torch.OutOfMemoryError(MESSAGE)


@dataclass(frozen=True)
class Tries:
    """What two tries left on a rank.

    shortage: text of the first try's, if this rank had one. computed: actions of the first try that ran. held: bytes of saved
    tensors, caches and host pages that were still in use after it.
    """

    shortage: str | None
    computed: int
    held: int
    loss: float
    gradients: dict[str, np.ndarray]


def run_short(rank, links, plan, faulty_rank, action):
    """Run a plan; an action (``F1``) of the first stage of a rank finds no memory."""
    _run(rank, links, plan, _stages(rank, plan, faulty_rank, action), HostMemory(torch.device("cpu"), 1 << 30), False)


def try_twice(rank, links, plan, faulty_rank, action):
    """As above, and survive it; then throw away what came of it and run the plan again."""
    stages, host = _stages(rank, plan, faulty_rank, action), HostMemory(torch.device("cpu"), 1 << 30)
    first, held = _run(rank, links, plan, stages, host, True)
    computed = sum(stage.num_computed for stage in stages.values())
    for stage in stages.values():
        stage.part.zero_grad(set_to_none=True)
        stage.loss, stage.action = 0.0, None
    second, _ = _run(rank, links, plan, stages, host, True)
    assert second.shortage is None
    gradients = {
        f"{s} {name}": g.numpy() for s, stage in stages.items() for name, g in stage.gradients().items() if g is not None
    }
    loss = sum(stage.loss for stage in stages.values())
    return Tries(None if first.shortage is None else first.shortage.text, computed, held, loss, gradients)


def _stages(rank, plan, faulty_rank, action):
    batch = batch_of(plan)
    stages = {s: ScarceStage(build_part(plan.num_layers, s), batch) for s, r in enumerate(plan.placement) if r == rank}
    if rank == faulty_rank:
        stages[min(stages)].action = action
    return stages


def _run(rank, links, plan, stages, host, survives):
    """The executor, and how many bytes are still in use."""
    policy = ShortagePolicy(survives, lambda static_bytes: Usage(static_bytes + 3 * 2**30, 8 * 2**30))
    parameters = [p for stage in stages.values() for p in stage.part.parameters()]
    with SavedTensors(parameters, lambda: sum(stage.relay.num_bytes for stage in stages.values())) as saved:
        offload = Offload(saved, host) if any(plan.copies) else None
        executor = Executor(plan, rank, stages, links, offload=offload, on_shortage=policy, host=host)
        executor.run()
    return executor, saved.held_bytes + host.held_bytes
