"""Processor time of every command of `megatron-epp` on a small and on a large input: `python -m scripts.bench.commands`.

Commands run one after the other, each in a process of its own. Times are those of all its processes, so other programs on the
machine change them little. Commands that measure or train are run with their smallest sizes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from scripts.bench.frame import Bench, Figures
from scripts.tables import table

HELP, HELP_S, COMMAND_S = "--help", 1.0, 5.0
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


def took(command: str, input_name: str, flags: str, folder: Path) -> Figures:
    """Run a command in a folder; return the processor time of all its processes, and whether it said what it was doing."""
    words = [sys.executable, "-m", "megatron_epp.cli.main", command, *flags.split()]
    errors = folder / "errors.txt"
    begin_s = time.perf_counter()
    with open(errors, "w", encoding="utf-8") as stderr:
        process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
        _, status, used = os.wait4(process.pid, 0)
    wall_s, code = time.perf_counter() - begin_s, os.waitstatus_to_exitcode(status)
    cpu_s, has_progress = used.ru_utime + used.ru_stime, bool(_PROGRESS.search(errors.read_text(encoding="utf-8")))
    figures = {"command": command, "input": input_name, "cpu_s": cpu_s, "wall_s": wall_s, "has_progress": has_progress}
    reason = f"exit code {code}" if code else "too long" if is_late(input_name, cpu_s, has_progress) else ""
    return figures | ({"failed": reason} if reason else {})


def is_late(input_name: str, cpu_s: float, has_progress: bool) -> bool:
    """Return whether a run takes longer than it should."""
    return cpu_s > HELP_S if input_name == HELP else cpu_s > COMMAND_S and not has_progress


def row(args: Namespace, case: tuple[str, str, str]) -> Figures:
    return took(*case, Path(args.folder.name))


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    lines = [
        [r["command"], r["input"], f"{r['cpu_s']:.1f}", f"{r['wall_s']:.1f}", "yes" * r["has_progress"], r.get("failed", "")]
        for r in rows
    ]
    return table(["command", "input", "processor time (s)", "time (s)", "progress", ""], lines)


def cases(args: Namespace) -> dict[str, tuple[str, str, str]]:
    """Return the runs, and make the folder that they share: files that a command writes are read by later ones."""
    args.folder = tempfile.TemporaryDirectory()
    texts = Path(args.folder.name) / "texts"
    texts.mkdir()
    for number in range(100):
        (texts / f"{number}.txt").write_text("text " * 20 * number, encoding="utf-8")
    return {
        f"{command} {input_name}": (command, input_name, flags)
        for command, inputs in INPUTS.items()
        for input_name, flags in ({HELP: HELP} | inputs).items()
    }


BENCH = Bench(about=__doc__, cases=cases, row=row, text=text)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
