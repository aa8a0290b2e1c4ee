"""Measurement of layouts in real runs: even layers against the searched layout, planned and measured.

Two ranks train through Megatron's own loop, each on a core of its own with one thread, with costs that `megatron-epp profile`
measured just before. Trainings of all layouts take turns. Times are means over the iterations of a training and medians over
the rounds; the spread is that of the rounds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from megatron_epp.contrib.demos.fidelity import compare, traces
from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, Rounds, doubt, turns
from megatron_epp.cost.library import even_layers
from megatron_epp.launch.runs import tiny_gpt, train
from megatron_epp.plan.layout import layers_text
from scripts.bench.frame import RUNS, Bench, Figures
from scripts.bench.microbatches.emulated import batch
from scripts.tables import table

RANKS = 2
EVEN, VOCABULARY = "even", "vocabulary"
LAYOUTS = EVEN, "balanced", "auto", VOCABULARY
"""Values of `--epp-layout`; the last is auto with the vocabulary over all ranks."""
WARM_UP = 2
"""Iterations at the start of a training that do not count: memory is new, and Megatron reports their times together."""
_CHOSEN = re.compile(r"--epp-layout \w+: stages of ([\d., ]+) layers")


@dataclass(frozen=True, slots=True)
class Case:
    """A model whose layers do not divide evenly over two stages, since the vocabulary is work of the last one.

    Attributes:
        num_layers: of the model.
        vocab_size: of its output layer.
        hidden_size: of the model.
        context: longer documents are cut to this many tokens.
        sequences: of a batch.
    """

    num_layers: int = 5
    vocab_size: int = 14_080
    hidden_size: int = 512
    context: int = 1024
    sequences: int = 8

    def settings(self) -> dict[str, Any]:
        """Megatron's flags of the model and its batches."""
        return tiny_gpt(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.hidden_size // 64,
            vocab_size=self.vocab_size,
            untie_embeddings_and_output_weights=True,
            seq_length=self.context,
            max_position_embeddings=self.context,
            global_batch_size=self.sequences,
        )

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size:,}"


CASES = {f"{case}": case for case in (Case(), Case(num_layers=4))}
FIGURES = {
    "planned_us": "planned (ms)",
    "measured_us": "measured (ms)",
    "iteration_us": "iteration (ms)",
    "own_us": "by processor time (ms)",
}
"""Means over the iterations of a training that count: makespan as planned; as measured; Megatron's time of an iteration,
optimizer included; and the makespan of the plan if every action takes its processor time, without what other programs took."""


def profiled(case: Case, folder: Path) -> Path:
    """Measure the model's parts with `megatron-epp profile`, at the lengths of its chunks; return the profile's path."""
    folder.mkdir(parents=True, exist_ok=True)
    model, profile = folder / "model.yaml", folder / "profile.json"
    model.write_text(yaml.safe_dump({"megatron": case.settings()}), encoding="utf-8")
    tokens = ",".join(str(case.context * part // 8) for part in (1, 2, 4, 6, 8))
    command = [sys.executable, "-m", "megatron_epp.cli.main", "profile", "--model", str(model), "-o", str(profile)]
    command += ["--device", "cpu", "--tokens", tokens, "--prefixes", f"0,{case.context // 2}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={"OMP_NUM_THREADS": "1"} | os.environ)
    return profile


def documents(case: Case, folder: Path, batches: int) -> str:
    """Write documents of lengths from Wikipedia's quantiles, enough for a training; return the prefix for --data-path."""
    from scripts.random_documents import write_documents  # which needs torch

    lengths = [length for seed in range(batches) for length in batch(seed, case.sequences, case.context)]
    return write_documents(folder / "documents", lengths, case.vocab_size)


def row(args: Namespace, case: Case) -> Figures:
    """Train with every layout in turn, several times; return what each round took, and how busy other programs were."""
    folder = args.output / f"{case.num_layers}-layers"
    profile, iterations = profiled(case, folder), args.iterations + WARM_UP
    settings = case.settings() | {
        "data_path": documents(case, folder, iterations + 8),
        "train_iters": iterations,
        "pipeline_model_parallel_size": RANKS,
        "epp_documents": "truncate",
        "epp_costs": profile,
        "epp_trace": list(range(1, iterations + 2)),  # one more than there are: with a single one, no numbers
    }
    rounds: dict[str, list[Figures]] = {name: [] for name in LAYOUTS}
    layers, others = {}, OthersMeter()
    for order in turns(LAYOUTS, args.rounds):
        for name in order:
            with others.measured():
                run = train(folder / name, RANKS, settings | flags_of(name), program="megatron_epp.mcore.pinned")
            rounds[name].append(means(folder / name, run.iteration_ms))
            layers[name] = chosen_layers(case, name, (folder / name / "train.log").read_text(errors="replace"))
    return {"layers": layers, "rounds": rounds, "occupancy": asdict(others.occupancy(RANKS))}


def flags_of(name: str) -> dict[str, Any]:
    return {"epp_layout": "auto", "epp_vocab_parallel": "on"} if name == VOCABULARY else {"epp_layout": name}


def means(folder: Path, iteration_ms: Iterable[float]) -> Figures:
    """Read the traces of a training and return the means of the iterations that count."""
    times_ms = list(iteration_ms)
    each = []
    for (plan, measured), took_ms in list(zip(traces(folder, len(times_ms)), times_ms, strict=True))[WARM_UP:]:
        comparison = compare(plan, measured)
        own_us = comparison.measured_us if comparison.undisturbed_us is None else comparison.undisturbed_us
        each.append((comparison.planned_us, comparison.measured_us, 1e3 * took_ms, own_us))
    return dict(zip(FIGURES, map(fmean, zip(*each, strict=True)), strict=True))


def chosen_layers(case: Case, name: str, log: str) -> str:
    """Return the layers of every stage: even ones, or those that the log of a training names."""
    if name == EVEN:
        return layers_text([2 * count for count in even_layers(case.num_layers, RANKS)])
    said = _CHOSEN.search(log)
    assert said is not None, f"the log of --epp-layout {name} does not say which layers it chose"
    return said[1]


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    return "\n\n".join(f"{row['case']}; {Occupancy(**row['occupancy'])}\n\n{shown(row)}" for row in rows)


def shown(row: Figures) -> str:
    """Format the layouts of a model, and their ratios to even layers; with the reason where a difference is not certain."""
    medians = {name: {key: median(of[key] for of in rounds) for key in FIGURES} for name, rounds in row["rounds"].items()}
    makespans = {name: Rounds(tuple(of["measured_us"] for of in rounds)) for name, rounds in row["rounds"].items()}
    cells, said = [], []
    for name, own in medians.items():
        times = [f"{own[key] / 1e3:.0f}" for key in FIGURES]
        ratios = {key: own[key] / medians[EVEN][key] for key in FIGURES}
        shares = [f"{ratios[key]:.3f} ({ratios[key] / ratios['planned_us'] - 1:+.1%})" for key in ("measured_us", "own_us")]
        ratio = ["", "", ""] if name == EVEN else [f"{ratios['planned_us']:.3f}", *shares]
        cells.append([name, row["layers"][name], *times, f"{makespans[name].spread:.0%}", *ratio])
        if row["layers"][name] != row["layers"][EVEN]:
            reason = doubt(makespans[name], makespans[EVEN], Occupancy(**row["occupancy"]))
            said.append(f"{name} / {EVEN}: {reason or 'the times do not overlap'}")
    header = ["layout", "layers", *FIGURES.values(), "spread", "/ even: planned", "measured", "by processor time"]
    return "\n".join([table(header, cells), *said])


BENCH = Bench(
    about=__doc__,
    cases=lambda args: CASES,
    row=row,
    text=text,
    flags={
        "rounds": {"type": int, "default": 5, "help": "trainings with each layout (default 5)"},
        "iterations": {"type": int, "default": 4, "help": "of a training that count (default 4)"},
    },
    folder=RUNS / "bench_layouts",
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
