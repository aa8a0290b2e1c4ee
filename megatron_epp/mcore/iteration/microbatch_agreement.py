"""Agreement of the ranks of a group on the microbatches of an iteration, or of the next while the device runs this one."""

from __future__ import annotations

import bisect
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_epp.cost.work import causal_pairs
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch
from megatron_epp.plan import EppError
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.runtime.links.objects import ObjectGroup

logger = logging.getLogger(__name__)

Shapes = tuple[Microbatch, ...]


class LocalShapes(NamedTuple):
    """Microbatches of an iteration, as one rank has found them."""

    shapes: Shapes | None  # None if the caller has no data on this rank
    problem: str  # error in finding them; empty if there was none
    position: int  # of this rank in the pipeline
    num_bytes: int = 0  # of microbatches that this rank holds on its device during the iteration
    replica: int = 0
    # What sequences of all microbatches in a row borrow, empty for nothing; None if this rank's model cannot share any
    borrowed: tuple[Borrowed, ...] | None = None


class AgreedShapes(NamedTuple):
    """Microbatches of an iteration, as all ranks that run the same plan know them."""

    # Where replicas that share experts have different ones, shapes with the most tokens and the most pairs of a query and a key
    # that any of them has
    shapes: Shapes
    # Of microbatches on the device throughout the iteration, per pipeline rank; the most of its replicas
    num_bytes: tuple[int, ...]
    own: Shapes = ()  # of this replica's microbatches; empty if they are `shapes`
    borrowed: tuple[Borrowed, ...] = ()

    @property
    def is_unread(self) -> bool:
        """True if it is known of all microbatches which logits nothing reads."""
        return all(shape.unread is not None for shape in self.shapes)

    @property
    def here(self) -> Shapes:
        return self.own or self.shapes


def agree_on_shapes(local: LocalShapes, group: ObjectGroup) -> AgreedShapes:
    """Return the iteration's microbatches, known to every rank of a pipeline. A collective call on the CPU.

    The group is all ranks that run the same plan. Raises `EppError` on every rank if one failed, none has data, ranks of a
    replica have different microbatches, or replicas that share experts different numbers of them.
    """
    ranks = group.from_each((local, dist.get_rank()))
    if failed := [f"rank {rank}: {sent.problem}" for sent, rank in ranks if sent.problem]:
        raise EppError("; ".join(failed))
    known = [(sent.shapes, sent.replica, rank) for sent, rank in ranks if sent.shapes is not None]
    if not known:
        raise EppError("no rank of this pipeline has a data iterator, so lengths of microbatches are unknown")
    replicas: dict[int, tuple[Shapes, int]] = {}
    for shapes, replica, rank in known:
        first, first_rank = replicas.setdefault(replica, (shapes, rank))
        if shapes != first:
            raise EppError(f"microbatches differ between ranks of a replica: {_difference(first, first_rank, shapes, rank)}")
    (first, first_rank), *others = replicas.values()
    for shapes, rank in others:
        if len(shapes) != len(first):
            difference = _difference(first, first_rank, shapes, rank)
            raise EppError(
                f"replicas that share experts run the same actions, and have other numbers of microbatches: {difference}. Give "
                "them as many; keep experts within a replica (EP x ETP at most TP x CP); or use Megatron's own schedule"
            )
    of_all = tuple(map(_largest, zip(*(shapes for shapes, _ in replicas.values()), strict=True)))
    own = replicas[local.replica][0] if local.replica in replicas else of_all
    num_bytes: dict[int, int] = {}
    for sent, _ in ranks:
        num_bytes[sent.position] = max(sent.num_bytes, num_bytes.get(sent.position, 0))
    every = tuple(num_bytes[position] for position in sorted(num_bytes))
    borrowed = {sent.borrowed for sent, _ in ranks if sent.shapes is not None or sent.borrowed is None}
    agreed = (borrowed.pop() or ()) if len(borrowed) == 1 else ()
    return AgreedShapes(of_all, every, () if own == of_all else own, agreed)


def _largest(shapes: Shapes) -> Microbatch:
    """Return the shape with the most tokens and the most pairs that one of these has: one of them, or two sequences."""
    best = max(shapes, key=lambda shape: (sum(shape.lengths), _pairs(shape.lengths)))
    tokens, pairs = sum(best.lengths), max(_pairs(shape.lengths) for shape in shapes)
    if pairs <= _pairs(best.lengths):
        return best
    longest = range(-(-tokens // 2), tokens + 1)
    at = bisect.bisect_left(longest, pairs, key=lambda long: _pairs((long, tokens - long)))
    return best._replace(lengths=tuple(filter(None, (longest[at], tokens - longest[at]))))


def _pairs(lengths: Iterable[int]) -> int:
    return sum(causal_pairs(0, length) for length in lengths)


def _difference(first: Shapes, first_rank: int, other: Shapes, rank: int) -> str:
    if len(first) != len(other):
        return f"rank {first_rank} has {len(first)}, rank {rank} has {len(other)}"
    index = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    ones = (sum(first[index].lengths), len(first[index].lengths), sum(other[index].lengths), len(other[index].lengths))
    return "microbatch {} has {} tokens in {} sequences on rank {} and {} in {} on rank {}".format(
        index, *ones[:2], first_rank, *ones[2:], rank
    )


class LookAhead(Iterator[Any]):
    """Iterator whose next items can be looked at before they are taken."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator, self._seen = iterator, deque[Any]()
        self.num_taken = 0

    def __next__(self) -> Any:
        item = self._seen.popleft() if self._seen else next(self._iterator)
        self.num_taken += 1
        return item

    def peek(self, count: int) -> list[Any]:
        """Return the next items without taking them; fewer where the iterator ends."""
        with suppress(StopIteration):
            while len(self._seen) < count:
                self._seen.append(next(self._iterator))
        return list(self._seen)[:count]


def installed(iterators: Sequence[Any]) -> list[LookAhead] | None:
    """Put a `LookAhead` beneath each of a rank's iterators, once, and return them; None if one is not Megatron's.

    Megatron's iterators replay items of an iteration, which they read from their attribute ``iterable``; that is not replayed.
    """
    ahead = []
    for iterator in iterators:
        if iterator is None:
            continue
        if not hasattr(iterator, "rewind") or not hasattr(getattr(iterator, "iterable", None), "__next__"):
            return None
        if not isinstance(iterator.iterable, LookAhead):
            iterator.iterable = LookAhead(iterator.iterable)
        ahead.append(iterator.iterable)
    return ahead


class Ahead:
    """Agreement on the shapes of the next iteration between all ranks that run the same plan, behind the launch of this one.

    Ranks must call `begin` and `take` at the same calls of the schedule, with equal counts. Given this rank's shapes, its error
    and the items, `agree` agrees with other ranks and starts to plan.
    """

    def __init__(self, agree: Callable[[Shapes | None, str, list[list[Any]]], AgreedShapes]) -> None:
        self._agree = agree
        self._is_logged = False
        self._next: tuple[int, list[tuple[LookAhead, int]], AgreedShapes] | None = None

    def begin(self, sources: Sequence[LookAhead], count: int, shapes_of: Callable[[list[Any]], Shapes]) -> None:
        """Agree on the next iteration, when this one's microbatches have been taken. Ranks without data have no `sources`."""
        positions = [(source, source.num_taken) for source in sources]
        own, problem, items = None, "", list[list[Any]]()
        try:
            items = [source.peek(count) for source in sources]
            shapes_of_chunks = list(map(shapes_of, items))
            own = shapes_of_chunks[0] if shapes_of_chunks else None
            if any(shapes != own for shapes in shapes_of_chunks) or (own is not None and len(own) < count):
                problem = "no microbatches to look ahead to"
        except Exception as error:  # a rank that raised by itself would leave the others waiting for its shapes
            problem = f"{type(error).__name__}: {error}"
        # An error is raised on all ranks, and they agree again; if it is still there, that agreement raises it at its turn.
        with suppress(EppError):
            self._next = count, positions, self._agree(own, problem, items)

    def take(self, sources: Sequence[LookAhead], count: int) -> AgreedShapes | None:
        """Return what was agreed for the iteration whose microbatches are taken next; None, on all ranks, if nothing was.
        Raises `EppError` if this rank's iterators are others than at `begin`, or have moved since.
        """
        begun, self._next = self._next, None
        if begun is None or begun[0] != count:
            return None
        _, positions, agreed = begun
        if positions != [(source, source.num_taken) for source in sources]:
            raise EppError(
                "the data iterator of this call is not the one of the last call, or something else took items from it; ranks "
                "without data already agreed on its next microbatches"
            )
        if not self._is_logged:
            logger.info("microbatches and plans are agreed while the last iteration ran, from now on")
            self._is_logged = True
        return agreed
