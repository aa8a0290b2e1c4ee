"""Programs of the ranks in the tests of failures: pipelines with a fault in one action."""

import threading

from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.watchdog import Watchdog
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part


class FaultyStage(PlainStage):
    """Fails or hangs in one action, given as ``F1`` or ``B0``."""

    def __init__(self, part, batch, action, fault):
        super().__init__(part, batch)
        self.action, self.fault = action, fault

    def forward(self, context, hidden):
        self._maybe(f"F{context.chunk}")
        return super().forward(context, hidden)

    def backward(self, context, output, grad, keep_weights):
        self._maybe(f"B{context.chunk}")
        super().backward(context, output, grad, keep_weights)

    def _maybe(self, action):
        if action == self.action:
            self.fault()


def fail():
    raise ArithmeticError("the loss is not a number")


def hang():
    threading.Event().wait()


def run_with_fault(rank, links, plan, faulty_rank, action, fault, limit_s=None):
    """Run a plan with one stage per rank; the fault is in `action` of `faulty_rank`, which nothing watches."""
    action = action if rank == faulty_rank else None
    stage = FaultyStage(build_part(plan.num_layers, rank), batch_of(plan), action, fault)
    watchdog = Watchdog(limit_s) if limit_s is not None and rank != faulty_rank else None
    Executor(plan, rank, {rank: stage}, links, watchdog=watchdog).run()
