"""Joins what `scripts/gpu_kit.sh` left in a folder into one report: `python -m scripts.bench.kit_report FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_epp.launch.machine import machine
from scripts.bench.frame import versions


def joined(folder: Path) -> dict[str, Any]:
    """Return the steps of a folder's ``steps.tsv``, each with the last lines of its output and the figures that it wrote."""
    steps = []
    for line in (folder / "steps.tsv").read_text(encoding="utf-8").splitlines():
        name, code, seconds, command = line.split("\t", 3)
        step: dict[str, Any] = {"step": name, "exit": int(code) if code else None, "seconds": int(seconds), "command": command}
        output = folder / f"{name}.txt"
        if code and output.exists():
            step["end"] = output.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        files = [folder / f"{name}.json", folder / name / "report.json"]
        step["figures"] = next((json.loads(file.read_text(encoding="utf-8")) for file in files if code and file.exists()), None)
        steps.append(step)
    return {"machine": machine(), "versions": versions(), "steps": steps}


def text(report: dict[str, Any]) -> str:
    """A line per step, with the goals that it met or missed, below the machine and its versions."""
    lines = [report["machine"], ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version), ""]
    for step in report["steps"]:
        if step["exit"] is None:
            lines.append(f"{step['step']:<18} {step['command']}")
            continue
        result = {0: "done", 124: "took too long", 137: "took too long"}.get(step["exit"], f"exit code {step['exit']}")
        rows = (step["figures"] or {}).get("rows", [])
        goals = [f"{row['case']}: goal {'met' if row['met'] else 'missed'}" for row in rows if "met" in row]
        lines.append(f"{step['step']:<18} {'; '.join([result, *goals])} ({step['seconds']} s)")
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    report = joined(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "report.txt").write_text(summary := text(report), encoding="utf-8")
    print(f"\n{summary}\nwritten to {folder / 'report.txt'} and report.json")


if __name__ == "__main__":
    main()
