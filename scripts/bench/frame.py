"""Frame of all benchmarks: command line, cases one after the other, a table, and a report with the machine and versions."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_epp.launch.machine import count_gpus, machine, nccl_version, version_of

Figures = dict[str, Any]
RUNS = Path(__file__).resolve().parents[2] / "runs"
"""Folder for what benchmarks leave."""
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "megatron-epp")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Bench[Case]:
    """A benchmark: figures of cases.

    Attributes:
        about: docstring of its module, for `--help`.
        cases: by name, as the command line asks for them.
        row: figures of a case; ``failed`` says why there are none, and makes the exit code 1.
        text: the report of all rows.
        flags: settings of `argparse` by flag, besides those of all benchmarks.
        reduced: what `--reduced` leaves; empty if there is no such flag.
        goes_on: a case that raises is reported as failed, and the others go on.
        resumes: rows that the file of `--json` has are in `known` of the arguments.
        folder: default of `-o`, for logs, plans and the report; None for a benchmark that leaves nothing but its report.
        takes_jobs: cases may run in several processes.
    """

    about: str | None
    cases: Callable[[argparse.Namespace], Mapping[str, Case]]
    row: Callable[[argparse.Namespace, Case], Figures]
    text: Callable[[argparse.Namespace, list[Figures]], str]
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reduced: str = ""
    goes_on: bool = False
    resumes: bool = False
    folder: Path | None = None
    takes_jobs: bool = False

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the cases that the command line asks for; return 1 if one failed."""
        args = self._parser().parse_args(argv)
        if self.folder is not None:
            args.output.mkdir(parents=True, exist_ok=True)
            args.json = args.json or args.output / "report.json"
        report: Figures = {"machine": machine(), "versions": versions(), "reduced": args.reduced}
        names = args.only and args.only.split(",")
        cases = {name: case for name, case in self.cases(args).items() if not names or any(part in name for part in names)}
        if not cases:
            raise SystemExit(f"no case of --only {args.only}; there are {', '.join(self.cases(args))}")
        known = json.loads(args.json.read_text())["rows"] if self.resumes and args.json and args.json.exists() else []
        args.known = {row["case"]: row for row in known}
        rows_of_cases = dict(args.known)
        for row in self._rows(args, cases):
            rows_of_cases[row["case"]] = row
            if args.json is not None:
                args.json.write_text(json.dumps(report | {"rows": [*rows_of_cases.values()]}, indent=1) + "\n")
        rows = [*rows_of_cases.values()]
        text = f"{report['machine']}; {', '.join(f'{name} {version}' for name, version in versions().items() if version)}"
        if args.reduced:
            text += "\nReduced: figures only show that the benchmark runs."
        text += f"\n\n{self.text(args, rows)}"
        if self.folder is not None:
            (args.output / "report.md").write_text(f"{text}\n", encoding="utf-8")
        print(text)
        return int(any("failed" in row for row in rows))

    def _rows(self, args: argparse.Namespace, cases: Mapping[str, Case]) -> Iterator[Figures]:
        work = partial(_timed, self.row, args, self.goes_on)
        with ExitStack() as stack:
            pool = stack.enter_context(ProcessPoolExecutor(args.jobs)) if args.jobs > 1 else None
            results: Iterable[Figures] = (map if pool is None else pool.map)(work, cases, cases.values())
            yield from map(stack.enter_context(_progress(len(cases))), results)  # its thread begins when processes are there

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.set_defaults(reduced=False, jobs=1)
        parser.add_argument("--only", metavar="NAMES", help="cases whose names have one of these parts, with commas")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, after each case")
        if self.reduced:
            parser.add_argument("--reduced", action="store_true", help=self.reduced)
        if self.takes_jobs:
            parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: 1)")
        if self.folder is not None:
            parser.add_argument("-o", "--output", type=Path, default=self.folder, help="folder (default: %(default)s)")
        for flag, settings in self.flags.items():
            parser.add_argument(f"--{flag}", **settings)
        return parser


def _timed(
    row: Callable[[argparse.Namespace, Any], Figures], args: argparse.Namespace, goes_on: bool, name: str, case: Any
) -> Figures:
    start_s = time.monotonic()
    try:
        figures = row(args, case)
    except Exception as error:
        if not goes_on:
            raise
        traceback.print_exc()
        figures = {"failed": f"{type(error).__name__}: {error}", "met": False}
    return {"seconds": time.monotonic() - start_s} | figures | {"case": name}


SILENT_S = 60.0
"""Longest time without a line of progress, in seconds."""


@contextmanager
def _progress(count: int) -> Iterator[Callable[[Figures], Figures]]:
    """Yield what tells the next row; while none comes, a thread tells how long the case has run and what else does."""
    done, ended, began_s = 0, threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(SILENT_S):
            load = f"{os.getloadavg()[0]:.1f} threads of all programs want {os.cpu_count()} cores"
            print(f"{done} of {count} done after {time.monotonic() - began_s:.0f} s; {load}", file=sys.stderr, flush=True)

    def said(row: Figures) -> Figures:
        nonlocal done
        done += 1
        print(f"{done} of {count}: {row['case']}, {row['seconds']:.0f} s", file=sys.stderr, flush=True)
        return row

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield said
    finally:
        ended.set()
        thread.join()


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return exp(fmean(map(log, ratios))) if ratios else None


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    return tuple(map(int, filter(None, text.split(","))))


def versions() -> dict[str, str | None]:
    """Return versions of everything that a figure may depend on; None for packages that are not installed."""
    by_package: dict[str, str | None] = {"Python": sys.version.split()[0]} | {name: version_of(name) for name in _PACKAGES}
    if count_gpus():
        import torch

        by_package |= {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
        by_package["NCCL"] = ".".join(map(str, nccl_version() or torch.cuda.nccl.version()))
    return by_package | {"driver": _DRIVER.read_text(encoding="utf-8").splitlines()[0].strip() if _DRIVER.exists() else None}
