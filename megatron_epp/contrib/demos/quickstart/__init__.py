"""The command that shows what elastic plans are for: short trainings of a small GPT on documents of very different lengths.

Lengths, model and caps are fixed by what they stand for: lengths like Wikipedia's articles, four documents per stage, and caps
just below what whole documents take.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from megatron_epp.cli.terminal import Command, Parser, output_folder, say
from megatron_epp.contrib.demos.quickstart import source_files, texts
from megatron_epp.contrib.demos.quickstart.demo_setting import CAP_SHARE, Setting, measured_costs
from megatron_epp.contrib.demos.quickstart.parts import (
    FEW,
    LongDocument,
    long_document,
    parity,
    parity_context,
    peak_of_whole,
    skewed_documents,
)
from megatron_epp.launch.machine import machine
from megatron_epp.launch.runs import WARM_UP, pipeline_size
from megatron_epp.mcore.arguments.flag import COUNT, STAGES
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.serialize import save
from megatron_epp.plan.units import format_bytes
from megatron_epp.plan.writing import write_text
from megatron_epp.report.gantt import save_gantt, save_picture, side_by_side
from megatron_epp.report.measured import Measured
from megatron_epp.report.page.data import Shown
from megatron_epp.report.page.html import save_page
from megatron_epp.report.trace import save_trace

_EXAMPLE = """\
example: a short one
  megatron-epp quickstart --rounds 1 --iterations 1 --context 1024
"""
_FOLDER = "runs/quickstart"
_NEXT = """\
Next:
  megatron-epp show {folder}/plan.json                    the plan of one iteration, as text
  megatron-epp advise --model llama3-8b --cluster h100x8 --devices 16 --lengths wikipedia --context 131072
                                                          sizes, layout and gain for your model, cluster and lengths
  docs/first-hour.md                                      your documents, one node, SLURM"""


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--rounds", type=COUNT, default=5, metavar="N", help="trainings with each schedule, in turn (%(default)s)")
    add(
        "--iterations",
        type=COUNT,
        default=6,
        metavar="N",
        help=f"iterations of a training that count, after {WARM_UP} others (%(default)s)",
    )
    add("--pipeline", type=STAGES, default=2, metavar="N", help="pipeline stages, at most the number of GPUs (%(default)s)")
    add("--context", type=COUNT, default=8192, metavar="N", help="tokens of the longest document (%(default)s)")
    where = "where logs, figures and pictures go (%(default)s)"
    add("-o", "--output", type=output_folder, default=_FOLDER, metavar="FOLDER", help=where)


def run(args: argparse.Namespace) -> int:
    """Train, compare, and leave everything in a folder. Raises `EppError`."""
    import torch  # noqa: F401  # before anything is written

    logging.basicConfig(level=logging.WARNING)
    start_s = time.monotonic()
    setting = Setting(Path(args.output), pipeline_size(args.pipeline), args.context, args.iterations, args.rounds)
    say(f"{machine()}; {setting.num_ranks} ranks", flush=True)
    _demonstrate(setting)
    say(f"\nTook {time.monotonic() - start_s:.0f} s.")
    return 0


def _demonstrate(setting: Setting) -> None:
    folder = setting.folder
    tokens = f"documents of up to {parity_context(setting):,} tokens"
    _title(1, f"The same training as stock Megatron: {FEW} iterations, {tokens}")
    same = parity(setting)
    _say(texts.parity_lines(same))

    lengths = source_files.skewed(setting.batch * (WARM_UP + setting.iterations), setting.context)
    data = source_files.write(setting.folder / "documents", "skewed", lengths)
    _title(2, f"Documents of very different lengths, {setting.batch} per batch, both schedules in turn, {setting.rounds} times")
    _say([f"source files cut to lengths like Wikipedia's: median {median(lengths):,.0f}, longest {max(lengths):,} tokens"])
    peak_bytes = peak_of_whole(setting, data)
    cap = f"elastic plans get at most {CAP_SHARE:.0%} of that, {format_bytes(CAP_SHARE * peak_bytes)}, on each rank"
    _say([f"whole documents take {format_bytes(peak_bytes)} of activations; {cap}", ""])
    costs = measured_costs(setting, data)
    skewed = skewed_documents(setting, data, costs, peak_bytes)
    _say(texts.skewed_lines(skewed))

    _title(3, "A long document among short ones, under a cap that whole documents exceed whatever they recompute")
    long = long_document(setting, costs)
    _say(texts.long_lines(long))

    figures = {"machine": machine(), "ranks": setting.num_ranks} | texts.figures(same, skewed, long)
    write_text(folder / "report.json", json.dumps(figures, indent=2) + "\n")
    _say(["", "What was shown:", *texts.summary(same, skewed, long), "", *_leave(setting, long)])
    _say(["", _NEXT.format(folder=folder)])


def _leave(setting: Setting, long: LongDocument) -> list[str]:
    """Write plan, trace and pictures of the batch with the longest document, and return lines that name them."""
    batches = zip(setting.traced("whole-traced"), setting.traced("elastic-traced"), strict=True)
    (whole, _), (plan, measured) = max(batches, key=lambda both: max(both[0][0].lengths))
    folder = setting.folder
    save(plan, folder / "plan.json")
    save_trace(plan, folder / "trace.json", measured)
    save_page([Shown("1F1B, whole documents", whole), Shown("elastic plan", plan, measured)], folder / "iteration.html")
    lines = [
        f"In {folder}: report.json; plan.json and trace.json (for ui.perfetto.dev) of one iteration; and to look at",
        "  iteration.html      one batch by both schedules, planned and measured: open it in a browser",
    ]
    try:
        return [*lines, *_draw(folder, whole, plan, measured, long)]
    except EppError as error:
        return [*lines, f"  no pictures: {error}"]


def _draw(folder: Path, whole: Plan, plan: Plan, measured: Measured, long: LongDocument) -> list[str]:
    save_picture(side_by_side([("1F1B, whole documents", whole), ("elastic plan", plan)]), folder / "schedules.png")
    save_gantt(plan, folder / "iteration.png", measured)
    save_gantt(long.plan, folder / "long-document.png")
    return [
        "  schedules.png       one batch by both schedules, as planned",
        "  iteration.png       the elastic plan of it, as planned and as measured",
        "  long-document.png   the long document in slices among short ones, and memory under its cap",
    ]


def _title(number: int, text: str) -> None:
    _say(["", f"{number}. {text}"])


def _say(lines: Sequence[str]) -> None:
    say("\n".join(lines), flush=True)


_PURPOSE = "train a small GPT on uneven documents with Megatron's schedule and with elastic plans (needs torch and Megatron)"
COMMAND = Command("quickstart", _PURPOSE, add_arguments, run, _EXAMPLE)
