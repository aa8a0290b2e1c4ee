"""Layout of a model: the layers that every pipeline stage holds, in halves, and the ranks of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, NamedTuple

from megatron_epp.plan.codec import Codec, FileFormat
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.reading import MOST_LAYERS, brief

_SHARDED = "sharded"


class StageLayers(NamedTuple):
    """Layers of one stage, in the order in which they run."""

    first: int  # number of the first layer that has a part in the stage, from 0
    begins_with_mlp: bool  # that layer's attention is on the stage before, so here it is only its MLP
    num_whole: int  # layers with attention and MLP
    ends_with_attention: bool  # one layer more, whose MLP is on the next stage

    @property
    def num_modules(self) -> int:
        return self.begins_with_mlp + self.num_whole + self.ends_with_attention


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of every stage and the ranks of the stages.

    Layers are counted in halves, since a stage may begin between the attention and the MLP of a layer. Stages hold consecutive
    halves, so a layout with the right sum leaves no layer out and holds none twice. Raises `EppError` if a stage has a negative
    number of layers, or the placement has another number of stages.
    """

    halves: tuple[int, ...]  # half layers of every stage, first to last
    placement: Placement
    shards_vocabulary: bool = False  # the output layer is in shards over the ranks, equal ones, and not on the last stage
    chosen_with: Mapping[str, Any] = field(default_factory=dict, compare=False)  # flags of the run that has chosen it, by name

    def __post_init__(self) -> None:
        if min(self.halves, default=-1) < 0:
            raise EppError(
                f"a layout of {layers_text(self.halves)} layers has a stage with a negative number of layers, or none"
            )
        if len(self.halves) != self.placement.num_stages:
            raise EppError(
                f"a layout of {layers_text(self.halves)} layers has {len(self.halves)} stages, and its placement has "
                f"{self.placement.num_stages} ({self.placement.num_ranks} ranks with {self.placement.num_chunks} each)"
            )

    @staticmethod
    def of_layers(layers: Sequence[int], placement: Placement, *, shards_vocabulary: bool = False) -> Layout:
        return Layout(tuple(2 * count for count in layers), placement, shards_vocabulary)

    @property
    def is_whole(self) -> bool:
        """True if no stage begins inside a layer."""
        return all(count % 2 == 0 for count in self.halves)

    @property
    def is_movable(self) -> bool:
        """True if layers may move to other stages, and the output layer may be divided."""
        return True

    def costs_of[C](self, costs: C) -> C:
        """Return the costs of the stages, given the costs of stages cut between layers or between attention and MLP."""
        return costs

    @property
    def num_layers(self) -> int:
        return sum(self.halves) // 2

    @property
    def layers(self) -> tuple[float, ...]:
        """Layers of every stage, in multiples of a half."""
        return tuple(count / 2 for count in self.halves)

    @property
    def vocabulary_shares(self) -> tuple[float, ...]:
        """Share of the output layer on every rank; empty if it is on the last stage."""
        ranks = self.placement.num_ranks
        return (1 / ranks,) * ranks if self.shards_vocabulary else ()

    def stages(self) -> Iterator[StageLayers]:
        for start, end in pairwise(accumulate(self.halves, initial=0)):
            begins_with_mlp, ends_with_attention = start < end and start % 2 == 1, start < end and end % 2 == 1
            num_whole = (end - start - begins_with_mlp - ends_with_attention) // 2
            yield StageLayers(start // 2, begins_with_mlp, num_whole, ends_with_attention)

    def check(self, num_layers: int, num_ranks: int) -> None:
        """Raise `EppError` unless the layout is one of `num_layers` layers on `num_ranks` pipeline ranks."""
        if sum(self.halves) != 2 * num_layers:
            raise EppError(
                f"a layout of {layers_text(self.halves)} layers has {sum(self.halves) / 2:g} in all, and the model has "
                f"{num_layers}"
            )
        if self.placement.num_ranks != num_ranks:
            raise EppError(f"a layout for {self.placement.num_ranks} pipeline ranks, where there are {num_ranks}")

    def to_megatron(self, predictions: int = 0) -> str | None:
        """Format as Megatron's ``pipeline_model_parallel_layout`` (`layout_flag`); None for half layers, or if not looped."""
        if not (self.is_whole and self.placement.is_looped):
            return None
        return layout_flag([count // 2 for count in self.halves], predictions)

    def text(self) -> str:
        """Describe the layout: ``stages of 9, 8 (6 times), 7 layers, 2 per rank, v, the vocabulary over all ranks``."""
        placement = self.placement
        where = "one per rank" if placement.num_chunks == 1 else f"{placement.num_chunks} per rank, {placement.kind}"
        where += ", the vocabulary over all ranks" * self.shards_vocabulary
        return f"stages of {runs_text(self.halves)} layers, {where}"

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
        return Layout(tuple(map(halves_of, file.layers_per_stage)), placement, file.vocabulary is not None, file.chosen_with)


@dataclass(frozen=True, slots=True)
class _Fields:
    layers_per_stage: tuple[float, ...]
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
    """Return the half layers of stages written as ``8,7.5,8.5``; None if the text is something else."""
    try:
        return tuple(halves_of(float(word) if "." in word else int(word)) for word in text.split(","))
    except (ValueError, EppError):
        return None


def halves_of(layers: Any) -> int:
    """Return how many half layers a number of layers is. Raises `EppError` if it is no multiple of a half, or too large."""
    is_number = isinstance(layers, int | float) and not isinstance(layers, bool)
    if not is_number or not 0 <= layers <= MOST_LAYERS or 2 * layers != int(2 * layers):
        raise EppError(f"layers of a stage are a multiple of 0.5 up to {MOST_LAYERS}, and not {brief(layers)}")
    return int(2 * layers)


def layers_text(halves: Sequence[int]) -> str:
    """Format half layers of stages as layers: ``8, 7.5, 8.5``."""
    return ", ".join(f"{count / 2:g}" for count in halves)


def runs_text(halves: Sequence[int]) -> str:
    """Format half layers of stages as layers, equal ones in a row once: ``9, 8 (6 times), 7.5``."""
    runs = [(count / 2, len(list(equal))) for count, equal in groupby(halves)]
    words = ([f"{count:g} ({times} times)"] if times > 2 else [f"{count:g}"] * times for count, times in runs)
    return ", ".join(chain.from_iterable(words))


def _placement(rank_of: tuple[int, ...], num_stages: int) -> Placement:
    """Return the placement with these ranks of stages. Raises `EppError` if there is none."""
    num_ranks = len(set(rank_of))
    chunks, rest = divmod(num_stages, max(1, num_ranks))
    for kind in ("looped", "v"):
        placement = Placement(kind, num_ranks, chunks)
        if not rest and placement.rank_of == rank_of:
            return placement
    raise EppError(
        f"rank_of of a layout is {brief(list(rank_of))}: it names the rank of each of {num_stages} stages, with ranks from 0, "
        "equally many stages on each, and the stages going round the ranks (looped) or turning round at either end (v)"
    )


_FORMAT = FileFormat("layout", "megatron-epp/layout", 1, Codec({float: lambda layers: halves_of(layers) / 2}))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as even as whole layers allow. Raises `EppError` if there are more stages than layers.

    Stages just before the last have one more where needed: earlier ones hold more chunks at a time, and the last has the head.
    """
    if num_stages > num_layers:
        remedies = Remedy("change", "num_layers"), Remedy("change", "num_stages")
        raise EppError(f"{num_layers} layers do not make {num_stages} stages", *remedies)
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages))
