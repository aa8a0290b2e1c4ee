"""Compares what plans predict with what training takes on this machine: time of an iteration, and peak bytes.

Trains a small GPT on the standard library's source files with costs that a short training has learnt, once as fast as it goes
and once under a memory cap that asks for recompute, and keeps plan and times of every iteration. Costs are learnt again at the
end: what changed meanwhile is the machine, not the model. `megatron-epp profile` is asked too: it times the parts in plain
torch, without the host time of Megatron's layers, which counts on a CPU and in small models. Memory is counted in runs of their
own, because counting takes time. The first iteration of a run is left out: it meets memory for the first time.

A machine that runs other programs takes cores away in the middle of actions. Processor times tell how much; both figures are
given, with and without that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_epp.contrib.demos.quickstart.documents import source_files
from megatron_epp.cost import PipelineCosts, Profile, work_of
from megatron_epp.cost.library import load_costs
from megatron_epp.launch.machine import machine
from megatron_epp.launch.runs import RecordedRun, learnt_costs, tiny_gpt, train
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.plan import Messages, Op, Plan, Step, simulate
from megatron_epp.report.fidelity import Comparison, compare, traces
from megatron_epp.report.measured import Measured
from scripts.bench.fidelity.report import markdown

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_fidelity"
WARM_UP = 1
"""Iterations at the start of a run that are left out."""


def makespan_with(plan: Plan, costs: PipelineCosts) -> float:
    """Predict the makespan of the same plan with other costs."""
    work = work_of(plan.chunks, plan.lengths, plan.token_multiple)

    def timed(step: Step) -> Step:
        op, stage, c = step.action
        if op is Op.F:
            return step._replace(time_us=float(costs.forward_us(stage, work)[c]))
        again_us = costs.recompute_us(stage, work, plan.recompute[stage][c])
        return step._replace(time_us=float((costs.backward_us(stage, work) + again_us)[c]))

    message_us = (tuple(costs.message_us(work).tolist()),) * (plan.num_stages - 1)
    ranks = tuple(tuple(map(timed, steps)) for steps in plan.ranks)
    return simulate(replace(plan, ranks=ranks, messages=Messages(message_us, message_us))).makespan_us


def compare_times(runs: Sequence[tuple[Plan, Measured]], after: PipelineCosts, parts: Profile) -> dict[str, Any]:
    """Figures of one training run.

    Args:
        runs: plan and times of every iteration, the first ones left out.
        after: costs learnt after the run.
        parts: a profile of the model's parts.
    """
    by_parts = parts.costs(after.num_layers)
    found = [compare(plan, measured) for plan, measured in runs]
    again = [makespan_with(plan, after) for plan, _ in runs]
    rows = [
        {
            "tokens": plan.num_tokens,
            "chunks": len(plan.chunks),
            "recomputed_layers": sum(again.num_layers for row in plan.recompute for again in row),
            "planned_us": one.planned_us,
            "planned_with_costs_after_us": later_us,
            "measured_us": one.measured_us,
            "replayed_us": one.replayed_us,
            "undisturbed_us": one.undisturbed_us,
            "error": one.error,
            "undisturbed_error": one.undisturbed_error,
        }
        for (plan, _), one, later_us in zip(runs, found, again, strict=True)
    ]
    undisturbed = [row["undisturbed_error"] for row in rows if row["undisturbed_error"] is not None]
    return {
        "error_of_median": median(one.planned_us for one in found) / median(one.measured_us for one in found) - 1,
        "error_of_median_with_costs_after": median(again) / median(one.measured_us for one in found) - 1,
        "error_of_median_with_profile": median(makespan_with(plan, by_parts) for plan, _ in runs)
        / median(one.measured_us for one in found)
        - 1,
        "median_error": median(row["error"] for row in rows),
        "median_absolute_error": median(abs(row["error"]) for row in rows),
        "median_undisturbed_error": median(undisturbed) if undisturbed else None,
        "median_absolute_undisturbed_error": median(map(abs, undisturbed)) if undisturbed else None,
        "drift_of_costs": median(later_us / one.planned_us - 1 for one, later_us in zip(found, again, strict=True)),
        "share_taken_by_others": median(one.taken_us / one.measured_us for one in found) if undisturbed else None,
        "share_between_actions": median(1 - one.replayed_us / one.measured_us for one in found),
        "kinds": errors_by_kind(found),
        "iterations": rows,
    }


def errors_by_kind(found: Sequence[Comparison]) -> dict[str, dict[str, float | None]]:
    """Planned over measured, summed over all iterations, by kind of action."""
    kinds = sorted({kind for one in found for kind in one.kinds})
    rows: dict[str, dict[str, float | None]] = {}
    for kind in kinds:
        some = [one.kinds[kind] for one in found if kind in one.kinds]
        planned_us, measured_us = sum(took.planned_us for took in some), sum(took.measured_us for took in some)
        cpu_us = None if any(took.cpu_us is None for took in some) else sum(took.cpu_us or 0.0 for took in some)
        rows[kind] = {
            "actions": sum(took.count for took in some),
            "planned_us": planned_us,
            "error": planned_us / measured_us - 1,
            "error_to_processor_time": planned_us / cpu_us - 1 if cpu_us else None,
        }
    return rows


def compare_peaks(run: RecordedRun) -> dict[str, Any]:
    """Planned and measured peak bytes of activations of every iteration and rank."""
    pairs = [
        (planned, measured)
        for line in run.lines[WARM_UP:]
        for planned, measured in zip(line["planned_peak_activation_bytes"], line["peak_activation_bytes"], strict=True)
    ]
    errors = [planned / measured - 1 for planned, measured in pairs]
    return {
        "error_of_largest": max(p for p, _ in pairs) / max(m for _, m in pairs) - 1,
        "median_absolute_error": median(map(abs, errors)),
        "worst_error": max(errors, key=abs),
        "pairs": pairs,
    }


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def part(folder: Path, ranks: int, settings: dict[str, Any], iterations: int) -> tuple[dict[str, Any], list[Any]]:
    """Train with one setting for times, and again for memory. Returns the peaks' figures and traces."""
    every = {"epp_trace": list(range(1, iterations + 2))}  # one more than there are: with a single one, no numbers
    train(folder, ranks, settings | every)
    run = train(folder / "memory", ranks, settings | {"epp_measure_memory": True})
    return compare_peaks(run), traces(folder, iterations)[WARM_UP:]


def bench(folder: Path, ranks: int, iterations: int, cap_share: float, data_path: str, context: int) -> dict[str, Any]:
    """All runs.

    Args:
        folder: where they leave their files.
        ranks: pipeline size.
        iterations: compared of every run.
        cap_share: the second run's cap on activations, as a share of what the first was planned to take.
        data_path: of the documents.
        context: longer documents are cut to this many tokens.
    """
    iterations += WARM_UP
    lengths = {"seq_length": context, "max_position_embeddings": context, "epp_documents": "truncate"}
    settings = tiny_gpt(data_path=data_path, train_iters=iterations, pipeline_model_parallel_size=ranks, **lengths)
    load_before = os.getloadavg()[0]
    say("learning costs")
    settings["epp_costs"] = learnt_costs(folder / "before", ranks, settings)
    say(f"training {iterations} iterations on {ranks} ranks, and again for their memory")
    free_peaks, free = part(folder / "free", ranks, settings, iterations)
    peak = max(peak for plan, _ in free for peak in plan.predicted.peak_bytes)
    static = max(free[0][0].static_bytes)
    cap_gb = (static + cap_share * (peak - static)) / 2**30
    say(f"the same under a cap of {cap_gb * 1024:.0f} MiB")
    capped_peaks, capped = part(folder / "capped", ranks, settings | {"epp_memory_cap_gb": cap_gb}, iterations)
    say("learning costs again")
    after = load_costs(str(learnt_costs(folder / "after", ranks, settings)))
    assert isinstance(after, PipelineCosts)
    profile = folder / "profile.json"
    command = [sys.executable, "-m", "megatron_epp.cli.main", "profile", "--model", "tiny-gpt", "-o", str(profile)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={"OMP_NUM_THREADS": "1"} | os.environ)
    parts = Profile.from_json(profile.read_text())
    return {
        "machine": machine(),
        "pipeline": ranks,
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        "cap_gb": cap_gb,
        "free": compare_times(free, after, parts) | {"peaks": free_peaks},
        "capped": compare_times(capped, after, parts) | {"peaks": capped_peaks},
    }


def corpus(folder: Path) -> str:
    """Prepare the standard library's source files, a document each, once; return the prefix for --data-path."""
    prefix = folder / "corpus" / "stdlib"
    if not prefix.with_suffix(".idx").exists():
        say(str(prepare(source_files(), prefix)))
    return str(prefix)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.fidelity", description=__doc__)
    parser.add_argument("--iterations", type=int, default=20, help="iterations compared in every run (default 20)")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline size (default 2)")
    parser.add_argument("--cap-share", type=float, default=0.6, help="activations of the capped run, a share (default 0.6)")
    parser.add_argument("--context", type=int, default=4096, help="longer documents are cut to so many tokens (default 4096)")
    parser.add_argument("--data-path", help="documents (default: the standard library's sources)")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder for report.json, report.md and the runs")
    a = parser.parse_args()
    report = bench(a.output, a.pipeline, a.iterations, a.cap_share, a.data_path or corpus(a.output), a.context)
    (a.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (a.output / "report.md").write_text(markdown(report))
    say(markdown(report))
