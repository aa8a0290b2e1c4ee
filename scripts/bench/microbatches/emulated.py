"""The emulated part: pipelines of 4 to 16 ranks of Llama 3 8B on H100, with compute and messages as timed waits."""

from __future__ import annotations

from dataclasses import replace

from megatron_epp.contrib.demos.emulate import emulate
from megatron_epp.cost import H100, analytic_profile
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.plan import UNLIMITED_BYTES, Plan
from megatron_epp.planner import Options, Problem
from megatron_epp.planner.microbatches import Lengths, plan_as_given, plan_microbatches
from scripts.bench.frame import Figures

CONTEXT = 32_768
"""Most tokens of a sample, and of a microbatch into which samples are packed."""
SECONDS, TIMEOUT_S = 6.0, 300.0
"""Length of an emulation of 1F1B without recompute, and the most that one may take."""
CAP_SHARE = 0.5
"""The cap's place between the peak of 1F1B with full recompute (0) and without (1)."""
HEADER = ["microbatches", "ranks", "1F1B", "plans", "1F1B, full recompute", "plans under the cap", "plans", "under the cap"]


def batch(seed: int, count: int, longest: int = 1024) -> tuple[int, ...]:
    """Draw the tokens of each microbatch of a batch from Wikipedia's quantiles: longer ones are cut, shorter than 16 padded."""
    return tuple(int(length) for length in wikipedia(count, seed).clip(16, longest))


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


def compare(kind: str, num_ranks: int) -> Figures:
    """Emulate 1F1B and plans on one batch, with and without the cap, which 1F1B keeps to only with full recompute."""
    lengths = microbatches(kind, 8 * num_ranks)
    costs = analytic_profile(shape_of(load_flags("llama3-8b")), H100).costs((32 // num_ranks,) * num_ranks)
    costs = replace(costs, stages=tuple(stage.changed(recompute={}) for stage in costs.stages))  # a caller's layers: in full
    problem = Problem((), tuple(range(num_ranks)), (UNLIMITED_BYTES,) * num_ranks)
    stock = plan_as_given(lengths, problem, costs, Options(recompute=0)).plan
    full = plan_as_given(lengths, problem, costs, Options(recompute=32 // num_ranks)).plan
    least, most = (max(plan.predicted.peak_bytes) for plan in (full, stock))
    capped_problem = replace(problem, cap_bytes=(int(least + CAP_SHARE * (most - least)),) * num_ranks)
    capped = plan_microbatches(lengths, capped_problem, costs, Options()).plan
    free = plan_microbatches(lengths, problem, costs, Options(recompute=0)).plan
    scale = SECONDS * 1e6 / stock.predicted.makespan_us
    times = {"stock_s": stock, "plans_s": free, "full_s": full, "capped_s": capped}
    return {"kind": kind, "ranks": num_ranks} | {name: _emulated_s(plan, scale) for name, plan in times.items()}


def _emulated_s(plan: Plan, scale: float) -> float:
    """Emulate a plan, with `scale` seconds of waiting per planned second; return its makespan in the plan's time."""
    events = emulate(plan, scale, TIMEOUT_S).events
    return max(end_us for of_rank in events for _, _, end_us in of_rank) / 1e6


def cells_of(row: Figures) -> list[object]:
    times = [f"{row[name]:.3f}" for name in ("stock_s", "plans_s", "full_s", "capped_s")]
    ratios = [f"{row[theirs] / row[ours]:.2f}x" for theirs, ours in (("stock_s", "plans_s"), ("full_s", "capped_s"))]
    return [row["kind"], row["ranks"], *times, *ratios]
