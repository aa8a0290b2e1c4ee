"""The step that trains: a tiny model with Megatron's own schedule and with plans, whose losses must agree."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.launch.machine import NO_TF32, count_gpus, has_room_for
from megatron_epp.tools.cli.first_run.outcome import Outcome, Setting
from megatron_epp.tools.cli.terminal import progress
from megatron_epp.tools.launch.runs import AS_MEGATRON, tiny_gpt, train
from megatron_epp.tools.report.text import table

_LENGTHS = {False: (4096, 2500, 1800, 900, 700, 400, 300, 120), True: (120, 70, 31, 17, 9, 5)}
"""Tokens of the documents of a batch, in full and reduced."""
_ITERATIONS = {False: 5, True: 2}
_FP32_ALLOWED = 1e-5  # largest relative difference of a loss in fp32
_BF16_FLOOR = 1e-4  # difference of a loss in bf16 that is near enough however near Megatron's own is
TIMES = 2.0  # largest distance from the reference, as a multiple of the distance of Megatron's own run


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest relative differences from a reference over the iterations: of Megatron's own run and of ours, and what passes."""

    theirs: float
    ours: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.ours <= self.allowed


def deviation(exact: Sequence[float], theirs: Sequence[float], ours: Sequence[float], floor: float) -> Deviation:
    """Compare two runs with a reference; a difference of `floor` passes, however near Megatron's own run is.

    The difference of what is not a number is infinite.
    """
    differences = (np.abs(np.divide(column, exact) - 1).max() for column in (theirs, ours))
    far = [math.inf if math.isnan(most) else float(most) for most in differences]
    return Deviation(far[0], far[1], max(TIMES * far[0], floor))


def parity(setting: Setting) -> Outcome:
    """Train from equal weights: losses equal to rounding in fp32, in bf16 as near to a run in fp32 as Megatron's own are."""
    # Numbers are compared, and no time: two ranks may share a GPU.
    folder, ranks, iterations = Path(setting.folder, "parity"), 2 if has_room_for(2) else 1, _ITERATIONS[setting.is_reduced]
    settings = tiny_training(folder, ranks, iterations, setting.is_reduced) | AS_MEGATRON
    runs: dict[str, dict[str, Any]] = {"stock": {"epp_schedule": "stock"}, "elastic": {"epp_slices": 3}}
    if settings.get("bf16"):
        runs["stock in fp32"] = {"epp_schedule": "stock", "bf16": False}
    losses = {}
    for name, changes in runs.items():
        with progress(f"training {iterations} iterations, {name}"):
            where, own = folder / name.replace(" ", "-"), settings | changes
            variables = {} if own.get("bf16") else NO_TF32
            losses[name] = train(where, ranks, own, timeout_s=600.0, environment=variables).losses
    exact, floor = losses.get("stock in fp32", losses["stock"]), _BF16_FLOOR if "stock in fp32" in losses else _FP32_ALLOWED
    difference = deviation(exact, losses["stock"], losses["elastic"], floor)
    todo = f"send this report with the logs in {folder}; `python -m scripts.parity` of a checkout compares single tensors"
    far = {"stock": difference.theirs, "elastic": difference.ours, "allowed": difference.allowed}
    return Outcome.judged(difference.holds, _lines(losses, difference, ranks), todo, {"losses": losses, "deviation": far})


def tiny_training(folder: Path, ranks: int, iterations: int, is_reduced: bool) -> dict[str, Any]:
    """Return the flags of a training of a tiny GPT on random documents, which are written to a folder."""
    lengths = _LENGTHS[is_reduced]
    sizes = dict.fromkeys(("seq_length", "max_position_embeddings"), max(lengths)) | {"global_batch_size": len(lengths)}
    return tiny_gpt(
        data_path=_documents(folder, lengths, iterations + 1),
        train_iters=iterations,
        lr_warmup_iters=1,
        pipeline_model_parallel_size=ranks,
        epp_documents="truncate",
        **sizes,
    )


def _lines(losses: dict[str, list[float]], difference: Deviation, ranks: int) -> list[str]:
    iterations = enumerate(zip(*losses.values(), strict=True), start=1)
    rows = [[str(number), *(f"{value:.7f}" for value in row)] for number, row in iterations]
    exact = "Megatron's run in fp32" if "stock in fp32" in losses else "Megatron's run"
    shared = ", which share a GPU" if 0 < count_gpus() < ranks else ""
    most = f"{difference.ours:.1e} (allowed {difference.allowed:.1e})"
    said = f"on {ranks} pipeline ranks{shared}; largest difference of the elastic run's loss from {exact}: {most}"
    return [*table(("iteration", *losses), rows, left=()), said]


def _documents(folder: Path, lengths: Sequence[int], copies: int) -> str:
    """Write text documents of given numbers of trained positions, prepare them as byte-level tokens, and return the prefix."""
    from megatron_epp.mcore.data.prepare import prepare

    texts = folder / "texts"
    shutil.rmtree(texts, ignore_errors=True)
    texts.mkdir(parents=True)
    letters = np.random.RandomState(0)
    for number, length in enumerate(tuple(lengths) * copies):  # Megatron asks for more documents than it trains on
        (texts / f"{number:04}.txt").write_bytes(bytes(letters.randint(97, 123, length).tolist()))
    prefix = folder / "documents"
    prepare([texts], prefix)
    return str(prefix)
