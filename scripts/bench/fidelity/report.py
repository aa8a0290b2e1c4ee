"""The report of `bench/fidelity` in Markdown. Every number comes from the report's JSON."""

from __future__ import annotations

from typing import Any

from scripts.bench.planner.report import table

NAMES = {"free": "Without a cap", "capped": "Under a memory cap"}


def markdown(report: dict[str, Any]) -> str:
    load = report["load_average"]
    parts = [
        f"# Plans and runs\n\n{report['machine']}, pipeline size {report['pipeline']}, load average {load['before']:.1f} "
        f"before and {load['after']:.1f} after, the runs' own ranks included. Errors are planned over measured, less one."
    ]
    cap = f"{NAMES['capped']} of {report['cap_gb'] * 1024:.0f} MiB"
    parts += [_part(NAMES["free"], report["free"]), _part(cap, report["capped"])]
    return "\n\n".join(parts) + "\n"


def _part(name: str, found: dict[str, Any]) -> str:
    peaks = found["peaks"]
    rows = [
        ["iteration time, error of the median", signed(found["error_of_median"])],
        ["the same, with the costs measured after the run", signed(found["error_of_median_with_costs_after"])],
        [
            "the same, with a profile of the model's parts (`megatron-epp profile`)",
            signed(found["error_of_median_with_profile"]),
        ],
        ["iteration time, median error", signed(found["median_error"])],
        ["the same, without what other programs took", signed(found["median_undisturbed_error"])],
        ["iteration time, median absolute error", signed(found["median_absolute_error"])],
        ["the same, without what other programs took", signed(found["median_absolute_undisturbed_error"])],
        ["share of the time that other programs took inside actions (median)", signed(found["share_taken_by_others"])],
        ["share of the time between actions (messages, host; median)", signed(found["share_between_actions"])],
        ["costs measured after the runs against before (drift)", signed(found["drift_of_costs"])],
        ["peak bytes, largest of the run", signed(peaks["error_of_largest"])],
        ["peak bytes, median absolute error over iterations and ranks", signed(peaks["median_absolute_error"])],
        ["peak bytes, worst of any iteration and rank", signed(peaks["worst_error"])],
    ]
    kinds = [
        [
            kind,
            str(row["actions"]),
            f"{row['planned_us'] / 1e3:.0f}",
            signed(row["error"]),
            signed(row["error_to_processor_time"]),
        ]
        for kind, row in found["kinds"].items()
    ]
    return "\n\n".join(
        [
            f"## {name}",
            table(["", "error"], rows),
            table(["action", "number", "planned (ms)", "error", "error to processor time"], kinds),
            table(
                ["tokens", "chunks", "recomputed", "planned (ms)", "measured (ms)", "error", "undisturbed"],
                [_iteration(row) for row in found["iterations"]],
            ),
        ]
    )


def _kind(name: str, row: dict[str, Any]) -> list[str]:
    errors = [signed(row["error"]), signed(row["error_to_processor_time"])]
    return [name, str(row["actions"]), f"{row['planned_us'] / 1e3:.0f}", *errors]


def _iteration(row: dict[str, Any]) -> list[str]:
    times = [f"{row[key] / 1e3:.0f}" for key in ("planned_us", "measured_us")]
    counts = [f"{row['tokens']:,}", str(row["chunks"]), str(row["recomputed_layers"])]
    return [*counts, *times, signed(row["error"]), signed(row["undisturbed_error"])]


def signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
