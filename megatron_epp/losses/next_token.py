"""Cross entropy of the next token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megatron_epp.losses.loss import Average, Rows, Scope


@dataclass(frozen=True, slots=True)
class NextToken:
    """Cross entropy of trained tokens, each times the column `weight_column` if there is one.

    Attributes:
        average: of the batch.
        weight_column: name of a column of weights; None for none.
    """

    name: ClassVar[str] = "next token"
    scope: ClassVar[Scope] = Scope.TOKEN
    logged: ClassVar[tuple[str, ...]] = ()

    average: Average = Average.TOKENS
    weight_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.weight_column is None else (self.weight_column,)

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        weights = rows.weights if self.weight_column is None else rows.weights * rows.columns[self.weight_column]
        return -(weights * rows.logprobs).sum(), {}
