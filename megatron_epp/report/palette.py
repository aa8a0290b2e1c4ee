"""Shades of the pictures: an operation's colour from its table, stronger or weaker by chunk."""

from __future__ import annotations

from megatron_epp.plan.action import Action
from megatron_epp.plan.operations import operation
from megatron_epp.plan.plan import Plan

_BATCHED = 0.5
"""Strength of the colour of chunks of whole sequences."""
_SLICED = (1.0, 0.7, 0.85)
"""Strengths of the colours of chunks with slices, used in turn for the long sequences."""
_ODD = 0.86
"""Factor of the strength for odd chunks, which distinguishes neighbours if there is no room for edges."""
_LEGEND_BASE = "#444444"


class Shades:
    """Colour of every action of a plan: hue by operation, strength by the kind of chunk."""

    def __init__(self, plan: Plan) -> None:
        slices = [chunk.slice_of(plan.lengths) for chunk in plan.chunks]
        self._lengths = plan.lengths
        self._sliced = list(dict.fromkeys(s.sequence for s in slices if s is not None))
        turn = {sequence: i % len(_SLICED) for i, sequence in enumerate(self._sliced)}
        base = [_BATCHED if s is None else _SLICED[turn[s.sequence]] for s in slices]
        self._strength = [strength * _ODD if c % 2 else strength for c, strength in enumerate(base)]
        self._has_batched = any(s is None for s in slices)

    def colour(self, action: Action) -> str:
        return tint(operation(action.op).colour, self._strength[action.chunk])

    @staticmethod
    def kinds() -> list[tuple[str, str]]:
        """Colour and meaning of the two kinds of shades, in grey."""
        return [(tint(_LEGEND_BASE, _BATCHED), "light: whole sequences"), (_LEGEND_BASE, "dark: slices of long sequences")]

    def legend(self) -> list[tuple[str, str]]:
        """Colour and meaning of the shades, in grey."""
        entries = [(tint(_LEGEND_BASE, _BATCHED), "light: whole sequences")] if self._has_batched else []
        if len(self._sliced) > len(_SLICED):
            longest = max(self._lengths[sequence] for sequence in self._sliced)
            meaning = (
                f"dark: slices of {len(self._sliced)} long sequences (up to {longest:,} tokens), {len(_SLICED)} shades in turn"
            )
            return [*entries, (_LEGEND_BASE, meaning)]
        for sequence, strength in zip(self._sliced, _SLICED, strict=False):
            entries.append(
                (tint(_LEGEND_BASE, strength), f"dark: slices of sequence {sequence} ({self._lengths[sequence]:,} tokens)")
            )
        return entries


def tint(colour: str, strength: float) -> str:
    """Mix ``#RRGGBB`` with white: strength 1 is the colour itself, 0 is white."""
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - value)):02X}" for value in channels)


def text_colour(background: str) -> str:
    """Return black or white, whichever has more contrast with ``#RRGGBB``."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
