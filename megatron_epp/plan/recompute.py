"""Recompute: the parts of a forward that a stage's layers run again in a chunk's backward instead of keeping activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NORMS, PROJECTIONS, CORE_ATTENTION, MLP = "norms", "projections", "core attention", "mlp"
"""Parts of a layer: its norms; the linear layers of attention; attention itself, whose time grows with the square of the
length; the MLP or the experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeMode:
    """Parts of a layer that run again in its backward instead of being saved; `column` is their position in a `Recompute`."""

    name: str
    column: int
    runs_again: frozenset[str]

    @property
    def keeps_kv(self) -> bool:
        """True if a layer keeps keys and values from forward to backward."""
        return PROJECTIONS not in self.runs_again

    @property
    def repeats_attention(self) -> bool:
        """True if core attention runs again, so that it reads keys and values again."""
        return CORE_ATTENTION in self.runs_again


MODES = {
    mode.name: mode
    for mode in (
        RecomputeMode(
            name="full",
            column=0,
            runs_again=frozenset({NORMS, PROJECTIONS, CORE_ATTENTION, MLP}),  # keeps the layer's input
        ),
        RecomputeMode(
            name="selective",
            column=1,
            runs_again=frozenset({NORMS, PROJECTIONS, MLP}),  # keeps the input, and core attention's output and log-sum-exp
        ),
        RecomputeMode(name="mlp", column=2, runs_again=frozenset({NORMS, MLP})),
    )
}
"""Recompute modes by name, most recompute first, and modes that repeat core attention before all others. A stage's first layers
use the first mode. Costs say which of them can be used (`PipelineCosts.recompute_modes`).

CONTRIBUTING.md says what follows a new row.
"""

FULL = "full"
FULL_ONLY = (FULL,)
"""The recompute mode that all costs know and all planners use: a layer's forward once more."""

RECOMPUTE_MODES = tuple(MODES)
"""Names of the recompute modes, most recompute first."""


class Recompute(tuple[int, ...]):
    """Number of a stage's layers that use each recompute mode in one chunk's backward.

    The stage's first layers use the first of `MODES`, the next ones the second, and so on; the remaining ones keep everything.
    Counts are given by column, ``Recompute(4, 0, 1)``, or by name, ``Recompute(full=4, mlp=1)``, and are attributes by name.
    """

    __slots__ = ()

    def __new__(cls, *counts: int, **by_name: int) -> Recompute:
        if len(counts) > len(MODES):
            raise TypeError(f"{len(counts)} counts for {len(MODES)} recompute modes")
        columns = [*counts, *[0] * (len(MODES) - len(counts))]
        for name, count in by_name.items():
            try:
                columns[MODES[name].column] = count
            except KeyError:
                raise TypeError(f"no recompute mode is named {name!r}") from None
        return super().__new__(cls, columns)

    def __getnewargs__(self) -> tuple[int, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"Recompute({', '.join(map(str, self))})"

    def __getattr__(self, name: str) -> int:
        try:
            return self[MODES[name].column]
        except KeyError:
            raise AttributeError(f"no recompute mode is named {name!r}") from None

    @property
    def num_layers(self) -> int:
        return sum(self)

    @property
    def attention_layers(self) -> int:
        """Number of layers, from the stage's first, whose core attention runs again."""
        return sum(count for name, count in self.by_mode() if MODES[name].repeats_attention)

    def by_mode(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the number of layers of every mode that is used, in the order of the layers."""
        for mode in MODES.values():
            if count := self[mode.column]:
                yield mode.name, count

    def mode(self, layer: int) -> str:
        """Name of the recompute mode of the stage's layer with that number, from 0; empty for a layer that keeps everything."""
        for name, count in self.by_mode():
            if layer < count:
                return name
            layer -= count
        return ""

    def __str__(self) -> str:
        """Format as ``3 full + 1 selective``, or ``none``."""
        return " + ".join(f"{count} {name}" for name, count in self.by_mode()) or "none"


NO_RECOMPUTE = Recompute()
