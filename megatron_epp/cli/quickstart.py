"""The command that trains a small GPT with Megatron's schedule and with elastic plans, and compares the runs.

The documents are the Python standard library's own source files, one document per file, as bytes: of very different lengths,
and on every machine.
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

from megatron_epp.cli.terminal import Command, Parser, progress, say
from megatron_epp.launch.machine import machine
from megatron_epp.launch.runs import Run, pipeline_size, tiny_gpt, train
from megatron_epp.mcore.arguments.flag import COUNT, STAGES
from megatron_epp.mcore.data.prepare import prepare
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.serialize import load
from megatron_epp.report.gantt import save_gantt
from megatron_epp.report.measured import Measured
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.table import table
from megatron_epp.report.text import summary

_EXAMPLE = """\
example: a short one
  megatron-epp quickstart --iterations 5 --context 1024
"""
_RUNS = {
    "stock": "Megatron's schedule and attention, one whole document per microbatch",
    "whole": "Megatron's schedule, our attention kernel",
    "epp": "elastic plans",
}
_FOLDER = "runs/quickstart"


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--iterations", type=COUNT, default=20, metavar="N", help="training iterations of each of the three runs (%(default)s)")
    add("--pipeline", type=STAGES, default=2, metavar="N", help="pipeline stages, at most the number of GPUs (%(default)s)")
    add(
        "--context",
        type=COUNT,
        default=4096,
        metavar="N",
        help="longer documents are truncated to this many tokens (%(default)s)",
    )
    add("-o", "--output", default=_FOLDER, metavar="FOLDER", help="where logs, figures and pictures go (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Train three times, compare, and leave everything in a folder. Raises `EppError`."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EppError(f"quickstart needs torch: {error}") from error
    logging.basicConfig(level=logging.WARNING)
    folder, ranks = Path(args.output), pipeline_size(args.pipeline)
    settings = tiny_gpt(
        data_path=corpus(folder),
        train_iters=args.iterations,
        lr_warmup_iters=min(2, args.iterations - 1),
        seq_length=args.context,
        max_position_embeddings=args.context,
        epp_documents="truncate",  # the corpus has so many long ones that split they would leave hardly any other lengths
        pipeline_model_parallel_size=ranks,
        epp_measure_memory=True,
    )
    traced = {"epp_schedule": "elastic", "epp_costs": "measure", "epp_trace": min(3, args.iterations)}
    runs = {}
    for name, extra in {"stock": {"epp_schedule": "stock"}, "whole": {"epp_schedule": "whole"}, "epp": traced}.items():
        say(f"training {args.iterations} iterations on {ranks} ranks: {_RUNS[name]}", flush=True)
        with progress(f"training, see {folder / name / 'train.log'}"):
            runs[name] = train(folder / name, ranks, settings | extra)
    report = compare(**runs)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    say(text(report))
    left = _leave(folder)
    say(f"\nthe plan of one iteration:\n{summary(load(folder / 'plan.json'))}")
    say(f"\nin {folder}: report.json, plan.json, {left}trace.json (for ui.perfetto.dev)")
    return 0


def corpus(folder: Path) -> str:
    """Prepare the documents once; returns the prefix for --data-path."""
    prefix = folder / "corpus" / "stdlib"
    if not prefix.with_suffix(".idx").exists():
        source = Path(sysconfig.get_path("stdlib"))
        files = sorted(f for f in source.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)
        say(f"preparing {len(files)} source files of the standard library", flush=True)
        with warnings.catch_warnings():  # of Megatron's, about packages that this needs not
            warnings.simplefilter("ignore")
            say(str(prepare(files, prefix)), flush=True)
    return str(prefix)


def compare(stock: Run, whole: Run, epp: Run) -> dict[str, Any]:
    """All figures of the comparison, as written to report.json."""
    differences = [abs(a - b) / abs(a) for a, b in zip(stock.losses, epp.losses, strict=True)]
    runs = {"stock": stock, "whole": whole, "epp": epp}
    bubbles = [line["bubble_fraction"] for line in epp.lines[1:] or epp.lines]
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


def text(report: dict[str, Any]) -> str:
    """The figures as tables."""
    losses = zip(report["losses"]["stock"], report["losses"]["epp"], strict=True)
    by_iteration = [(str(i), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b) / abs(a):.1e}") for i, (a, b) in enumerate(losses, 1)]
    speed, peak, bubble = (report[key] for key in ("tokens_per_second", "peak_activation_bytes", "bubble_fraction"))
    by_run = [(name, f"{speed[name]:,.0f}", f"{peak[name] / 2**20:,.1f} MiB", means) for name, means in _RUNS.items()]
    lines = [
        "",
        *table(("iteration", "stock loss", "epp loss", "relative difference"), by_iteration, left=()),
        f"\nlargest relative difference of the losses: {report['max_relative_loss_difference']:.1e}\n",
        *table(("run", "tokens/s", "peak activations", ""), by_run, left=(0, 3)),
        f"\nbubble of the elastic runs: {bubble['planned']:.1%} planned, {bubble['measured']:.1%} measured (median)",
    ]
    return "\n".join(lines)


def _leave(folder: Path) -> str:
    """Copy plan and trace of the elastic run to where they are found, and draw it; what was drawn."""
    for name in ("plan.json", "trace.json"):
        (folder / name).write_text((folder / "epp" / name).read_text(encoding="utf-8"), encoding="utf-8")
    made, measured = load(folder / "plan.json"), Measured.load(folder / "epp" / "measured.json")
    save_page([Shown("an iteration", made, measured)], folder / "iteration.html")
    page = "iteration.html (planned and measured, to explore in a browser), "
    try:
        save_gantt(made, folder / "iteration.png", measured)
    except EppError as error:
        say(f"\nno picture: {error}")
        return page
    return f"{page}iteration.png, "


_PURPOSE = "train a small GPT with Megatron's schedule and with elastic plans, and compare (needs torch and Megatron)"
COMMAND = Command("quickstart", _PURPOSE, add_arguments, run, _EXAMPLE)
