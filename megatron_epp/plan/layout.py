"""Layout of a model: the layers that every pipeline stage holds, and the ranks of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

from megatron_epp.plan.codec import Codec, FileFormat
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.reading import MOST_LAYERS, brief, whole

_SHARDED = "sharded"


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of every stage and the ranks of the stages.

    Stages hold consecutive layers, so a layout with the right sum leaves no layer out and holds none twice. Raises `EppError`
    if a stage has a negative number of layers, or the placement has another number of stages.
    """

    layers: tuple[int, ...]  # of every stage, first to last
    placement: Placement
    shards_vocabulary: bool = False  # the output layer is in shards over the ranks, equal ones, and not on the last stage
    chosen_with: Mapping[str, Any] = field(default_factory=dict, compare=False)  # flags of the run that has chosen it, by name

    def __post_init__(self) -> None:
        what = f"a layout of {layers_text(self.layers)} layers"
        if min(self.layers, default=-1) < 0:
            raise EppError(f"{what} has a stage with a negative number of layers, or none")
        if len(self.layers) != self.placement.num_stages:
            raise EppError(
                f"{what} has {len(self.layers)} stages, and its placement has "
                f"{self.placement.num_stages} ({self.placement.num_ranks} ranks with {self.placement.num_chunks} each)"
            )

    @property
    def is_movable(self) -> bool:
        """True if layers may move to other stages, and the output layer may be divided."""
        return True

    def costs_of[C](self, costs: C, profile: Any) -> C:
        """Return the costs of the stages, given those of stages cut between layers and the profile that these are made of."""
        return costs

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def vocabulary_shares(self) -> tuple[float, ...]:
        """Share of the output layer on every rank; empty if it is on the last stage."""
        ranks = self.placement.num_ranks
        return (1 / ranks,) * ranks if self.shards_vocabulary else ()

    def check(self, num_layers: int, num_ranks: int) -> None:
        """Raise `EppError` unless the layout is one of `num_layers` layers on `num_ranks` pipeline ranks."""
        what = f"a layout of {layers_text(self.layers)} layers"
        if self.num_layers != num_layers:
            raise EppError(f"{what} has {self.num_layers} in all, and the model has {num_layers}")
        if self.placement.num_ranks != num_ranks:
            raise EppError(f"a layout for {self.placement.num_ranks} pipeline ranks, where there are {num_ranks}")

    def to_megatron(self, predictions: int = 0) -> str | None:
        """Format as Megatron's ``pipeline_model_parallel_layout`` (`layout_flag`); None if not looped."""
        return layout_flag(self.layers, predictions) if self.placement.is_looped else None

    def text(self) -> str:
        """Describe the layout: ``stages of 9, 8 (6 times), 7 layers, 2 per rank, v, the vocabulary over all ranks``."""
        placement = self.placement
        where = "one per rank" if placement.num_chunks == 1 else f"{placement.num_chunks} per rank, {placement.kind}"
        where += ", the vocabulary over all ranks" * self.shards_vocabulary
        return f"stages of {runs_text(self.layers)} layers, {where}"

    def to_json(self) -> str:
        """Return the text of a layout file; `from_json` gives an equal layout."""
        vocabulary = _SHARDED if self.shards_vocabulary else None
        return _FORMAT.write(_Fields(self.layers, self.placement.rank_of, vocabulary, self.chosen_with)) + "\n"

    @staticmethod
    def from_json(text: str) -> Layout:
        """Read the text of a layout file. Raises `EppError` if it is something else."""
        file = _FORMAT.parse(_Fields, text, "the layout")
        if file.vocabulary not in (None, _SHARDED):
            raise EppError(f"vocabulary of a layout is {brief(file.vocabulary)}; it is {_SHARDED!r} or left out")
        placement = _placement(file.rank_of, len(file.layers_per_stage))
        return Layout(file.layers_per_stage, placement, file.vocabulary is not None, file.chosen_with)


@dataclass(frozen=True, slots=True)
class _Fields:
    layers_per_stage: tuple[int, ...]
    rank_of: tuple[int, ...]
    vocabulary: str | None = None
    chosen_with: Mapping[str, Any] = field(default_factory=dict)


def layout_flag(layers: Sequence[int], predictions: int = 0) -> str:
    """Format layers per stage as Megatron's ``pipeline_model_parallel_layout``, embedding and loss included:
    ``Et*7|t*8|t*7L``; with the layers of multi-token prediction on the last stage ``Et*7|t*8|t*7mL``.
    """
    stages = [f"t*{count}" if count > 1 else "t" * count for count in layers]
    return f"E{'|'.join(stages)}{'m' * predictions}L"


def staged_pattern(pattern: str, layers: Sequence[int]) -> str:
    """Format the layers of a hybrid model with a bar between its stages, and multi-token prediction behind them."""
    return "|".join(pattern[start:end] for start, end in pairwise(accumulate(layers, initial=0))) + pattern[sum(layers) :]


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Return the layers of stages written as ``8,7,9``; None if the text is something else.

    Raises `EppError` for parts of layers, such as ``8,7.5,8.5``, with whole ones that are near.
    """
    try:
        counts = [float(word) if "." in word else int(word) for word in text.split(",")]
    except ValueError:
        return None
    if not all(0 <= count <= MOST_LAYERS for count in counts):
        return None
    layers = tuple(end - start for start, end in pairwise([round(end) for end in accumulate(counts, initial=0)]))
    if layers != tuple(counts):
        raise EppError(f"stages begin between layers, not inside them: give whole ones, such as {layers_text(layers, ',')}")
    return layers


def layers_text(layers: Sequence[int], between: str = ", ") -> str:
    """Format layers of stages; with a comma alone `between` them as a flag takes them (`parse_layers`)."""
    return between.join(map(str, layers))


def runs_text(layers: Sequence[int]) -> str:
    """Format layers of stages, equal ones in a row once: ``9, 8 (6 times), 7``."""
    runs = [(count, len(list(equal))) for count, equal in groupby(layers)]
    words = ([f"{count} ({times} times)"] if times > 2 else [f"{count}"] * times for count, times in runs)
    return ", ".join(chain.from_iterable(words))


def _placement(rank_of: tuple[int, ...], num_stages: int) -> Placement:
    """Return the placement with these ranks of stages. Raises `EppError` if there is none."""
    num_ranks = len(set(rank_of))
    chunks, rest = divmod(num_stages, max(1, num_ranks))
    for kind in ("looped", "v"):
        if not rest and (placement := Placement(kind, num_ranks, chunks)).rank_of == rank_of:
            return placement
    raise EppError(
        f"rank_of of a layout is {brief(list(rank_of))}: it names the rank of each of {num_stages} stages, with ranks from 0, "
        "equally many stages on each, and the stages going round the ranks (looped) or turning round at either end (v)"
    )


def _number(value: Any) -> int:
    """Return the number of layers, or of a rank, of a layout file, in which layers may be written as ``8.0``."""
    return whole(int(value) if isinstance(value, float) and value.is_integer() else value, 0, MOST_LAYERS)


_FORMAT = FileFormat("layout", "megatron-epp/layout", 1, Codec({int: _number}))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as whole layers allow. Raises `EppError` if there are more stages than layers.

    Stages just before the last have one more where needed: earlier ones hold more chunks at a time, and the last has the head.
    """
    if num_stages > num_layers:
        remedies = Remedy("change", "num_layers"), Remedy("change", "num_stages")
        raise EppError(f"{num_layers} layers do not make {num_stages} stages", *remedies)
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages))
