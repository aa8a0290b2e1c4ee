"""The emulated part: pipelines of 4 to 16 ranks of Llama 3 8B on H100, with compute and messages as timed waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_epp.cost import H100, analytic_profile
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.plan import UNLIMITED_BYTES
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.microbatches import Lengths, OrderedPlan, plan_as_given, plan_microbatches
from scripts.bench.emulation import emulated_us
from scripts.bench.microbatches.batches import batch

CONTEXT = 32_768
"""Most tokens of a sample, and of a microbatch into which samples are packed."""
SECONDS = 6.0
"""Length of an emulation of 1F1B without recompute."""


class Compared(NamedTuple):
    """Times of one case in seconds of the emulated machine, as measured.

    Attributes:
        kind: of microbatches.
        num_ranks: of the pipeline.
        stock_s: of 1F1B without recompute.
        plans_s: of plans without recompute.
        full_s: of 1F1B in which every layer recomputes.
        capped_s: of plans under the cap, which 1F1B keeps to only with full recompute.
    """

    kind: str
    num_ranks: int
    stock_s: float
    plans_s: float
    full_s: float
    capped_s: float


def microbatches(kind: str, count: int) -> Lengths:
    """Return the microbatches of a batch: each a sample, or samples packed in their order up to the context."""
    samples = batch(0, count * (8 if kind == "packed" else 1), CONTEXT)
    if kind == "one sample each":
        return tuple((length,) for length in samples)
    packed: list[tuple[int, ...]] = [()]
    for length in samples:
        if sum(packed[-1]) + length > CONTEXT:
            packed.append(())
        packed[-1] += (length,)
    return tuple(packed)


def compare(kind: str, num_ranks: int, count: int, cap_share: float) -> Compared:
    """Emulate 1F1B and plans on one batch.

    Args:
        cap_share: the cap's place between the peak of 1F1B with full recompute (0) and without (1).
    """
    lengths = microbatches(kind, count)
    costs = analytic_profile(shape_of(load_flags("llama3-8b")), H100).costs((32 // num_ranks,) * num_ranks)
    costs = replace(costs, stages=tuple(stage.changed(recompute={}) for stage in costs.stages))  # a caller's layers: in full
    problem = Problem((), tuple(range(num_ranks)), (UNLIMITED_BYTES,) * num_ranks)
    stock = plan_as_given(lengths, problem, costs, Options(recompute=0))
    full = plan_as_given(lengths, problem, costs, Options(recompute=32 // num_ranks))
    least, most = (max(case.plan.predicted.peak_bytes) for case in (full, stock))
    cap = int(least + cap_share * (most - least))
    capped = plan_microbatches(lengths, replace(problem, cap_bytes=(cap,) * num_ranks), costs, Options())
    free = plan_microbatches(lengths, problem, costs, Options(recompute=0))
    scale = SECONDS * 1e6 / stock.plan.predicted.makespan_us
    return Compared(kind, num_ranks, *(_seconds(case, scale) for case in (stock, free, full, capped)))


def _seconds(planned: OrderedPlan, scale: float) -> float:
    return emulated_us(planned.plan, scale) / 1e6


def lines_of(results: Sequence[Compared]) -> list[list[str]]:
    """Format cases as rows of a table."""
    return [
        [
            result.kind,
            str(result.num_ranks),
            *(f"{seconds:.3f}" for seconds in result[2:]),
            f"{result.stock_s / result.plans_s:.2f}x",
            f"{result.full_s / result.capped_s:.2f}x",
        ]
        for result in results
    ]


HEADER = ["microbatches", "ranks", "1F1B", "plans", "1F1B, full recompute", "plans under the cap", "plans", "under the cap"]
