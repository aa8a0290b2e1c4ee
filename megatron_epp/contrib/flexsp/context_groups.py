"""Groups of context-parallel ranks that share parts of a chunk (FlexSP, arXiv 2412.01523): a degree for each sequence.

Without groups all context-parallel ranks of a stage share all tokens of every chunk. With groups a chunk's sequences are
divided over groups of 1, 2, 4, ... of these ranks, which run at the same time. So a chunk takes as long as its slowest group,
and its bytes are its fullest rank's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from megatron_epp.plan.chunk import Chunk
from megatron_epp.plan.plan import Extension
from megatron_epp.plan.reading import whole


class Group(NamedTuple):
    """Ranks ``[first, first + degree)`` that share the tokens of some sequences of a chunk, by their positions in it."""

    first: int
    degree: int
    segments: tuple[int, ...]

    def tokens(self, chunk: Chunk) -> int:
        """Number of tokens of the group's sequences."""
        return sum(chunk.segments[at].num_tokens for at in self.segments)

    def rank_tokens(self, chunk: Chunk) -> int:
        """Number of tokens on each of the ranks, rounded up."""
        return -(-self.tokens(chunk) // self.degree)


@dataclass(frozen=True, slots=True)
class ContextGroups:
    """Division of all chunks over the context-parallel ranks of a stage, as an extension of a plan.

    `rank_tokens` are tokens by chunk for which the bytes of its steps are: as many as its fullest rank may have.
    """

    field: ClassVar[str] = "context_groups"

    num_ranks: int
    of_chunk: tuple[tuple[Group, ...], ...]
    rank_tokens: tuple[int, ...]

    def to_json(self) -> Any:
        """Return plain data; `from_json` gives an equal object."""
        of_chunk = [[[int(first), int(degree), [*map(int, at)]] for first, degree, at in own] for own in self.of_chunk]
        rank_tokens = [int(tokens) for tokens in self.rank_tokens]
        return {"num_ranks": int(self.num_ranks), "of_chunk": of_chunk, "rank_tokens": rank_tokens}

    @staticmethod
    def from_json(value: Any) -> ContextGroups:
        """Read `to_json`. Raises `EppError`, `KeyError`, `TypeError` or `ValueError` for data of another form."""
        of_chunk = tuple(
            tuple(Group(whole(first), whole(degree), tuple(map(whole, at))) for first, degree, at in own)
            for own in value["of_chunk"]
        )
        return ContextGroups(whole(value["num_ranks"]), of_chunk, tuple(map(whole, value["rank_tokens"])))

    def of_rank(self, chunk: int, rank: int) -> Group:
        """Return the group of a context-parallel rank in a chunk, one of its own and without segments if it is in none."""
        among = (group for group in self.of_chunk[chunk] if group.first <= rank < group.first + group.degree)
        return next(among, Group(rank, 1, ()))

    def divided(self, chunk: int) -> Sequence[tuple[str, Sequence[int]]]:
        """Return the groups of a chunk by their ranks, each with the positions of its segments."""
        return [
            (f"ranks {first}-{first + degree - 1}" if degree > 1 else f"rank {first}", at)
            for first, degree, at in self.of_chunk[chunk]
        ]

    def faults(self, chunks: Sequence[Chunk], lengths: Sequence[int]) -> Iterator[str]:
        """Yield what is wrong: overlapping groups, sequences without one or in two, ranks that hold too much, cut sequences."""
        if not len(self.of_chunk) == len(self.rank_tokens) == len(chunks):
            yield f"groups of {len(self.of_chunk)} chunks, and tokens of {len(self.rank_tokens)}; there are {len(chunks)}"
            return
        for c, (chunk, groups, most) in enumerate(zip(chunks, self.of_chunk, self.rank_tokens, strict=True)):
            yield from (f"chunk {c}: {reason}" for reason in self._faults(chunk, groups, most))
            if chunk.slice_of(lengths) is not None and [group.degree for group in groups] != [self.num_ranks]:
                yield f"chunk {c}: groups share whole sequences, and this is a slice: all {self.num_ranks} ranks share it"

    def _faults(self, chunk: Chunk, groups: Sequence[Group], most: int) -> Iterator[str]:
        taken: dict[int, Group] = {}
        held: dict[int, Group] = {}
        for group in groups:
            if group.degree < 1 or group.first < 0 or group.first + group.degree > self.num_ranks:
                yield f"{_name(group)} is not within the {self.num_ranks} context-parallel ranks"
                continue
            if group.degree & (group.degree - 1) or group.first % group.degree:
                yield f"{_name(group)} is none that runs have: of 1, 2, 4, ... ranks, the first a multiple of their number"
            other = next((taken[rank] for rank in range(group.first, group.first + group.degree) if rank in taken), None)
            if other is not None:
                yield f"{_name(group)} overlaps {_name(other)}, which runs at the same time"
            taken |= dict.fromkeys(range(group.first, group.first + group.degree), group)
            for at in group.segments:
                if not 0 <= at < len(chunk.segments):
                    yield f"{_name(group)} has segment {at}; there are {len(chunk.segments)}"
                elif at in held:
                    yield f"sequence {chunk.segments[at].sequence} is in {_name(held[at])} and in {_name(group)}"
                held[at] = group
            known = group._replace(segments=tuple(at for at in group.segments if 0 <= at < len(chunk.segments)))
            if (tokens := known.rank_tokens(chunk)) > most:
                yield f"{_name(group)} is too small: {tokens} tokens on each rank, and the bytes of the steps are for {most}"
        for at, segment in enumerate(chunk.segments):
            if at not in held:
                yield f"sequence {segment.sequence} is in no group"


def groups_of(extensions: Sequence[Extension]) -> ContextGroups | None:
    """Return the groups among the extensions of a plan or of decisions; None if there are none."""
    return next((extension for extension in extensions if isinstance(extension, ContextGroups)), None)


def _name(group: Group) -> str:
    last = group.first + group.degree - 1
    return f"the group of rank {last}" if group.degree == 1 else f"the group of ranks {group.first} to {last}"
