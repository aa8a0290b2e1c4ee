"""Patch that ends the processes a rank starts, such as Megatron's checkpoint writers, together with the rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from megatron_epp.launch.lifetime import EndingWithParent
from megatron_epp.mcore.patches.patching import Patch


def _start_ending(original: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
    @functools.wraps(original)
    def start(self: BaseProcess) -> None:
        if (target := getattr(self, "_target", None)) is not None:
            self._target = EndingWithParent(target)  # type: ignore[attr-defined]
        original(self)

    return start


PATCHES = (
    Patch(
        "multiprocessing.process:BaseProcess.start",
        _start_ending,
        "processes of checkpoint writers and data loaders end with the rank that started them, even if it is killed",
        wraps=True,
    ),
)
