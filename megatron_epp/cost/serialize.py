"""Limits of the numbers in files of costs and profiles."""

from __future__ import annotations

from megatron_epp.cost.work import Line
from megatron_epp.plan import EppError
from megatron_epp.plan.codec import Codec
from megatron_epp.plan.reading import MOST_LAYERS

CODEC = Codec(
    least={
        **dict.fromkeys(("heads", "kv_heads", "queries_per_key", "stage_ranks", "host_sharing", "host_turns"), 1),
        "weight_bytes": 0.125,  # a weight takes a bit at least
    },
    most={"count": MOST_LAYERS, "num_layers": MOST_LAYERS, "offloadable_share": 1.0, "fragmentation_share": 1.0},
    least_of_others=0,
)


def check_part(where: str, part: Line, whole: Line) -> None:
    """Raise `EppError` if a line exceeds the line that it is a part of: the remainder would be negative."""
    if part.within(whole) != part:
        raise EppError(f"{where} is above the backward that it is a part of ({part} and {whole})")
