"""When data-parallel gradient reduction starts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch


class Reduction:
    """Holds back the reduction of a rank's gradients, as a context manager around an iteration's actions.

    Megatron sets `config.no_sync_func` where reduction may overlap with compute (`--overlap-grad-reduce`); otherwise nothing
    happens here and finalisation reduces. Reduction is started in one of two ways. *By hooks*, bucket by bucket during the last
    action that gives gradients: as in Megatron's schedules, on the first stage, or with `grad_sync_func` unset on any. *At
    once*, when all gradients of a stage have come: everywhere else.

    Replicas must start the same reductions in the same order, and their plans differ. With several stages on the rank, or
    weight gradients apart from their backwards, hooks would fire in an order of each plan's own. Then stages start at once, the
    last stage of the rank first: backwards end in that order in every plan, and a stage whose weight gradients take longer
    holds up those before it.

    Args:
        config: the model's.
        chunks: the rank's model chunks, by ascending stage.
        has_first: the rank has the pipeline's first stage.
        splits_weights: weight gradients may be apart from their backwards.
        waits: nothing starts before `start`, which is to be called after the block.
    """

    def __init__(
        self, config: Any, chunks: Sequence[torch.nn.Module], has_first: bool, splits_weights: bool, waits: bool = False
    ) -> None:
        self._chunks = chunks
        self._no_sync = _one_each(config.no_sync_func, chunks)
        by_hooks = len(chunks) == 1 and not splits_weights and not waits and (config.grad_sync_func is None or has_first)
        self._starts = _one_each(None if by_hooks else config.grad_sync_func, chunks)
        if self._no_sync and not by_hooks and not self._starts:
            self._starts = [chunk.start_grad_sync for chunk in chunks]
        self._waits = waits
        self._complete: set[int] = set()
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Reduction:
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._held.close()

    def before_last_gradient(self, index: int) -> None:
        """Chunk `index` is about to get its last gradients."""
        if not self._starts:
            self._held.close()

    def after_last_gradient(self, index: int) -> None:
        """Chunk `index` has all its gradients."""
        self._complete.add(index)
        if not self._waits:
            self.start()

    def start(self) -> None:
        """Start the reduction of every chunk whose turn it is."""
        while self._starts and len(self._starts) - 1 in self._complete:
            at = len(self._starts) - 1
            self._starts.pop()(self._chunks[at].parameters())


def _one_each(functions: Any, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Megatron gives one function, or a list with one for every chunk, or None."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions] * len(chunks)
