"""Placement of stages on pipeline ranks and their model chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of stages on ranks, equally many on each. A rank's chunks are in the order of their stages.

    ``looped`` goes round the ranks again and again, as Megatron's interleaved pipelines do; ``v`` turns round at either end, so
    that neighbouring stages there share a rank. ``ring`` is looped with one stage more, on the first chunk of the first rank.
    """

    kind: Literal["looped", "v", "ring"]
    num_ranks: int
    num_chunks: int

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks + (self.kind == "ring")

    @property
    def is_looped(self) -> bool:
        """True if every chunk is the stage that Megatron assumes."""
        return self.kind != "v" or self.num_chunks == 1

    @property
    def rank_of(self) -> tuple[int, ...]:
        return tuple(map(self._rank, range(self.num_stages)))

    @property
    def last_rank(self) -> int:
        return self._rank(self.num_stages - 1)

    @property
    def ends_share_rank(self) -> bool:
        """True if the first and the last stage are different chunks of one rank."""
        return self.num_stages > 1 and self.last_rank == 0

    def stages(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, where in enumerate(self.rank_of) if where == rank)

    def _rank(self, stage: int) -> int:
        lap, rank = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - rank if self.kind == "v" and lap % 2 else rank


def placements_of(num_ranks: int) -> tuple[Placement, ...]:
    """Placements that are tried, the plainest first."""
    plainest, *looped = (Placement("looped", num_ranks, count) for count in (1, 2, 4))
    return (plainest,) if num_ranks == 1 else (plainest, looped[0], Placement("v", num_ranks, 2), looped[1])
