"""Retry of a batch for which a rank ran out of memory, with a new plan below a lower cap (`--epp-oom-retry`)."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.data.iterator import PlannedBatches
from megatron_epp.mcore.training.session import Session
from megatron_epp.mcore.training.snapshot import Snapshot
from megatron_epp.plan import EppError
from megatron_epp.runtime.out_of_memory import Shortage

logger = logging.getLogger(__name__)

Attempt = Callable[[GlobalBatch, bool], Shortage | None]
"""Function that runs a batch. If the flag is True, it returns an out-of-memory error instead of raising it."""


def run_twice_if_short(
    session: Session, models: Sequence[torch.nn.Module], batches: Any, batch: GlobalBatch, attempt: Attempt
) -> GlobalBatch:
    """Run a batch; if any rank of the job ran out of memory, restore the state, plan the batch again and retry.

    Every rank of the job must call this at the same point. Gradients must not be reduced before it returns.

    Args:
        session: this process's session.
        models: this rank's model chunks.
        batches: source of the batch: our iterator, possibly inside the wrapper with which Megatron repeats iterations.
        batch: the batch to run.
        attempt: runs the batch.

    Returns:
        the batch as it finally ran. After a retry its plan is a new one, and the replica's share may differ.

    Raises:
        EppError: no plan fits the lower cap.
        RunError: the retry failed too.
    """
    before = Snapshot(models)
    shortage = attempt(batch, True)
    assert batch.plan is not None
    caps = session.lower_caps(shortage, batch.plan.cap_bytes)
    if caps is None:
        return batch
    before.restore()
    gc.collect()  # of graphs that the error's frames held in cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        lowered = ", ".join(f"{cap / 2**30:.4g}" for cap in caps)
        logger.warning(
            "out of memory in iteration %d: it runs again, and from now on plans are made for caps of %s GiB by pipeline rank "
            "(--epp-oom-retry; %d so far in this run)",
            session.iteration,
            lowered,
            session.retries,
        )
    while not isinstance(batches, PlannedBatches):
        batches = batches.iterable
    try:
        batch = batches.again()
    except EppError as error:
        why = "another rank ran out of memory; its log says where" if shortage is None else shortage.text
        raise error.within(f"{why}\nThere is no plan for less: ") from error
    attempt(batch, False)
    return batch
