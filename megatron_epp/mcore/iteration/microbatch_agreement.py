"""Agreement of the ranks of a group on the microbatches of an iteration."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import NamedTuple

import torch.distributed as dist

from megatron_epp.cost.work import causal_pairs
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch
from megatron_epp.plan import EppError
from megatron_epp.runtime.links.objects import ObjectGroup

Shapes = tuple[Microbatch, ...]


class LocalShapes(NamedTuple):
    """Microbatches of an iteration, as one rank has found them.

    Attributes:
        shapes: None if the caller has no data on this rank.
        problem: error in finding them; empty if there was none.
        position: of this rank in the pipeline.
        num_bytes: of microbatches that this rank holds on its device during the iteration.
    """

    shapes: Shapes | None
    problem: str
    position: int
    num_bytes: int = 0
    replica: int = 0


class AgreedShapes(NamedTuple):
    """Microbatches of an iteration, as all ranks that run the same plan know them.

    Attributes:
        shapes: where replicas that share experts have different ones, shapes with the most tokens and the most pairs of a query
            and a key that any of them has.
        num_bytes: of microbatches on the device throughout the iteration, per pipeline rank; the most of its replicas.
        own: of this replica's microbatches; empty if they are `shapes`.
    """

    shapes: Shapes
    num_bytes: tuple[int, ...]
    own: Shapes = ()

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
    sizes = tuple(num_bytes[position] for position in sorted(num_bytes))
    return AgreedShapes(of_all, sizes, () if own == of_all else own)


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
