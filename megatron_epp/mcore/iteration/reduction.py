"""Reduction of gradients over data-parallel replicas, at the points of a plan where a stage's gradients are complete."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron_epp.plan.attributes import having


class Reduction:
    """Context manager around an iteration's actions that delays the reduction of a rank's gradients.

    Megatron sets `config.no_sync_func` to the chunks' own `no_sync` if reduction may overlap with compute
    (`--overlap-grad-reduce`); otherwise finalisation reduces, unless `config.grad_sync_func` is set alone. A framework that
    sets another function may reduce after several calls of the schedule, so that nothing is started for it here. Reduction is
    started in one of two ways. *By hooks*, bucket by bucket during the last backward: on the first stage, if it is the rank's
    only one and weight gradients are not split, because no gradient has to be sent after it, and where there is no function
    that starts it. *At once*, by the plan's `REDUCE`: in all other cases, among them chunks with a vocabulary shard, whose
    weight gradient belongs to no backward. There, a reduction started by hooks would precede the stage's last gradient in the
    device's queue, and that rank's whole pipeline would wait for all replicas.

    Replicas must start the same reductions in the same order although their plans differ: lowering orders them from the last
    stage to the first. The rank's chunks are given by ascending stage.

    On one hardware queue a second collective of a stage starts behind the end of the first, and all that is launched later
    waits for it. Megatron launches one for each model chunk of a rank but its first (`disable_bucketing`), whose buckets are
    reduced last, when the rank has no compute left; experts' gradients are reduced on another communicator.

    Megatron reads from the device whether a gradient is NaN before it reduces it (`check_for_nan_in_grad`). In the middle of a
    plan the host would lose its lead over the device, so those checks are made at the end.
    """

    def __init__(self, config: Any, chunks: Sequence[torch.nn.Module], may_use_hooks: bool, splits_weights: bool) -> None:
        self._chunks, self._remaining = chunks, len(chunks)
        self._no_sync = one_each(config.no_sync_func, chunks[:1])
        starts = one_each(config.grad_sync_func, chunks)
        own = [getattr(chunk, "no_sync", None) for chunk in chunks if hasattr(chunk, "start_grad_sync")]
        # Methods bound to the same chunks are equal, so this is Megatron's own setting, with --no-align-grad-reduce. Its
        # schedules then reduce by hooks on every stage, which would be in front of a plan's messages.
        if not starts and own and self._no_sync == own:
            starts = [chunk.start_grad_sync for chunk in chunks]
        self._every = starts
        self._by_hooks = not starts or (len(chunks) == 1 and may_use_hooks and not splits_weights)
        self._starts = [] if self._by_hooks else starts
        self._held = [contextlib.ExitStack() for _ in self._no_sync]
        self._checks: list[Callable[[], None]] = []
        self._deferred = set[int]()

    def __enter__(self) -> Reduction:
        for held, no_sync in zip(self._held, self._no_sync, strict=True):
            held.enter_context(no_sync())
        return self

    def __exit__(self, *error: object) -> None:
        for held in reversed(self._held):
            held.close()
        if error[0] is None:
            for check in self._checks:
                check()

    def before_last_gradient(self, index: int) -> None:
        """Release the hooks if reduction is by hooks: chunk `index` is about to get its last gradients."""
        # Megatron reduces a bucket when its parameters have had as many gradients as in the first iteration's last backward, so
        # the same backwards must be outside of `no_sync` in every iteration: the last one of each chunk.
        if self._by_hooks and self._held:
            self._held[index % len(self._held)].close()

    def defer(self, index: int) -> None:
        """Leave chunk `index` out until `reduce_deferred`: its gradients are complete only behind the plan's actions."""
        self._deferred.add(index)

    def reduce_deferred(self, index: int) -> None:
        """Start the reduction of a chunk that was left out."""
        self._deferred.remove(index)
        self.reduce(index)

    def reduce(self, index: int) -> None:
        """Start the reduction of chunk `index`, whose gradients are complete."""
        if index in self._deferred:
            return
        self._remaining -= 1
        if self._starts:
            # Behind the last one no compute follows in the plan, so its check may wait for the device.
            with _later(self._checks) if self._remaining else contextlib.nullcontext():
                self._starts[index](self._chunks[index].parameters())
        elif self._remaining and len(self._held) == 1:  # one function for all chunks: the others go on
            self._held[0].enter_context(self._no_sync[0]())

    def reduce_all(self) -> None:
        """Start the reductions of all chunks, the last stage first, in an iteration without backwards, and so without hooks."""
        for chunk, start in reversed([*zip(self._chunks, self._every, strict=False)]):
            start(chunk.parameters())


class NoReduction(Reduction):
    """Context manager around an iteration whose gradients a later one reduces."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._no_sync = [chunk.no_sync for chunk in chunks if hasattr(chunk, "no_sync")]
        self._held, self._checks, self._deferred = [contextlib.ExitStack() for _ in self._no_sync], [], set()

    def before_last_gradient(self, index: int) -> None:
        """Keep the hooks held."""

    def reduce(self, index: int) -> None:
        """Start nothing."""


def _later(checks: list[Callable[[], None]]) -> contextlib.AbstractContextManager[None]:
    """Append Megatron's checks of results to a list instead of making them, which waits for the device."""
    machine = get_rerun_state_machine()
    check = machine.validate_result
    return having(machine, validate_result=lambda *args, **named: checks.append(partial(check, *args, **named)))


def gather_parameters(config: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Start the all-gathers of all chunks' parameters, the first stage first, where Megatron overlaps them with compute.

    Otherwise the first forward of every stage would start its own, and wait for it (`--overlap-param-gather`). Megatron sets
    `param_sync_func` of its `config` after the first iteration. Chunks are by ascending stage.
    """
    for synchronise, chunk in zip(one_each(config.param_sync_func, chunks), chunks, strict=False):
        synchronise(chunk.parameters())


def process_groups(model: torch.nn.Module) -> Any:
    """Return the process groups that a model was built with; Megatron's own if it does not say, as a multimodal one may not."""
    inner: Any = model
    while not hasattr(inner, "pg_collection") and hasattr(inner, "module"):
        inner = inner.module
    return getattr(inner, "pg_collection", None) or ProcessGroupCollection.use_mpu_process_groups()


def one_each(functions: Any, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Return a function per chunk from Megatron's setting: one function, a list with one per chunk, or None (empty)."""
    if functions is None:
        return []
    return list(functions) if isinstance(functions, list) else [functions] * len(chunks)
