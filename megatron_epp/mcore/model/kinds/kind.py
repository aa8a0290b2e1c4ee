"""Row of the table of kinds of Megatron's layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_epp.mcore.arguments.flag import MegatronFlag


def _nothing(args: argparse.Namespace) -> Iterable[str]:
    return ()


def _as_it_is(model: Any, args: argparse.Namespace) -> None:
    """Change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A kind of layers that runs in slices.

    Attributes:
        name: in errors.
        carries: what slices of a sequence hand on in such a layer; empty for nothing.
        symbol: in hybrid patterns; empty for none.
        flags: of Megatron's that plans cannot honour with such layers.
        problems: function from parsed flags to what else cannot be honoured, a line each.
        adopt: changes such layers of a model chunk that Megatron has built, ahead of data parallelism.
    """

    name: str
    carries: str = ""
    symbol: str = ""
    flags: tuple[MegatronFlag, ...] = ()
    problems: Callable[[argparse.Namespace], Iterable[str]] = _nothing
    adopt: Callable[[Any, argparse.Namespace], None] = _as_it_is
