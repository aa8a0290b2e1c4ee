"""Plans global batches in the background, a few iterations ahead of training."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from megatron_epp.data.batch import GlobalBatch, SequenceDataset
from megatron_epp.schedule.plan import Plan

MakePlan = Callable[[tuple[int, ...]], Plan]


class PlannedBatches(Iterator[GlobalBatch]):
    """Yields one `GlobalBatch` per iteration, in the sampler's order, planned by a background thread.

    The thread only reads lengths and plans, so what it yields is a function of the sampler and `make_plan` alone. When either
    raises, the batches made before are still yielded, then `__next__` raises that error, now and at every later call.

    Args:
        dataset: where lengths, and later tokens, come from.
        sampler: yields sequence indices, one tuple per iteration.
        make_plan: lengths to plan; None yields batches without a plan.
        depth: how many batches may wait, at least 1 (one more is in the making).
        mask_loss_of: see `GlobalBatch`.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        sampler: Iterable[tuple[int, ...]],
        make_plan: MakePlan | None = None,
        depth: int = 2,
        mask_loss_of: int | None = None,
    ) -> None:
        self._ready: queue.Queue[GlobalBatch | BaseException] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._error: BaseException | None = None
        batches = _batches(dataset, sampler, make_plan, mask_loss_of)
        # The thread must not hold a reference to self, or a forgotten iterator would never be collected and never stop.
        self._thread = threading.Thread(target=_fill, args=(batches, self._ready, self._stop), name="epp-planner", daemon=True)
        self._finalizer = weakref.finalize(self, _release, self._ready, self._stop)
        self._thread.start()

    def __next__(self) -> GlobalBatch:
        if self._error is None:
            if self._stop.is_set():
                raise StopIteration
            item = self._ready.get()
            if isinstance(item, GlobalBatch):
                return item
            self._error = item
        raise self._error

    def close(self) -> None:
        """Stop planning and drop what is ready; waits for the plan in the making. Afterwards the iterator is exhausted."""
        self._finalizer()
        self._thread.join()


def _batches(
    dataset: SequenceDataset,
    sampler: Iterable[tuple[int, ...]],
    make_plan: MakePlan | None,
    mask_loss_of: int | None,
) -> Iterator[GlobalBatch]:
    for indices in sampler:
        lengths = tuple(int(dataset.lengths[index]) for index in indices)
        plan = make_plan(lengths) if make_plan is not None else None
        yield GlobalBatch(indices=indices, lengths=lengths, plan=plan, dataset=dataset, mask_loss_of=mask_loss_of)


def _fill(batches: Iterator[GlobalBatch], ready: queue.Queue[GlobalBatch | BaseException], stop: threading.Event) -> None:
    try:
        for batch in batches:
            ready.put(batch)
            if stop.is_set():
                return
        ready.put(StopIteration())
    except BaseException as error:  # an error of any kind must reach the training thread, or it would wait for ever
        ready.put(error)


def _release(ready: queue.Queue[GlobalBatch | BaseException], stop: threading.Event) -> None:
    """Let the thread end: after `stop` it puts at most one item, for which emptying the queue makes room."""
    stop.set()
    try:
        while True:
            ready.get_nowait()
    except queue.Empty:
        pass
