"""The command that shows what elastic plans are for: short trainings of a small GPT on documents of very different lengths.

Documents are beginnings of the Python standard library's source files, a byte a token. Model, batch and caps are fixed by what
they stand for: lengths like Wikipedia's articles, four documents per stage (GPipe's rule for a small bubble), and caps just
below what whole documents take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import sysconfig
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_epp.contrib.demos.forked_ranks import Forks
from megatron_epp.contrib.demos.rounds import OthersMeter, doubt, turns
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.launch.machine import count_gpus, machine
from megatron_epp.mcore.arguments.flag import COUNT
from megatron_epp.mcore.pinned import RECORD
from megatron_epp.plan.errors import EppError, InfeasibleError
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.plan import UNLIMITED_BYTES, Plan
from megatron_epp.plan.serialize import load, save
from megatron_epp.plan.units import format_bytes
from megatron_epp.plan.writing import write_text
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.tools.cli.terminal import Parser, output_folder, progress, say
from megatron_epp.tools.formulas.library import load_costs
from megatron_epp.tools.launch.runs import (
    AS_MEGATRON,
    WARM_UP,
    RecordedRun,
    Start,
    learnt_costs,
    pipeline_size,
    tiny_gpt,
    train,
)
from megatron_epp.tools.report.page.html import Shown, save_page
from megatron_epp.tools.report.text import table

EXAMPLE = """\
example: a short one
  megatron-epp quickstart --rounds 1 --context 1024
"""
_NEXT = """
Next:
  megatron-epp show {folder}/plan.json                    the plan of one iteration, as text
  megatron-epp advise --model llama3-8b --cluster h100x8 --devices 16 --lengths wikipedia --context 131072
                                                          sizes, layout and gain for your model, cluster and lengths
  docs/first-hour.md                                      your documents, one node, SLURM"""
CAP_SHARE = 0.9
"""Cap on activations, as a share of what whole documents take."""
ITERATIONS, FEW, PARITY_CONTEXT = 6, 3, 1024
"""Iterations whose time counts, after `WARM_UP` others; and iterations and context of trainings that compare losses only: stock
attention keeps all scores, so longer documents would take gigabytes."""
WHOLE, ELASTIC = "1F1B, whole documents", "elastic plans"


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the demonstration."""

    folder: Path  # for everything that it writes
    num_ranks: int  # of the pipeline, one stage each
    context: int  # tokens of the longest document
    rounds: int  # trainings with each schedule
    start: Start | None  # how ranks start: forked on a CPU, where torch's launcher takes longer than a training

    @property
    def batch(self) -> int:
        """Documents of a batch."""
        return 4 * self.num_ranks

    def flags(self, data: str) -> dict[str, Any]:
        """Return the flags of trainings on documents with this prefix."""
        return tiny_gpt(
            data_path=data,
            lr_warmup_iters=0,  # or the first step would change nothing
            global_batch_size=self.batch,
            pipeline_model_parallel_size=self.num_ranks,
            seq_length=self.context,
            max_position_embeddings=self.context,
            **AS_MEGATRON,  # schedules are compared on the same stages, of which learnt costs are
        )

    def train(self, name: str, data: str, iterations: int, record: bool = False, **changes: Any) -> RecordedRun:
        """Train in a folder of its own."""
        folder = self.folder / "trainings" / name
        settings, environment = (
            self.flags(data) | {"train_iters": iterations} | changes,
            {RECORD: str(folder)} if record else {},
        )
        with progress(f"training: {name.replace('-', ' ')}"):
            how: dict[str, Any] = {"program": "megatron_epp.mcore.pinned", "environment": environment, "start": self.start}
            return train(folder, self.num_ranks, settings, **how)

    def skewed(self, count: int, context: int) -> tuple[int, ...]:
        """Draw lengths from the quantiles of Wikipedia's articles, cut to the context."""
        return tuple(wikipedia(count, 0).clip(max=context).tolist())

    def write(self, name: str, lengths: Sequence[int]) -> str:
        """Write documents of so many tokens, each of another source file; return the prefix for --data-path.

        Raises:
            EppError: no file is as long as a document.
        """
        from megatron_epp.mcore.data.prepare import prepare

        source = Path(sysconfig.get_path("stdlib"))
        files = sorted(f for f in source.rglob("*.py") if "site-packages" not in f.parts and "test" not in f.parts)
        texts = [file.read_bytes().decode("ascii", "ignore") for file in files]
        longest = max(map(len, texts), default=0)
        if longest < max(lengths):
            raise EppError(f"the longest source file has {longest:,} characters, a document {max(lengths):,}: lower --context")
        folder = self.folder / "documents"
        folder.mkdir(parents=True, exist_ok=True)
        every, path = itertools.cycle(texts), folder / f"{name}.jsonl"
        with open(path, "w", encoding="utf-8") as lines:
            for length in lengths:
                lines.write(json.dumps({"text": next(text for text in every if len(text) >= length)[:length]}) + "\n")
        with warnings.catch_warnings():  # of Megatron's, about packages that this needs not
            warnings.simplefilter("ignore")
            prepare([path], folder / name)
        return str(folder / name)


def add_arguments(parser: Parser) -> None:
    """Add the command's flags."""
    add = parser.add_argument
    add("--rounds", type=COUNT, default=5, metavar="N", help="trainings with each schedule, in turn (%(default)s)")
    add("--context", type=COUNT, default=8192, metavar="N", help="tokens of the longest document (%(default)s)")
    where = "where logs and figures go (%(default)s)"
    add("-o", "--output", type=output_folder, default="runs/quickstart", metavar="FOLDER", help=where)


def run(args: argparse.Namespace) -> int:
    """Train, compare, and leave everything in a folder. Raises `EppError`."""
    import torch  # noqa: F401  # before anything is written

    logging.basicConfig(level=logging.WARNING)
    start_s = time.monotonic()
    preload = "megatron_epp.mcore.pinned", "preload"
    start = None if count_gpus() else Forks({"OMP_NUM_THREADS": "1"} | os.environ, preload).run
    setting = Setting(Path(args.output), pipeline_size(2), args.context, args.rounds, start)
    say(f"{machine()}; {setting.num_ranks} ranks", flush=True)
    figures = {"machine": machine(), "ranks": setting.num_ranks, "parity": parity(setting)}
    figures["skewed"], costs = skewed_documents(setting)
    figures["long_document"] = long_document(setting, costs)
    write_text(setting.folder / "report.json", json.dumps(figures, indent=2) + "\n")
    say(f"\nIt would be a tie where documents have similar lengths and fit.\nIn {setting.folder}: report.json, plan.json, and")
    say("iteration.html, one batch by both schedules, planned and measured: open it in a browser")
    say(_NEXT.format(folder=setting.folder) + f"\n\nTook {time.monotonic() - start_s:.0f} s.")
    return 0


def parity(setting: Setting) -> dict[str, Any]:
    """Train a few iterations with stock Megatron, attention included, and with elastic plans; compare losses and gradients."""
    import torch

    context = min(PARITY_CONTEXT, setting.context)
    _title(f"1. The same training as stock Megatron: {FEW} iterations, documents of up to {context:,} tokens")
    data = setting.write("parity", setting.skewed(FEW * setting.batch, context))
    sizes = {"seq_length": context, "max_position_embeddings": context}
    stock = setting.train("parity-stock", data, FEW, record=True, epp_schedule="stock", **sizes)
    elastic = setting.train("parity-elastic", data, FEW, record=True, epp_slices=2, **sizes)
    worst = 0.0
    for rank in range(setting.num_ranks):
        theirs, ours = (
            torch.load(setting.folder / "trainings" / f"parity-{name}" / f"gradients-{rank}.pt", weights_only=True)
            for name in ("stock", "elastic")
        )
        worst = max(worst, *(float((ours[name] - wanted).norm() / wanted.norm()) for name, wanted in theirs.items()))
    compared = _compared("stock Megatron", stock, elastic)
    say(f"gradients of the first iteration: every parameter's differs by at most {worst:.1e} of its norm", flush=True)
    return compared | {"gradients": worst}


def skewed_documents(setting: Setting) -> tuple[dict[str, Any], Path]:
    """Train skewed documents in alternating rounds: whole with Megatron's 1F1B, and with elastic plans under a cap.

    Returns:
        the figures, and the file of learnt costs.
    """
    iterations = WARM_UP + ITERATIONS
    lengths = setting.skewed(setting.batch * iterations, setting.context)
    data = setting.write("skewed", lengths)
    _title(f"2. Documents of very different lengths, {setting.batch} per batch, both schedules in turn, {setting.rounds} times")
    say(f"source files cut to lengths like Wikipedia's: median {median(lengths):,.0f}, longest {max(lengths):,} tokens")
    whole: dict[str, Any] = {"epp_schedule": "whole"}
    memory = setting.train("memory-of-whole-documents", data, iterations, epp_measure_memory=True, **whole)
    peaks = {WHOLE: max(memory.peak_activation_bytes)}
    cap = CAP_SHARE * peaks[WHOLE]
    with progress("training: learning costs"):
        where = setting.folder / "trainings" / "learning-costs"
        path = learnt_costs(where, setting.num_ranks, setting.flags(data), start=setting.start)
    costs = _known(path)
    elastic: dict[str, Any] = {"epp_costs": path, "epp_memory_cap_gb": _cap_gb(peaks[WHOLE], costs)}
    numbers = range(1, iterations + 1)
    traced = setting.train("elastic-traced", data, iterations, epp_trace=[*numbers], epp_measure_memory=True, **elastic)
    peaks[ELASTIC] = max(traced.peak_activation_bytes)
    runs: dict[str, list[RecordedRun]] = {WHOLE: [], ELASTIC: []}
    others = OthersMeter()
    for number, order in enumerate(turns((WHOLE, ELASTIC), setting.rounds), start=1):
        for name in order:
            word, flags = ("elastic", elastic) if name == ELASTIC else ("whole", whole)
            with others.measured():
                runs[name].append(setting.train(f"{word}-round-{number}", data, iterations, **flags))
    folder = setting.folder / "trainings" / "elastic-traced"
    ours = [load(folder / f"plan-{number}.json") for number in numbers][WARM_UP:]
    theirs = [_whole(elastic_plan, costs, UNLIMITED_BYTES) for elastic_plan in ours]
    longest = max(range(len(ours)), key=lambda at: max(ours[at].lengths))
    save(ours[longest], setting.folder / "plan.json")
    measured = Measured.load(folder / f"measured-{WARM_UP + longest + 1}.json")
    save_page([Shown(WHOLE, theirs[longest]), Shown(ELASTIC, ours[longest], measured)], setting.folder / "iteration.html")
    planned_us = [sum(each.predicted.makespan_us for each in plans) for plans in (theirs, ours)]
    speeds = {name: [run.tokens_per_second for run in each] for name, each in runs.items()}
    compared = _compared("whole", runs[WHOLE][0], runs[ELASTIC][0])
    ratios = {"planned": planned_us[0] / planned_us[1], "measured": median(speeds[ELASTIC]) / median(speeds[WHOLE])}
    rows = [[name, *(f"{of(s):,.0f}" for of in (median, min, max)), format_bytes(peaks[name])] for name, s in speeds.items()]
    say("\n".join(["", *table(("schedule", "tokens/s", "least", "most", "peak activations"), rows), ""]))
    reason = doubt(speeds[WHOLE], speeds[ELASTIC], occupancy := others.occupancy(setting.num_ranks))
    say(
        f"{reason}elastic plans, capped at {format_bytes(cap)} of activations, train {ratios['measured']:.2f} times as fast, "
        f"{ratios['planned']:.2f} planned",
        flush=True,
    )
    schedules = {
        name: {"tokens_per_second": speeds[name], "peak_bytes": peaks[name], "losses": runs[name][0].losses} for name in runs
    }
    more = {"schedules": schedules, "elastic_over_whole": ratios, "occupancy": str(occupancy), "activation_cap_bytes": int(cap)}
    return compared | more, path


def long_document(setting: Setting, costs: Path) -> dict[str, Any]:
    """Train a document as long as the context among short ones, under a cap below what whole ones take that recompute all."""
    _title("3. A long document among short ones, under a cap that whole documents exceed whatever they recompute")
    lengths = (setting.context, *setting.skewed(setting.batch - 1, setting.context // 16))
    data = setting.write("long", lengths)
    layers = tiny_gpt()["num_layers"] // setting.num_ranks
    flags = {"epp_measure_memory": True}
    whole = setting.train("long-document-whole", data, FEW, epp_schedule="whole", epp_recompute=layers, **flags)
    peak, known = max(whole.peak_activation_bytes), _known(costs)
    cap = _cap_gb(peak, known)
    elastic = setting.train("long-document-elastic", data, FEW, epp_costs=costs, epp_memory_cap_gb=cap, epp_trace=1, **flags)
    ours = load(setting.folder / "trainings" / "long-document-elastic" / "plan.json")
    needed = None
    try:
        _whole(ours, known, int(cap * 2**30))
    except InfeasibleError as error:
        needed = _activation_bytes(_whole(ours, known, error.least_cap_bytes))
    peaks = {
        "plain_bytes": _activation_bytes(_whole(ours, known, UNLIMITED_BYTES)),
        "whole_bytes": peak,
        "elastic_bytes": max(elastic.peak_activation_bytes),
        "cap_bytes": int(CAP_SHARE * peak),
    }
    said = "whole documents, no recompute (planned)", "whole documents, every layer recomputed", ELASTIC, "cap"
    rows = [[name, format_bytes(size)] for name, size in zip(said, peaks.values(), strict=True)]
    say("\n".join(table((f"{setting.context:,} tokens among {len(lengths) - 1} short ones", "activations"), rows)))
    if needed is not None:
        say(f"the planner refuses whole documents under this cap: they need {format_bytes(needed)} at least")
    return {"lengths": lengths, "needed_bytes": needed} | peaks | _compared("whole", whole, elastic)


def _cap_gb(peak_bytes: int, costs: PipelineCosts) -> float:
    """Return the cap in 2^30 bytes that leaves activations a `CAP_SHARE` of a peak, on ranks with more weights less."""
    return (CAP_SHARE * peak_bytes + min(stage.static_bytes for stage in costs.stages)) / 2**30


def _known(path: Path) -> PipelineCosts:
    costs = load_costs(str(path))
    assert isinstance(costs, PipelineCosts)
    return costs


def _whole(elastic: Plan, costs: PipelineCosts, cap_bytes: int) -> Plan:
    """Plan the documents of an elastic plan whole, in 1F1B."""
    return plan(Problem(elastic.lengths, elastic.placement, (cap_bytes,) * elastic.num_ranks), costs, Options(planner="1f1b"))


def _activation_bytes(planned: Plan) -> int:
    """Return the largest planned peak of activations of any rank."""
    return max(peak - static for peak, static in zip(planned.predicted.peak_bytes, planned.static_bytes, strict=True))


def _compared(name: str, theirs: RecordedRun, ours: RecordedRun) -> dict[str, Any]:
    """Print the losses of two trainings, and return them with their largest relative difference."""
    pairs = [*zip(theirs.losses, ours.losses, strict=True)]
    rows = [[str(i), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b) / abs(a):.1e}"] for i, (a, b) in enumerate(pairs, 1)]
    say("\n".join(table(("iteration", f"loss, {name}", "loss, elastic", "relative difference"), rows, left=())), flush=True)
    return {"losses": pairs, "max_relative_loss_difference": max(abs(a - b) / abs(a) for a, b in pairs)}


def _title(text: str) -> None:
    say(f"\n{text}", flush=True)
