"""Lengths of sequences as users write them. Some may name a parent, with whose first tokens they begin."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import cycle
from typing import Any

import numpy as np

from megatron_epp.features.trees.obstacles import obstacle_of
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.problem import Lengths, connected
from megatron_epp.plan.reading import MOST_SIZE, brief, nearest_number, parse_json

_KEYS = ("tokens", "parent", "shared")
_WORD = re.compile(r"(\d{1,10})(?:@(\d{1,10}):(\d{1,10}))?")


def read(text: str, has_lines: bool = False) -> Lengths:
    """Read numbers of tokens, ``6000`` or ``5500@0:2000`` for a sequence whose first 2000 tokens are those of sequence 0; or
    JSON, a line for each: ``{"tokens": 5500, "parent": 0, "shared": 2000}``. Raises `EppError`, which names the line of a file.
    """
    rows = [*(_objects(text) if text.lstrip().startswith("{") else _words(text, has_lines))]
    if not rows:
        raise EppError("no lengths")
    lengths, parents = [tokens for tokens, _ in rows], [parent for _, parent in rows]
    return Lengths(tuple(lengths), borrowed=resolved(lengths, parents))


def resolved(lengths: Sequence[int], parents: Sequence[Borrowed]) -> tuple[Borrowed, ...]:
    """Return what sequences borrow of those that hold it, given any that has it; empty if none shares. Raises `EppError`."""
    if not any(parent != NOTHING_BORROWED for parent in parents):
        return ()
    _check(lengths, parents)
    holders = (path_of(*parent, parents)[-1].sequence if parent.tokens else -1 for parent in parents)
    return tuple(Borrowed(holder, shared) for holder, (_, shared) in zip(holders, parents, strict=True))


def words(batch: Lengths | Plan) -> str:
    """Return the list that `read` reads as these sequences."""
    of_parent = (f"@{parent}:{shared}" * (shared > 0) for parent, shared in batch.borrowed or ((-1, 0),) * len(batch.lengths))
    return ",".join(f"{tokens}{rest}" for tokens, rest in zip(batch.lengths, of_parent, strict=True))


def part(batch: Lengths, start: int, end: int) -> Lengths:
    """Return the batch of sequences ``[start, end)``. Raises `EppError` if one has its parent elsewhere."""
    own = list[Borrowed]()
    for q, (parent, shared) in enumerate(batch.borrowed[start:end], start):
        if shared and not start <= parent < end:
            todo = "put sequences of a tree next to each other, and end batches between trees"
            raise EppError(f"sequence {q} is in a batch of {start} to {end - 1}, and its parent, {parent}, is not: {todo}")
        own.append(Borrowed(parent - start, shared) if shared else NOTHING_BORROWED)
    return _batch(batch.lengths[start:end], own)


def drawn(batch: Lengths, size: int, seed: int) -> Lengths:
    """Draw trees without replacement, and begin again when all are used up; of the last one what there is room for, from its
    root on.
    """
    roots = ((q,) for q in range(len(batch.lengths)))
    trees = connected([*roots, *((q, parent) for q, (parent, shared) in enumerate(batch.borrowed) if shared)])
    order, chosen, own = cycle(np.random.RandomState(seed).permutation(len(trees)).tolist()), list[int](), list[Borrowed]()
    while len(chosen) < size:
        root_first = sorted(trees[next(order)], key=lambda q: len(path_of(q, batch.lengths[q], batch.borrowed)))
        at = {-1: -1}
        for q in root_first[: size - len(chosen)]:
            at[q] = len(chosen)
            chosen.append(q)
            own.append(Borrowed(at[batch.borrowed[q].sequence], batch.borrowed[q].tokens))
    return _batch([batch.lengths[q] for q in chosen], own)


def whole(batch: Lengths, context: int, documents: str) -> Lengths:
    """Return the batch. Raises `EppError` if training would cut a sequence of it, or join it to others."""
    if documents == "stream":
        raise EppError("--documents stream joins documents, and sequences with parents stay as they are: leave it out")
    if (longest := max(batch.lengths)) > context:
        has = f"sequence {batch.lengths.index(longest)} has {longest:,} tokens, more than {context:,}"
        raise EppError(f"{has}, and none is cut where some have parents", Remedy("raise", "context", longest))
    return batch


def as_trained(batches: Sequence[Lengths], flags: Mapping[str, Any]) -> tuple[list[Lengths], str]:
    """Return batches, and nothing to say; or without parents, and why, if flags are of a model that does not share prefixes."""
    if not (reason := obstacle_of(flags.get) if any(batch.borrowed for batch in batches) else ""):
        return [*batches], ""
    return [Lengths(batch.lengths) for batch in batches], f"parents are left out, as the model has {reason}"


def _batch(lengths: Sequence[int], borrowed: Sequence[Borrowed]) -> Lengths:
    return Lengths(tuple(lengths), borrowed=tuple(borrowed) if any(count for _, count in borrowed) else ())


def _words(text: str, has_lines: bool) -> Iterator[tuple[int, Borrowed]]:
    for number, line in enumerate(text.split("\n"), 1):
        for word in line.replace(",", " ").split():
            if (match := _WORD.fullmatch(word)) is None or not 0 < int(match[1]) <= MOST_SIZE:
                where = f"line {number}: " * has_lines
                form = "a number of tokens (a whole number, 1 to 2,147,483,647), or tokens@parent:shared, as 5500@0:2000"
                raise EppError(f"{where}{brief(word)} is not {form}{nearest_number(word)}")
            yield int(match[1]), Borrowed(int(match[2]), int(match[3])) if match[2] else NOTHING_BORROWED


def _objects(text: str) -> Iterator[tuple[int, Borrowed]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = parse_json(line, f"line {number}")
        values: list[Any] = [record.get(key) for key in _KEYS] if isinstance(record, dict) and not {*record} - {*_KEYS} else []
        if not values or any(type(value) is not int for value in values[: 1 if len(record) == 1 else 3]):
            form = '{"tokens": 5500} or {"tokens": 5500, "parent": 0, "shared": 2000}, whole numbers'
            raise EppError(f"line {number}: {brief(record)} is not of the form {form}")
        if not 0 < values[0] <= MOST_SIZE:
            raise EppError(f"line {number}: tokens is {values[0]}; it is 1 to {MOST_SIZE:,}")
        yield values[0], Borrowed(*values[1:]) if len(record) > 1 else NOTHING_BORROWED


def _check(lengths: Sequence[int], parents: Sequence[Borrowed]) -> None:
    """Raise `EppError` unless parents are other sequences with the tokens that are shared, and none descends from itself."""
    for q, named in enumerate(parents):
        if named == NOTHING_BORROWED:
            continue
        (parent, shared), what = named, f"sequence {q} of {lengths[q]:,} tokens"
        if not 0 <= parent < len(lengths):
            raise EppError(f"{what} names parent {parent}: there are sequences 0 to {len(lengths) - 1}, in their order")
        if parent == q:
            raise EppError(f"{what} names itself as its parent")
        if not 0 < shared < lengths[q]:
            most = f"1 to {lengths[q] - 1:,} can be, as it has a token of its own"
            raise EppError(f"{what} shares {shared:,} with its parent, sequence {parent}: {most}")
        if shared > lengths[parent]:
            raise EppError(f"{what} shares {shared:,} with its parent, sequence {parent}, which has {lengths[parent]:,}")
    try:
        TopologicalSorter({q: [parent] for q, (parent, shared) in enumerate(parents) if shared}).prepare()
    except CycleError as error:
        circle = ", ".join(map(str, sorted(error.args[1][1:9])))
        raise EppError(f"sequences {circle} are parents of each other, in a circle") from None
