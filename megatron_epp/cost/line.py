"""Time of a pass as a linear function of tokens and attention pairs, and costs of recomputing a part of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megatron_epp.cost.work import IntColumn

TimeColumn = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Line:
    """Time of one pass: ``fixed_us + per_token_us * tokens + per_pair_us * pairs``."""

    fixed_us: float = 0.0
    per_token_us: float = 0.0
    per_pair_us: float = 0.0

    @overload
    def time_us(self, tokens: float, pairs: float) -> float: ...
    @overload
    def time_us(self, tokens: IntColumn, pairs: IntColumn) -> TimeColumn: ...
    def time_us(self, tokens: Any, pairs: Any) -> Any:
        """Time in microseconds.

        Args:
            tokens: padded tokens, a number or a column.
            pairs: causal query-key pairs, of the same shape.
        """
        return self.fixed_us + self.per_token_us * tokens + self.per_pair_us * pairs

    def scaled(self, factor: float) -> Line:
        return Line(self.fixed_us * factor, self.per_token_us * factor, self.per_pair_us * factor)

    def within(self, whole: Line) -> Line:
        """Return the line with each coefficient limited to that of the line it is a part of."""
        return Line(
            min(self.fixed_us, whole.fixed_us),
            min(self.per_token_us, whole.per_token_us),
            min(self.per_pair_us, whole.per_pair_us),
        )

    def __add__(self, other: Line) -> Line:
        return Line(
            self.fixed_us + other.fixed_us, self.per_token_us + other.per_token_us, self.per_pair_us + other.per_pair_us
        )


NO_TIME = Line()


@dataclass(frozen=True, slots=True)
class Level:
    """A layer that recomputes a part of its forward.

    Attributes:
        again: time of the recomputed part.
        bytes_per_token: kept from forward to backward, K and V included if attention is not recomputed.
        full_bytes_per_token: peak during its backward, K and V included; None if it equals that of a layer that keeps
            everything.
    """

    again: Line
    bytes_per_token: float
    full_bytes_per_token: float | None = None
