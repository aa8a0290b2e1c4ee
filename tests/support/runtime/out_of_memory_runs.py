"""Programs of the ranks in the tests of memory that runs out: a plan in which one action finds none."""

import torch

from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.out_of_memory import OutOfMemoryReport, Usage
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."


class ScarceStage(PlainStage):
    """Finds no memory in one of its forwards, given by its chunk: behind its work, as late as can be."""

    faulty_chunk = None

    def forward(self, context, hidden):
        output = super().forward(context, hidden)
        if context.chunk == self.faulty_chunk:
            raise torch.OutOfMemoryError(MESSAGE)
        return output


def run_short(rank, links, plan, faulty_rank, chunk):
    """Run a plan; the forward of a chunk on the first stage of a rank finds no memory."""
    batch = batch_of(plan)
    stages = {s: ScarceStage(build_part(plan.num_layers, s), batch) for s, r in enumerate(plan.placement) if r == rank}
    if rank == faulty_rank:
        stages[min(stages)].faulty_chunk = chunk
    report = OutOfMemoryReport(lambda static_bytes: Usage(static_bytes + 3 * 2**30, 8 * 2**30))
    Executor(plan, rank, stages, links, out_of_memory=report).run()
