"""The passes of all stages over a chunk table as flat columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_epp.plan.operations import Collective, MessageKind, operation
from megatron_epp.plan.relations import resolve
from megatron_epp.planner.kernels.codes import Kinds
from megatron_epp.planner.kernels.compiled import FloatList, IntegerList, Numbers, floats, integers


class PassTable(NamedTuple):
    """Times in microseconds and bytes of the passes of all stages, in the one shape that searches read, compiled or not.

    An item is a stage and a chunk, ``stage * num_chunks + chunk``. Columns without a note are of `passes.StagePasses`, by item.
    """

    num_stages: int
    num_chunks: int
    num_items: int  # items of the kind of action that has most sites; for all but added kinds, stages times chunks
    rank_of: IntegerList  # by stage
    static: IntegerList  # by rank, as in `Tables`
    # num_layers, most: of the item's stage, and most recompute steps of the item
    num_layers: IntegerList
    most: IntegerList
    # Of each item, where its ways to run begin: one for every number of recompute steps. Equal stages share them.
    first_way: IntegerList
    # kept_bytes, again_us, whole, split, price: by way, as in `passes.Ways`
    kept_bytes: IntegerList
    again_us: FloatList
    whole: IntegerList
    split: IntegerList
    price: FloatList
    dear_us: FloatList  # of the dearest step
    forward_alloc: IntegerList
    forward_free: IntegerList
    backward_residual: IntegerList
    weight_bytes: IntegerList
    # need_starts, needs, need_us: for each node, the nodes on other sites that it waits for, and the time of the transfer. A
    # node is a kind and an item, numbered kind by kind. Needs on its own site follow from a legal order, unless a collective is
    # between the two, which takes time there as well.
    need_starts: IntegerList
    needs: IntegerList
    need_us: FloatList
    action_us: FloatList  # time of each node, of a backward without recompute and with its weight gradient
    saved_by_split_us: FloatList
    # added_takes, added_gives: bytes of added operations, by node behind the three common kinds
    added_takes: IntegerList
    added_gives: IntegerList


def by_node(kinds: Sequence[Sequence[Sequence[float] | Numbers]], num_items: int, dtype: type) -> Numbers:
    """Flatten ``[site][chunk]`` rows of every kind one after another, each filled with zeros to `num_items` entries."""
    filled: Numbers = np.zeros((len(kinds), num_items), dtype=dtype)
    for row, sites in zip(filled, kinds, strict=True):
        values = np.concatenate(sites)
        row[: len(values)] = values
    return filled.ravel()


def need_columns(
    kinds: Kinds,
    rank_of: Sequence[int],
    num_items: int,
    num_chunks: int,
    transfer_us: Callable[[MessageKind | Collective | None, int], Sequence[float] | Numbers],
) -> tuple[IntegerList, IntegerList, FloatList]:
    """Resolve operations into `PassTable.need_starts`, `needs` and `need_us`, from times of transfers over boundaries."""
    starts, needs, carried = _needs(kinds, tuple(rank_of), num_items, num_chunks)
    times_us = [np.array([transfer_us(*transfer) for transfer in site]).T.ravel() for site in carried]
    return integers(starts), integers(needs), floats(np.concatenate([np.zeros(0), *times_us]))


type Carried = tuple[MessageKind | Collective | None, int]
"""A transfer, and the lower of the stages at the boundary that it crosses."""


@lru_cache(maxsize=16)
def _needs(
    kinds: Kinds, rank_of: tuple[int, ...], num_items: int, num_chunks: int
) -> tuple[Numbers, Numbers, list[list[Carried]]]:
    """Return `PassTable.need_starts` and `needs`, and the transfers for every kind and site that has needs."""
    number, chunks = {op: kind for kind, op in enumerate(kinds)}, np.arange(num_chunks)
    per_node = np.zeros(len(kinds) * num_items, dtype=np.int64)
    needs, carried = [np.zeros(0, dtype=np.int64)], []
    for kind, op in enumerate(kinds):
        sites = operation(op).sites
        for site in range(len(sites(rank_of))):
            related = [
                other
                for other in resolve(op, site, rank_of)
                if other.op in number
                and (isinstance(other.need.carries, Collective) or other.site != site or operation(other.op).sites is not sites)
            ]
            first = kind * num_items + site * num_chunks
            per_node[first : first + num_chunks] = len(related)
            if related:
                nodes = [number[other.op] * num_items + other.site * num_chunks + chunks for other in related]
                needs.append(np.stack(nodes, axis=1).ravel())
                carried.append([(other.need.carries, min(site, other.site)) for other in related])
    return np.concatenate([[0], np.cumsum(per_node)]), np.concatenate(needs), carried
