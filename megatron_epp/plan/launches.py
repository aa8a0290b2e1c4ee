"""The launches of every rank as columns: actions, messages, reductions and copies, in the order in which ranks issue them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, starmap

import numpy as np

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.columns import Integers

Rows = Sequence[Sequence[Action]]
"""Launches of every rank as actions."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of all ranks, rank after rank."""

    ops: tuple[Op, ...]  # operations, sorted by name
    op: Integers  # operation of each launch, an index in `ops`
    site: Integers
    chunk: Integers
    starts: Integers  # index of every rank's first launch, and the number of all

    @classmethod
    def of(cls, rows: Rows | Launches) -> Launches:
        """Return launches as columns, in which they may be already."""
        if isinstance(rows, Launches):
            return rows
        actions = list(chain.from_iterable(rows))
        ops = tuple(sorted({action.op for action in actions}))
        index = {op: at for at, op in enumerate(ops)}
        columns = (np.array(column, dtype=np.int64) for column in zip(*((index[op], *of) for op, *of in actions), strict=True))
        op, site, chunk = columns if actions else (np.zeros(0, dtype=np.int64),) * 3
        return cls(ops, op, site, chunk, np.array([*accumulate(map(len, rows), initial=0)]))

    @property
    def num_ranks(self) -> int:
        return len(self.starts) - 1

    def by_op(self, values: Iterable[int]) -> Integers:
        """Return the value of each launch's operation, given one value for each of `ops`."""
        return np.array([*values], dtype=np.int64)[self.op]

    def ranks(self) -> Integers:
        return np.repeat(np.arange(self.num_ranks), np.diff(self.starts))

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        ops = list(map(self.ops.__getitem__, self.op.tolist()))
        actions = list(starmap(Action, zip(ops, self.site.tolist(), self.chunk.tolist(), strict=True)))
        return tuple(tuple(actions[first:last]) for first, last in pairwise(self.starts.tolist()))
