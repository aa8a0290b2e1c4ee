"""Offload around a rank's actions: handlers of copies, and where KV caches are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.offload.host_rows import HostRows
from megatron_epp.features.offload.host_store import HostStore
from megatron_epp.plan import Action, Op, Plan
from megatron_epp.runtime.context import Stage
from megatron_epp.runtime.executor import HANDLERS, Executor, Handler


@contextmanager
def offload_handlers(
    plan: Plan,
    rank: int,
    stages: Mapping[int, Stage],
    host: HostMemory,
    offload: ActivationOffload | None,
    inner: Mapping[Op, Handler] = HANDLERS,
) -> Iterator[Mapping[Op, Handler]]:
    """Return a context around a rank's actions, with the handlers of its copies, and of passes around the `inner` ones.

    Caches go to `host` where the plan says so. Without `offload`, which is active in the body, no activations do.
    """
    host.held_peak_bytes = host.held_bytes
    for number, stage in stages.items():
        sequences = plan.kv_offload_on(number)
        store = HostRows(host, sequences, not plan.forward_only) if plan.borrowed else HostStore(host, sequences)
        stage.kv_cache.offloaded = store if sequences else None
    if offload is None:
        yield {}
        return
    yield _handlers(plan, rank, offload, inner)
    offload.assert_empty()


def _handlers(plan: Plan, rank: int, offload: ActivationOffload, inner: Mapping[Op, Handler]) -> Mapping[Op, Handler]:
    num_bytes = {copy.action: copy.free_bytes for row in plan.copies[rank : rank + 1] for copy in row}

    def begin(run: Executor, action: Action) -> None:
        _, stage, chunk = action
        # The timer is entered on the stream of the copies, where they run, not on the compute stream.
        offload.offload((stage, chunk), plan.offload_share[stage][chunk], num_bytes[action], run.recorder.action(action))

    def forward(run: Executor, action: Action) -> None:
        with offload.of(action[1:]):
            inner[Op.F](run, action)

    def backward(run: Executor, action: Action) -> None:
        offload.before_backward(action[1:])  # compute, not the host, waits for the load
        inner[Op.B](run, action)

    return {
        Op.F: forward,
        Op.B: backward,
        Op.O: begin,
        Op.FREE: lambda run, action: offload.free(action[1:]),
        Op.L: lambda run, action: offload.load(action[1:], run.recorder.action(action)),
    }
