"""Board on which a rank that fails says why, for all ranks of the job: others would wait for it without an error of their own.

It is a key of the store through which torch's process groups meet, so no collective is needed, and it works while other ranks
wait in native code.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds that a rank that fails waits at most for the others to log why, and that the others wait for it to end first.

Not measured. The watchdog polls about once a second, so much less would end ranks before others have read the reason; more
would delay the end of a job whose other ranks cannot answer.
"""
_KEY, _READ, _POLL_S = "failed", "read", 0.05
"""Keys of the board: why a rank failed, and how many have read it; seconds between looks at that, within `PATIENCE_S`."""
_READS_PER_S = 2000
"""Reads of the board per second by all ranks, which one process answers: with 2,000 ranks one from each. Not measured."""


class FailureBoard:
    """Board of a job; without a store no rank is told. A rank's first failure is kept; later ones often follow from it."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self._store: Any = store if num_ranks > 1 else None
        self._rank, self._num_ranks = rank, num_ranks
        self._lock, self._has_read, self._next_s = threading.Lock(), False, 0.0

    @staticmethod
    def of_job() -> FailureBoard:
        """Return the board of the default process group. Every rank of a job must have as many of them as the others."""
        try:
            base = dist.distributed_c10d._get_default_store()
            store = PrefixStore("epp/failures", base.clone() if hasattr(base, "clone") else base)
        except (RuntimeError, ValueError, NotImplementedError) as error:  # a backend that meets without a store
            logger.debug("no rank can tell others why it fails: %s", error)
            store = None
        return FailureBoard(store, dist.get_rank(), dist.get_world_size())

    def tell(self, text: str) -> None:
        """Say why this rank fails, and wait until the others know, for at most `PATIENCE_S`."""
        if self._store is None:
            return
        try:
            self._store.compare_set(_KEY, "", f"rank {self._rank} failed: {text}")
            self.acknowledge()
            limit_s = time.monotonic() + PATIENCE_S
            while self._store.add(_READ, 0) < self._num_ranks and time.monotonic() < limit_s:
                time.sleep(_POLL_S)
        except RuntimeError as error:  # the process that has the store is gone
            logger.debug("others are not told: %s", error)

    def cause(self) -> str:
        """Return which other rank failed and why; empty if none has, or if this one has failed first."""
        if self._store is None:
            return ""
        try:
            if not self._store.check([_KEY]):
                return ""
            text: str = self._store.get(_KEY).decode()
        except RuntimeError as error:
            logger.debug("failures cannot be read: %s", error)
            return ""
        return "" if text.startswith(f"rank {self._rank} failed") else f"rank {self._rank} ends, since {text}"

    def poll(self) -> str:
        """Return the cause, for one that asks again and again: the store is asked less often, the more ranks there are."""
        if (now_s := time.monotonic()) < self._next_s:
            return ""
        self._next_s = now_s + self._num_ranks / _READS_PER_S
        return self.cause()

    def acknowledge(self) -> None:
        """Let the rank that failed know that this one has logged why; the first time counts."""
        with self._lock:
            if self._has_read or self._store is None:
                return
            self._has_read = True
        try:
            self._store.add(_READ, 1)
        except RuntimeError as error:
            logger.debug("a failure cannot be acknowledged: %s", error)
