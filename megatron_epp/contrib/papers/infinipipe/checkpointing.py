"""InfiniPipe's stage-aware chunk-level checkpointing: the integer program of Equations 15 to 20, solved with HiGHS."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from megatron_epp.contrib.papers.infinipipe.integer_program import Model, total
from megatron_epp.plan import Op
from megatron_epp.planner.evaluate import RecomputeSteps
from megatron_epp.planner.fit import peaks_bytes
from megatron_epp.planner.order import Order
from megatron_epp.planner.passes import BackwardBytes
from megatron_epp.planner.tables import Tables

GAP = 0.02
"""Optimality gap the paper gives its solver."""
NODES = 200
"""Most nodes of a search tree. Few programs need as many; by then they are within a few percent of their bound."""
UNIT_BYTES = 1 << 20
MARGINS = (0.0, 1.0)
"""Units kept free: none, and enough to make up for the solver's tolerance where the first answer is above a cap by a hair."""


@dataclass(slots=True)
class Effort:
    """Size of the integer programs solved so far, which time follows; the same on every machine."""

    num_entries: int = 0  # coefficients that are not zero


def diagonal_checkpoints(
    order: Order, tables: Tables, caps: tuple[int, ...], limit: float = math.inf, effort: Effort | None = None
) -> tuple[int, RecomputeSteps] | None:
    """Recomputed layers that are the same along each diagonal, as few in all as the caps allow.

    A layer recomputed in the k-th backward of a stage delays every other stage equally, so the backwards that wait for it, one
    more per stage, may recompute as much for nothing: ``layers[p][chunk of the k-th backward] = C[k + num_stages - 1 - p]``.

    Memory is counted at every backward with our own bytes, caches and what the backward itself holds included, where the
    paper sums activations over a window. A diagonal recomputes at most what its shallowest stage has.

    Args:
        order: of one pipeline, from its first forward to its last backward; chunks not in it are left alone.
        caps: of every rank.
        effort: updated.

    Returns:
        The sum of C, in layers, and the layers ``[stage][chunk]``; None where nothing fits, or nothing of use does.
    """
    stages = len(order)
    none = [[0] * tables.num_chunks for _ in order]
    if _fit(order, tables, none, caps):
        return 0, none
    backwards = [[action.chunk for action in actions if action.op is Op.B] for actions in order]
    diagonal = [{c: k + stages - 1 - p for k, c in enumerate(row)} for p, row in enumerate(backwards)]
    num_chunks = len(backwards[0])
    most = [
        min(tables.num_layers[p] for p in range(stages) if 0 <= d - (stages - 1 - p) < num_chunks)
        for d in range(num_chunks + stages - 1)
    ]
    solve = partial(_solve, order, tables, caps, diagonal, most, limit, effort or Effort())
    for counts in _proposed(solve, most, limit):
        recompute_steps = [
            [counts[diagonal_of[c]] if c in diagonal_of else 0 for c in range(len(row))]
            for diagonal_of, row in zip(diagonal, none, strict=True)
        ]
        if _fit(order, tables, recompute_steps, caps):
            return sum(counts), recompute_steps
    return None


def _proposed(solve: Callable[[float], list[int] | None], most: list[int], limit: float) -> Iterator[list[int]]:
    """Yield layers to recompute of every diagonal: the solver's, then all layers, where a cap leaves no room for its tolerance.

    Args:
        solve: solves the program with so many units kept free; None if there is no solution of use.
        most: layers that each diagonal can recompute.
    """
    for margin in MARGINS:
        if (counts := solve(margin)) is None:
            break
        yield counts
    yield from (counts for counts in (most, [min(most)] * len(most)) if sum(counts) < limit)


def _solve(
    order: Order,
    tables: Tables,
    caps: tuple[int, ...],
    diagonal: list[dict[int, int]],
    most: list[int],
    limit: float,
    effort: Effort,
    margin: float,
) -> list[int] | None:
    model = Model()
    count = [model.variable(0, bound, integer=True, cost=1.0) for bound in most]
    for p, diagonal_of in enumerate(diagonal):
        passes = tables.passes[p]
        step_bytes = passes.frontier.saved[0].tolist()  # whole layers are the only mode
        for level, others, c in _live_bytes(order, tables, p):
            room = (caps[p] - level) / UNIT_BYTES - margin
            saved, own = step_bytes[c] / UNIT_BYTES, count[diagonal_of[c]]
            activations = int(passes.activation[c]) / UNIT_BYTES
            at_first, at_last = _at_ends(tables, p, c)
            first, last = activations + at_first / UNIT_BYTES, max(at_last, int(passes.backward_residual[c])) / UNIT_BYTES
            relief = total(count[diagonal_of[u]] * (step_bytes[u] / UNIT_BYTES) for u in others)
            if last > room:
                model.at_most(last - relief, room)
            if activations > room:
                model.at_most(activations - relief - saved * own, room)
            if first > room:
                spared = model.variable(0, max(0, tables.num_layers[p] - 1))  # the last layer is made again before any goes
                model.at_most(spared - own)
                model.at_most(first - relief - saved * spared, room)
    effort.num_entries += len(model.entries[0])
    relaxed = model.solve(relaxed=True)
    if relaxed.values is None or math.ceil(relaxed.bound - 1e-6) >= limit:
        return None
    effort.num_entries += len(model.entries[0])
    solved = model.solve(gap=GAP, node_limit=NODES)
    if solved.values is None:
        return most if math.isfinite(solved.bound) else None  # all of it, where the search ended without an answer
    return [round(variable.value(solved.values)) for variable in count]


def _live_bytes(order: Order, tables: Tables, p: int) -> Iterator[tuple[int, list[int], int]]:
    """Yield, for every backward of a stage, the live bytes without recompute, its chunk excluded; the chunks alive; its chunk.

    Between backwards bytes only rise, and a backward starts with what is live, so no forward is above the backward after it.

    Args:
        order: forwards and backwards of every rank.
        tables: sizes of the chunks in bytes.
        p: the stage, which is a rank's only one.
    """
    passes = tables.passes[p]
    activation, residual = passes.activation.tolist(), passes.backward_residual.tolist()
    opened = (passes.forward_alloc - passes.forward_free).tolist()
    live = tables.static[p]
    alive: dict[int, None] = {}
    for op, _, c in order[p]:
        if op is Op.F:
            live += activation[c] + opened[c]
            alive[c] = None
        else:
            live -= activation[c]
            del alive[c]
            yield live, list(alive), c
            live += residual[c]


def _at_ends(tables: Tables, p: int, c: int) -> tuple[int, int]:
    """Compute the peak bytes of a backward at its first and its last layer, where whole layers are the only mode.

    The first is above the live bytes when the backward starts, where a layer that recomputes adds what it saves; the last is of
    the chunk and what it makes, whatever was recomputed.
    """
    passes, num_layers = tables.passes[p], tables.num_layers[p]
    sizes = BackwardBytes(*(int(column[c]) for column in passes.backward()))
    first = sizes.constant + sizes.reached + max(sizes.peak - sizes.activations, sizes.behind)
    return first, int(passes.activation[c]) + first - max(0, num_layers - 1) * (sizes.activations + sizes.gone)


def _fit(order: Order, tables: Tables, recompute_steps: RecomputeSteps, caps: tuple[int, ...]) -> bool:
    return all(peak <= cap for peak, cap in zip(peaks_bytes(order, tables, recompute_steps), caps, strict=True))
