"""A replica's part of global batches on one of its ranks: every rank samples them, one rank plans them ahead for all."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from megatron_epp.data.batch import GlobalBatch, SequenceDataset
from megatron_epp.data.indexed_documents import any_trained, trained_parts
from megatron_epp.plan import Action, EppError
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.problem import Lengths, Spans, by_count
from megatron_epp.port.packed import PackedPlans

MakePlans = Callable[[Lengths], PackedPlans]  # function from a whole global batch to the plans for the shares of some replicas

PlansOrError = PackedPlans | Exception
"""Message of the planning rank to the others for one batch: its plans, or the error of planning."""

BATCHES_SENT_AHEAD = 1
"""Batches whose plans are sent before their turn if they are ready: the next one is prepared while this one runs."""


class DisagreementError(EppError):
    """Ranks sample different batches, or replicas divide a batch differently."""


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Source of the plans of a rank's replica."""

    # Divides a batch and plans the shares of the replicas that it plans for, in a background thread; None on the ranks that
    # receive their plans from another rank
    make_plans: MakePlans | None
    # Called by all ranks of these replicas together, once per batch, with the plans or errors of the planning rank and an empty
    # list on the others; returns those of the planning rank
    exchange_plans: Callable[[list[PlansOrError]], list[PlansOrError]] = lambda plans: plans
    replica_position: int = 0  # index of this rank's replica among them
    # Called by all ranks once per batch, with the checksum of its division, or None if its planning failed; planning ranks
    # compare, and raise if replicas have divided it differently or another's planning has failed
    check_division: Callable[[int | None], None] = lambda checksum: None
    rank: int = 0  # this rank's index in the pipeline
    # Makes what this rank runs a planned batch with, given its lowered actions, in a thread while the batch before runs
    prepare: Callable[[GlobalBatch, tuple[Action, ...]], object] = lambda batch, actions: None
    # Returns what sequences of a dataset borrow of each other, in the thread of `make_plans`
    borrowed: Callable[[SequenceDataset, Sequence[int]], tuple[Borrowed, ...]] = lambda dataset, indices: ()


type _Prepared = tuple[GlobalBatch, int]  # a replica's part of a batch with its plan, and the checksum of the batch's division


class PlannedBatches(Iterator[GlobalBatch]):
    """Iterator that yields a `GlobalBatch` per iteration, in the order of a sampler that is the same on all ranks.

    A thread reads lengths and plans up to `depth` batches ahead; plans are exchanged in `__next__`, so every rank of a replica
    must take its batches at the same points. Another thread prepares the next batch. Errors of planning are raised by all ranks
    in place of the batch, and at later calls; errors of preparing by their own. Without `plans` replicas share by count.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        sampler: Iterable[tuple[int, ...]],
        plans: PlanSource | None = None,
        depth: int = 2,
        mask_loss_of: int | None = None,
        replica: int = 0,
        replicas: int = 1,
    ) -> None:
        self._dataset, self._source = dataset, plans
        self._replica, self._replicas = replica, replicas
        self._prefetched = Prefetcher(_batches(dataset, sampler, plans, mask_loss_of), depth)
        self._is_closed = False
        self._being_prepared: deque[Future[_Prepared]] = deque()  # batches whose plans have been sent
        self._prepare_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="epp-prepare")

    def __next__(self) -> GlobalBatch:
        if self._is_closed:
            raise StopIteration
        source = self._source
        if source is None:
            batch = next(self._prefetched)[0]
            return batch.part(by_count(len(batch.indices), self._replica, self._replicas))
        planned = [] if source.make_plans is None else [*self._planned_batches()]
        sent = source.exchange_plans([plans for _, plans in planned])
        batches = [batch for batch, _ in planned] if planned else map(self._batch_of, sent)
        for batch_or_error, plans in zip(batches, sent, strict=True):
            self._being_prepared.append(self._prepare_thread.submit(_prepare, batch_or_error, plans, source))
        try:
            batch, division = self._being_prepared.popleft().result()
        except Exception:
            source.check_division(None)
            raise
        source.check_division(division)
        return batch

    @property
    def longest_tokens(self) -> int:
        return int(self._dataset.lengths.max())

    def restored(self, batch: GlobalBatch) -> GlobalBatch:
        """Return a batch that an earlier process has pickled, prepared for this rank. Raises what preparing raises."""
        assert self._source is not None
        if (actions := batch.actions) is None:
            raise EppError("the batch to run again is of an earlier version: resume with the version that saved the checkpoint")
        batch = replace(batch, dataset=self._dataset)
        return replace(batch, prepared=self._source.prepare(batch, actions))

    def close(self) -> None:
        """Stop planning and drop ready batches; waits for the plan being made. Afterwards the iterator is exhausted."""
        self._is_closed = True
        self._prefetched.close()
        self._prepare_thread.shutdown(cancel_futures=True)
        self._being_prepared.clear()

    def _planned_batches(self) -> Iterator[tuple[GlobalBatch | Exception, PlansOrError]]:
        """Yield what the planning rank sends now: this batch's plans, unless sent before, and the next one's if ready."""
        num_sent = len(self._being_prepared)
        while num_sent == 0 or (num_sent <= BATCHES_SENT_AHEAD and self._prefetched.is_ready()):
            try:
                batch, plans = next(self._prefetched)
            except Exception as error:
                yield error, _portable(error)
                return
            assert plans is not None  # this rank makes plans
            yield batch, plans
            num_sent += 1

    def _batch_of(self, plans: PlansOrError) -> GlobalBatch | Exception:
        if isinstance(plans, Exception):
            return plans
        try:
            return next(self._prefetched)[0]
        except Exception as error:  # raised at the turn of the batch
            return error


def _batches(
    dataset: SequenceDataset, sampler: Iterable[tuple[int, ...]], plans: PlanSource | None, mask_loss_of: int | None
) -> Iterator[tuple[GlobalBatch, PackedPlans | None]]:
    for drawn in sampler:
        consumed = getattr(sampler, "consumed_samples", 0)
        indices, loss_groups = sequences_of(dataset, drawn)
        lengths = tuple(int(dataset.lengths[index]) for index in indices)
        packed = None
        if plans is not None and plans.make_plans is not None:
            facts = trained_parts(dataset, indices), loss_groups, spans_of(dataset, indices), plans.borrowed(dataset, indices)
            packed = plans.make_plans(Lengths(lengths, *facts))
        batch = GlobalBatch(
            indices=indices,
            lengths=lengths,
            loss_groups=loss_groups,
            dataset=dataset,
            mask_loss_of=mask_loss_of,
            global_size=len(drawn),
            consumed_samples=consumed,
            trains=any_trained(dataset, indices),
        )
        yield batch, packed


def samples_in(dataset: SequenceDataset) -> np.ndarray:
    """Return the lengths of what a sampler draws: of sequences, or of groups of sequences if losses are over these."""
    groups: Sequence[tuple[int, ...]] = getattr(dataset, "groups", ())
    return np.array([dataset.lengths[[*group]].sum() for group in groups]) if groups else dataset.lengths


def sequences_of(dataset: SequenceDataset, drawn: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sequences of what is drawn, and numbers of their groups if there are any; a group drawn twice is two."""
    groups: Sequence[tuple[int, ...]] = getattr(dataset, "groups", ())
    if not groups:
        return drawn, ()
    pairs = [(index, number) for number, group in enumerate(drawn) for index in groups[group]]
    return tuple(index for index, _ in pairs), tuple(number for _, number in pairs)


def spans_of(dataset: SequenceDataset, indices: Sequence[int]) -> tuple[Spans, ...]:
    """Return the spans of sequences; empty if none has any."""
    each: tuple[Spans, ...] = tuple(map(getattr(dataset, "spans", lambda index: ()), indices))
    return each if any(each) else ()


def _portable(error: Exception) -> Exception:
    """Convert an error to one that other ranks can unpickle."""
    if isinstance(error, EppError | StopIteration):
        return error
    portable = EppError(f"the next batch cannot be planned: {type(error).__name__}: {error}")
    portable.__cause__ = error  # stays on this rank
    return portable


def _prepare(whole: GlobalBatch | Exception, plans: PlansOrError, source: PlanSource) -> _Prepared:
    if isinstance(plans, Exception):
        raise plans
    if isinstance(whole, Exception):
        raise whole
    own = plans[source.replica_position]
    # A rank with a shorter batch is told so below.
    plan, batch = own.plan(), whole.part([at for at in own.share if at < len(whole.indices)])
    if plan.lengths != batch.lengths:
        planned, has = (", ".join(map(str, every[:8])) + ", ..." * (len(every) > 8) for every in (plan.lengths, batch.lengths))
        todo = "All ranks need the same data files, seed, sequence length and batch size"
        raise DisagreementError(f"the plan is for sequences of {planned} tokens but this rank's batch has {has}. {todo}")
    batch = replace(batch, plan=plan, plan_digest=own.plan_digest, planning_us=own.planning_us, peak_items=own.peak_items)
    batch = replace(batch, actions=(actions := own.actions(source.rank)))
    return replace(batch, prepared=source.prepare(batch, actions)), own.division


class Prefetcher[T](Iterator[T]):
    """Items of another iterator, of which a thread makes up to `depth` ahead; its error comes behind them, and again later."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: queue.Queue[tuple[T] | BaseException] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        # The thread must not hold a reference to self, or a forgotten iterator would never be collected and never stop.
        self._thread = threading.Thread(target=_fill, args=(items, self._ready, self._stop), name="epp-prefetch", daemon=True)
        self._finalizer = weakref.finalize(self, _release, self._ready, self._stop)
        self._thread.start()

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        if isinstance(item := self._ready.get(), tuple):
            return item[0]
        self._ready.put(item)  # for every later call, since the thread has ended
        raise item

    def is_ready(self) -> bool:
        """True if `__next__` would return, or raise, without waiting."""
        return self._stop.is_set() or not self._ready.empty()

    def close(self) -> None:
        self._finalizer()
        self._thread.join()


def _fill[T](items: Iterator[T], ready: queue.Queue[tuple[T] | BaseException], stop: threading.Event) -> None:
    try:
        for item in items:
            ready.put((item,))
            if stop.is_set():
                return
        ready.put(StopIteration())
    except BaseException as error:  # an error of any kind must reach the consumer, or it would wait for ever
        ready.put(error)


def _release[T](ready: queue.Queue[tuple[T] | BaseException], stop: threading.Event) -> None:
    """Stop the thread: after `stop` it puts at most one item, for which emptying the queue makes room."""
    stop.set()
    with suppress(queue.Empty):  # of another thread that takes an item meanwhile
        while True:
            ready.get_nowait()
