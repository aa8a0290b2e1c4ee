"""Measurement of layouts in real runs: even layers against the searched layout, planned and measured.

    python -m scripts.bench.layouts.real                       two models on two ranks, then 4, 8 and 16 emulated ranks
    python -m scripts.bench.layouts.real --emulate ''          the trained part alone

Two ranks train through Megatron's own loop, each on a core of its own with one thread, with costs that `megatron-epp profile`
measured just before. Trainings of all layouts take turns. Times are means over the iterations of a training and medians over
the rounds; the spread is that of the rounds. With more ranks than cores, compute is emulated by timed waits, for a published
model and plans by formulas.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_epp.cli.terminal import progress
from megatron_epp.contrib.demos.rounds import OthersMeter
from megatron_epp.launch.machine import machine
from scripts.bench.layouts import compared, emulated
from scripts.bench.layouts.trained import CASES, measure

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_layouts"
LAYOUTS = ("even", "balanced", "auto", "vocabulary")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.layouts.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="trainings with each layout (default 5)")
    parser.add_argument("--iterations", type=int, default=4, help="of a training that count (default 4)")
    parser.add_argument("--cases", type=_numbers, default=tuple(range(len(CASES))), help="numbers of models (default: all)")
    parser.add_argument("--emulate", type=_numbers, default=(4, 8, 16), help="sizes of emulated pipelines (default 4,8,16)")
    parser.add_argument("--seconds", type=float, default=emulated.SECONDS, help="of an emulation (default %(default)g)")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help="folder for report.json and the runs")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine()}
    print(report["machine"], flush=True)
    report["trained"] = [trained(number, args.output, args.rounds, args.iterations) for number in args.cases]
    report["emulated"] = emulation(args.emulate, args.seconds)
    (args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def trained(number: int, folder: Path, rounds: int, iterations: int) -> dict[str, Any]:
    """Train one of the models with all layouts; print a table and return its figures."""
    case, now = CASES[number], ["starting"]
    with progress(f"{case}", lambda: now[0]):
        layouts, occupancy = measure(
            case, folder / f"case-{number}", LAYOUTS, rounds, iterations, lambda text: now.append(now.pop() and text)
        )
    print("\n".join([f"\n{case}; {occupancy}", *compared.lines_of(layouts, occupancy)]), flush=True)
    return {"case": str(case), "occupancy": asdict(occupancy), "layouts": compared.report_of(layouts)}


def emulation(sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Emulate pipelines of some sizes; print a table and return its figures."""
    results, others = [], OthersMeter()
    for num_ranks in sizes:
        with progress(f"emulating {num_ranks} ranks"), others.measured():
            results.append(emulated.emulate(num_ranks, seconds))
    if results:
        print("\n".join([f"\n{emulated.MODEL}, emulated", *emulated.lines_of(results)]), flush=True)
        if (occupancy := others.occupancy(max(sizes))).is_busy:
            print(f"inconclusive: the machine was busy ({occupancy})", flush=True)
    return [result._asdict() for result in results]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


if __name__ == "__main__":
    raise SystemExit(main())
