"""Trains a small GPT on real documents of very different lengths: Megatron's schedule, then elastic plans, then compares.

The documents are the Python standard library's own source files, one document per file, as bytes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sysconfig
import warnings
from pathlib import Path
from typing import Any

from training_runs import ROOT, Run, machine, pipeline_size, tiny_gpt, train

from megatron_epp.mcore.prepare import prepare
from megatron_epp.report.gantt import save_gantt
from megatron_epp.report.measured import Measured
from megatron_epp.report.text import summary
from megatron_epp.schedule.serialize import load

FOLDER = ROOT / "runs" / "quickstart"
RUNS = {
    "stock": "Megatron's schedule and attention, one whole document per microbatch",
    "whole": "Megatron's schedule, our attention kernel",
    "epp": "elastic plans",
}


def corpus() -> str:
    """Prepare the documents once; returns the prefix for --data-path."""
    prefix = FOLDER / "corpus" / "stdlib"
    if not prefix.with_suffix(".idx").exists():
        source = Path(sysconfig.get_path("stdlib"))
        files = sorted(f for f in source.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)
        print(f"preparing {len(files)} source files of the standard library")
        with warnings.catch_warnings():  # of Megatron's, about packages that this needs not
            warnings.simplefilter("ignore")
            print(prepare(files, prefix))
    return str(prefix)


def compare(stock: Run, whole: Run, epp: Run) -> dict[str, Any]:
    """All figures of the comparison, as written to report.json."""
    differences = [abs(a - b) / abs(a) for a, b in zip(stock.losses, epp.losses, strict=True)]
    runs = {"stock": stock, "whole": whole, "epp": epp}
    bubbles = [line["bubble_fraction"] for line in epp.lines[1:]]
    return {
        "machine": machine(),
        "iterations": len(epp.lines),
        "losses": {name: run.losses for name, run in runs.items()},
        "max_relative_loss_difference": max(differences),
        "tokens_per_second": {name: run.tokens_per_second() for name, run in runs.items()},
        "peak_activation_bytes": {name: max(run.peak_activation_bytes) for name, run in runs.items()},
        "bubble_fraction": {
            source: statistics.median(bubble[source] for bubble in bubbles) for source in ("planned", "measured")
        },
    }


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    print(f"\n{'iteration':>9}  {'stock loss':>12}  {'epp loss':>12}  {'relative difference':>20}")
    for i, (a, b) in enumerate(zip(report["losses"]["stock"], report["losses"]["epp"], strict=True), 1):
        print(f"{i:>9}  {a:>12.7f}  {b:>12.7f}  {abs(a - b) / abs(a):>20.1e}")
    print(f"\nlargest relative difference of the losses: {report['max_relative_loss_difference']:.1e}\n")
    print(f"{'run':>6}  {'tokens/s':>9}  {'peak activations':>16}")
    for name, meaning in RUNS.items():
        peak = report["peak_activation_bytes"][name] / 2**20
        print(f"{name:>6}  {report['tokens_per_second'][name]:>9,.0f}  {peak:>12,.1f} MiB  {meaning}")
    bubble = report["bubble_fraction"]
    print(f"\nbubble of the elastic runs: {bubble['planned']:.1%} planned, {bubble['measured']:.1%} measured (median)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=20, help="training iterations per run (default 20)")
    parser.add_argument("--pipeline", type=int, default=2, help="pipeline size (default 2; at most the number of GPUs)")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    ranks = pipeline_size(arguments.pipeline)
    settings = tiny_gpt(
        data_path=corpus(),
        train_iters=arguments.iterations,
        pipeline_model_parallel_size=ranks,
        epp_measure_memory=True,
    )
    traced = {"epp_schedule": "elastic", "epp_costs": "measure", "epp_trace": min(3, arguments.iterations)}
    runs = {}
    for name, extra in {"stock": {"epp_schedule": "stock"}, "whole": {"epp_schedule": "whole"}, "epp": traced}.items():
        print(f"training {arguments.iterations} iterations on {ranks} ranks: {RUNS[name]}", flush=True)
        runs[name] = train(FOLDER / name, ranks, settings | extra)
    report = compare(**runs)
    (FOLDER / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plan, measured = load(FOLDER / "epp" / "plan.json"), Measured.load(FOLDER / "epp" / "measured.json")
    (FOLDER / "plan.json").write_text((FOLDER / "epp" / "plan.json").read_text())
    save_gantt(plan, FOLDER / "iteration.png", measured)
    (FOLDER / "trace.json").write_text((FOLDER / "epp" / "trace.json").read_text())
    show(report)
    print("\nthe plan of one iteration:")
    print(summary(plan))
    print(f"\nin {FOLDER}: report.json, plan.json, iteration.png (planned and measured), trace.json (for ui.perfetto.dev)")


if __name__ == "__main__":
    main()
