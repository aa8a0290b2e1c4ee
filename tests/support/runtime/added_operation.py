"""A kind of action that the package does not know: a shard of the loss on every rank, with two collectives over all ranks.

`K` runs on each rank for each chunk. It needs what the last stage's forward of the chunk broadcasts, and the last stage's
backward needs the sum of all shards. This is all there is to it: a definition and a handler.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from megatron_epp.plan import Op
from megatron_epp.plan.operations import (
    At,
    Before,
    Collective,
    Need,
    Operation,
    OperationRows,
    Presence,
    of_ranks,
    register,
    unregister,
)

K, SPREAD, SUM = Op.define("K"), Op.define("SPREAD_K"), Op.define("SUM_K")
TIME_US, SPREAD_US, SUM_US, NUM_BYTES = 40.0, 15.0, 25.0, 4096


def rows(costs, sites, work):
    """For planners: every shard takes the same time, and its buffer is gone when it ends."""
    chunks = len(work.tokens)
    sizes = [[NUM_BYTES] * chunks for _ in sites]
    return OperationRows(
        [[TIME_US] * chunks for _ in sites], sizes, sizes, {SPREAD: [SPREAD_US] * chunks, SUM: [SUM_US] * chunks}
    )


@contextmanager
def defined():
    """The operation is in the table while the context lasts."""
    yield register(
        Operation(
            op=K,
            text="loss shard",
            colour="#123456",
            presence=Presence.COMPLETE,
            sites=of_ranks,
            needs=(Need(Op.F, At.LAST, carries=Collective(SPREAD)),),
            before=(Before(Op.B, Need(K, At.EVERY, only=At.LAST, carries=Collective(SUM))),),
            rows=rows,
        )
    )
    unregister(K)


class Shards:
    """The handler: what each rank adds to a chunk's loss, and the sums that all ranks then have."""

    def __init__(self, rank, num_ranks, root):
        self.rank, self.num_ranks, self.root = rank, num_ranks, root
        self.values, self.sums = {}, {}

    def handlers(self):
        return {K: self.run, SPREAD: self.spread, SUM: self.add}

    def spread(self, executor, action):
        value = torch.tensor([100.0 * action.chunk if self.rank == self.root else -1.0])
        dist.broadcast(value, self.root)
        self.values[action.chunk] = value

    def run(self, executor, action):
        with executor.recorder.action(action):
            self.values[action.chunk] += self.rank + 1

    def add(self, executor, action):
        dist.all_reduce(self.values[action.chunk])
        self.sums[action.chunk] = float(self.values[action.chunk])


def run_plan(rank, links, make, num_layers):
    """Run a plan with the operation on this rank; the sums, and the gradient sums of its stages."""
    from megatron_epp.contrib.demos.emulate import EmulatedRank, WaitingStage
    from megatron_epp.runtime.executor import Executor

    with defined():
        plan = make(num_layers)
        shards = Shards(rank, plan.num_ranks, plan.placement[-1])
        shared = EmulatedRank(plan, rank, 1.0)
        stages = {stage: WaitingStage(stage, shared) for stage, on in enumerate(plan.placement) if on == rank}
        Executor(plan, rank, stages, links, handlers=shards.handlers()).run()
        return shards.sums, [text for text, _, _ in shared.events]
