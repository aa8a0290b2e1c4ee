"""Recompute frontier: for a stage and chunk, the modes worth using, each saving more bytes at a higher price than the last.

A recompute step takes one layer from one mode to the next. All layers of the stage take the first step before any takes the
second, so a single number says what all of them do: the steps taken, of which each mode has as many as the stage has layers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_epp.cost import ChunkWork, Costs
from megatron_epp.cost.work import IntColumn, TimeColumn
from megatron_epp.plan import NO_RECOMPUTE, Recompute
from megatron_epp.plan.recompute import MODES

ABSENT = -1
_NAMES = tuple(MODES)


@dataclass(frozen=True, slots=True)
class FrontierStep:
    """One step of every chunk's recompute frontier, as columns over the chunks.

    Attributes:
        mode: position in `MODES` of the mode it leads to; `ABSENT` where the frontier is shorter.
        saved: bytes that a layer saves by this step.
        layer_us: microseconds that it adds to the backward.
        fuller: growth of the layer's peak bytes while its backward runs; below zero where the peak shrinks.
    """

    mode: IntColumn
    saved: IntColumn
    layer_us: TimeColumn
    fuller: IntColumn


def recompute_frontier(
    stage: int, work: ChunkWork, costs: Costs, modes: Sequence[str], in_order: bool = False
) -> list[FrontierStep]:
    """Compute the recompute frontier of every chunk on one stage: after each mode, the one of least price per byte saved.

    With one mode there is one step, whatever it costs. On a stage without layers no step saves anything.

    Args:
        in_order: the modes one after the other as given, the same for all chunks; each must save more than the one before.
    """
    layers = costs.num_layers[stage]
    kept = costs.activation_bytes(stage, work, NO_RECOMPUTE)
    plain = costs.layer_peak_bytes(stage, work).num_bytes
    saved, took_us, fuller = [], [], []
    for name in modes:
        one = Recompute(**{name: 1})
        gives = np.minimum(kept - costs.activation_bytes(stage, work, one), kept // layers) if layers else 0 * kept
        saved.append(np.maximum(gives, 0))
        took_us.append(costs.recompute_us(stage, work, one))
        fuller.append(costs.layer_peak_bytes(stage, work, name).num_bytes - plain)
    mode_indices = np.array([_NAMES.index(name) for name in modes])
    if len(modes) == 1 or in_order:
        columns = (np.diff(rows, axis=0, prepend=0 * rows[0][None]) for rows in (saved, took_us, fuller))
        return [
            FrontierStep(np.full(len(kept), mode_index), *frontier_step)
            for mode_index, *frontier_step in zip(mode_indices, *columns, strict=True)
        ]
    at_saved, at_us, at_fuller = 0 * kept, np.zeros(len(kept)), 0 * kept
    all_saved, all_us, all_fuller, chunks = np.array(saved), np.array(took_us), np.array(fuller), np.arange(len(kept))
    frontier = []
    for _ in modes:
        more, longer_us = all_saved - at_saved, all_us - at_us
        price = np.where(more > 0, longer_us / np.maximum(more, 1), np.inf)
        chosen = price.argmin(axis=0)
        there = np.isfinite(price[chosen, chunks])
        if not there.any():
            break
        found = (more, longer_us, all_fuller - at_fuller)
        step, step_us, step_fuller = (np.where(there, rows[chosen, chunks], 0) for rows in found)
        frontier.append(FrontierStep(np.where(there, mode_indices[chosen], ABSENT), step, step_us, step_fuller))
        at_saved, at_us, at_fuller = at_saved + step, at_us + step_us, at_fuller + step_fuller
    return frontier or [FrontierStep(np.full(len(kept), ABSENT), at_saved, at_us, at_fuller)]


@functools.lru_cache(1 << 14)  # plans have few different ones
def recompute_of(modes: tuple[int, ...], num_layers: int, num_steps: int) -> Recompute:
    """Return the layers per mode after a number of recompute steps.

    Args:
        modes: positions of the frontier's modes in `MODES`.
    """
    counts = dict.fromkeys(MODES, 0)
    if num_steps and num_layers:
        complete, rest = divmod(num_steps, num_layers)
        if rest:
            counts[_NAMES[modes[complete]]] = rest
        if complete:
            counts[_NAMES[modes[complete - 1]]] += num_layers - rest
    return Recompute(**counts)


def num_steps_of(recompute: Recompute, modes: Sequence[int]) -> int:
    """Return the number of recompute steps: the inverse of `recompute_of`."""
    return sum(count * (modes.index(_NAMES.index(name)) + 1) for name, count in recompute.by_mode())
