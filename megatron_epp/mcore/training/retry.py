"""`--epp-oom-retry`: a batch for which a rank ran out of memory is planned again below a lower cap, and runs once more."""

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
"""Runs a batch; the flag says whether to survive a lack of memory, which is then the answer."""


def run_twice_if_short(
    session: Session, models: Sequence[torch.nn.Module], batches: Any, batch: GlobalBatch, attempt: Attempt
) -> GlobalBatch:
    """Run a batch, and where any rank of the job ran out of memory, put everything back, plan it anew and run it again.

    Every rank of the job must call this at the same point. Nothing may reduce gradients before it returns.

    Args:
        session: of this process.
        models: its model chunks.
        batches: where the batch came from: our iterator, inside what Megatron wraps around it to repeat iterations.
        batch: to run.
        attempt: runs it.

    Returns:
        the batch as it ran in the end: its plan is another one where it took two tries, and so may be the replica's share.

    Raises:
        EppError: nothing fits the lower cap.
        RunError: the second try failed too.
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
        raise type(error)(f"{why}\nThere is no plan for less: {error}") from error
    attempt(batch, False)
    return batch
