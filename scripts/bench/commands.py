"""Processor time of every command of `megatron-epp` on a small and on a large input: `python -m scripts.bench.commands`.

Commands run one after the other, each in a process of its own. Times are those of all its processes, so other programs on the
machine change them little. Commands that measure or train are run with their smallest sizes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_epp.report.text import table

HELP_S, COMMAND_S = 1.0, 5.0
"""Seconds of processor time, which others on the machine hardly lengthen: of help, and of a command without progress."""
_PROGRESS = re.compile(r", \d+ s\b")
_BATCH = "--lengths 131072,9000,800,350,120 --model llama3-8b --cluster h100x8 --stages 8"
_LARGE = "--lengths wikipedia --context 131072 --model llama3-70b --cluster h100x8 --tensor-parallel 8 --stages 64"
_MOST = f"{_LARGE} --sequence-parallel --token-multiple 8 --offload --split-weight"
_QUICK = "--rounds 1 --iterations 1 --context 512 -o quickstart"
INPUTS: dict[str, dict[str, str]] = {
    "plan": {"small": f"{_BATCH} -o small.json", "large": f"{_LARGE} -o large.json", "large, offload": _MOST},
    "memory": {"small": _BATCH, "large": _LARGE, "large, offload": _MOST},
    "check": {"small": "small.json", "large": "large.json"},
    "simulate": {"small": "small.json", "large": "large.json"},
    "compare": {"small": _BATCH, "large": _LARGE},
    "schedules": {"": ""},
    "advise": {
        "small": "--model llama3-8b --cluster h100x8 --devices 8 --lengths wikipedia --global-batch-size 64 --context 8192",
        "large": "--model llama3-70b --cluster h100x8 --devices 512 --lengths wikipedia --context 131072",
    },
    "show": {"small": "small.json -o small.html", "large": "large.json -o large.html", "picture": "large.json --png large.png"},
    "profile": {"": "--model tiny-gpt --device cpu --tokens 64,128,256 --prefixes 0,128 -o profile.json"},
    "emulate": {"small": "small.json"},
    "prepare": {"small": "--input texts --output-prefix documents"},
    "train": {"dry run": "-c recipes/tiny-cpu train_iters=2 data_path=documents --dry-run"},
    "quickstart": {"small": _QUICK},
    "doctor": {"": ""},
    "first-run": {"reduced": "--reduced -o first-run"},
}
"""Flags of every command by the name of the input. Files that a command writes are read by later ones."""


@dataclass(frozen=True, slots=True)
class Took:
    """One run of a command.

    Attributes:
        command: its name.
        input_name: name of the input.
        cpu_s: processor time of all its processes, in seconds.
        wall_s: seconds from its start to its end.
        has_progress: it said what it was doing while it ran.
        exit_code: 0 if it succeeded.
    """

    command: str
    input_name: str
    cpu_s: float
    wall_s: float
    has_progress: bool
    exit_code: int

    @property
    def is_late(self) -> bool:
        """True if it takes longer than it should."""
        if self.input_name == "--help":
            return self.cpu_s > HELP_S
        return self.cpu_s > COMMAND_S and not self.has_progress


def took(command: str, input_name: str, flags: str, folder: Path) -> Took:
    """Run a command and return its time.

    Args:
        folder: where it runs.
    """
    words = [sys.executable, "-m", "megatron_epp.cli.main", command, *flags.split()]
    errors = folder / "errors.txt"
    begin_s = time.perf_counter()
    with open(errors, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
        _, status, used = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - begin_s
    has_progress = bool(_PROGRESS.search(errors.read_text(encoding="utf-8")))
    return Took(command, input_name, used.ru_utime + used.ru_stime, wall_s, has_progress, os.waitstatus_to_exitcode(status))


def main(argv: list[str] | None = None) -> int:
    """Run the commands and print a row for each; return 1 if one fails or takes longer than it should."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.commands", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=INPUTS, default=[*INPUTS], help="commands to run (default: all)")
    parser.add_argument("--help-only", action="store_true", help="run their help alone")
    args = parser.parse_args(argv)
    calls = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        for number in range(100):
            (folder / "texts" / f"{number}.txt").write_text("text " * 20 * number, encoding="utf-8")
        for command in args.only:
            inputs = {"--help": "--help"} | ({} if args.help_only else INPUTS[command])
            for input_name, flags in inputs.items():
                calls.append(took(command, input_name, flags, folder))
                print("\n".join(rows_of(calls[-1:])), file=sys.stderr, flush=True)
    print("\n".join(rows_of(calls)))
    return int(any(call.is_late or call.exit_code for call in calls))


def rows_of(calls: Iterable[Took]) -> list[str]:
    """Format runs as a table."""
    rows = []
    for call in calls:
        verdict = f"exit code {call.exit_code}" if call.exit_code else "too long" if call.is_late else ""
        progress = "yes" if call.has_progress else ""
        rows.append([call.command, call.input_name, f"{call.cpu_s:.1f}", f"{call.wall_s:.1f}", progress, verdict])
    return table(("command", "input", "processor time (s)", "time (s)", "progress", ""), rows, left=(0, 1, 4, 5))


if __name__ == "__main__":
    raise SystemExit(main())
