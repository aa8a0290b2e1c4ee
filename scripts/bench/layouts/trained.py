"""Trainings of a small GPT with one layout after the other, each rank on a core of its own, with costs profiled before."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_epp.contrib.demos.fidelity import compare, traces
from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, turns
from megatron_epp.cost.library import even_layers
from megatron_epp.launch.runs import tiny_gpt, train
from megatron_epp.plan.layout import layers_text
from scripts.bench.layouts.compared import AUTO, EVEN, VOCABULARY, Measured, Trained
from scripts.bench.microbatches.batches import batch

RANKS = 2
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


CASES = (Case(), Case(num_layers=4))


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


def measure(
    case: Case, folder: Path, layouts: Sequence[str], rounds: int, iterations: int, note: Callable[[str], None]
) -> tuple[list[Measured], Occupancy]:
    """Train with every layout in turn, several times.

    Args:
        layouts: values of `--epp-layout`, and `VOCABULARY` for auto with the vocabulary over all ranks; every round begins with
            another.
        rounds: trainings with each layout.
        iterations: of a training that count.
        note: called with what is next.

    Returns:
        the figures of each layout, and how busy other programs kept the machine during the trainings.
    """
    note("profiling the model")
    profile = profiled(case, folder)
    iterations += WARM_UP
    settings = case.settings() | {
        "data_path": documents(case, folder, iterations + 8),
        "train_iters": iterations,
        "pipeline_model_parallel_size": RANKS,
        "epp_documents": "truncate",
        "epp_costs": profile,
        "epp_trace": list(range(1, iterations + 2)),  # one more than there are: with a single one, no numbers
    }
    runs: dict[str, list[Trained]] = {name: [] for name in layouts}
    layers, others = {}, OthersMeter()
    for number, order in enumerate(turns(layouts, rounds), start=1):
        for name in order:
            note(f"round {number} of {rounds}, {name}")
            with others.measured():
                run = train(folder / name, RANKS, settings | flags_of(name), program="megatron_epp.mcore.pinned")
            runs[name].append(summary(folder / name, run.iteration_ms))
            layers[name] = chosen_layers(case, name, (folder / name / "train.log").read_text(errors="replace"))
    return [Measured(name, layers[name], tuple(runs[name])) for name in layouts], others.occupancy(RANKS)


def flags_of(name: str) -> dict[str, Any]:
    """Return the flags of a layout."""
    return {"epp_layout": AUTO, "epp_vocab_parallel": "on"} if name == VOCABULARY else {"epp_layout": name}


def summary(folder: Path, iteration_ms: Iterable[float]) -> Trained:
    """Read the traces of a training and return the means of the iterations that count."""
    times_ms = list(iteration_ms)
    each = []
    for (plan, measured), took_ms in list(zip(traces(folder, len(times_ms)), times_ms, strict=True))[WARM_UP:]:
        comparison = compare(plan, measured)
        own_us = comparison.measured_us if comparison.undisturbed_us is None else comparison.undisturbed_us
        each.append(Trained(comparison.planned_us, comparison.measured_us, own_us, 1e3 * took_ms))
    return Trained.mean(each)


def chosen_layers(case: Case, name: str, log: str) -> str:
    """Return the layers of every stage: even ones, or those that the log of a training names."""
    if name == EVEN:
        return layers_text([2 * count for count in even_layers(case.num_layers, RANKS)])
    said = _CHOSEN.search(log)
    assert said is not None, f"the log of --epp-layout {name} does not say which layers it chose"
    return said[1]
