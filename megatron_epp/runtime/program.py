"""What one rank must know of a plan before it runs: made from the plan alone, so it can be made ahead."""

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
        actions: in order, sends and receives included.
        layouts: of every chunk.
    """

    actions: tuple[Action, ...]
    layouts: tuple[ChunkLayout, ...]


@lru_cache(maxsize=16)
def prepare(plan: Plan, rank: int) -> Program:
    """Lower a plan and lay out its chunks.

    The last few results are kept. Whoever plans ahead calls this too, beside the running iteration: for large plans it takes
    tens of milliseconds, which the executor then does not spend.
    """
    return Program(lower(plan)[rank], chunk_layouts(plan))
