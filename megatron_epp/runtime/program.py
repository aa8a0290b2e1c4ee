"""A rank's program: its lowered actions and chunk layouts, made from the plan alone, so that it can be prepared ahead."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_epp.plan import Action, Plan
from megatron_epp.plan.lowering import lower
from megatron_epp.runtime.context import ChunkLayout, chunk_layouts


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's part of a plan.

    Attributes:
        actions: its actions in order, sends and receives included.
        layouts: layouts of every chunk.
    """

    actions: tuple[Action, ...]
    layouts: tuple[ChunkLayout, ...]


@lru_cache(maxsize=16)
def prepare(plan: Plan, rank: int) -> Program:
    """Lower a plan and lay out its chunks.

    The last 16 results are cached. Planning ahead calls this too, overlapped with the running iteration: for large plans it
    takes tens of milliseconds, which the executor then saves.
    """
    return Program(lower(plan)[rank], chunk_layouts(plan))
