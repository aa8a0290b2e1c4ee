"""Trainings of the demonstration, and their figures."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_epp.cli.quickstart import documents
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.launch.runs import WARM_UP, Run, tiny_gpt, train
from megatron_epp.mcore.pinned import RECORD
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.plan import UNLIMITED_BYTES, Plan
from megatron_epp.plan.serialize import load
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.report.fidelity import compare, traces
from megatron_epp.report.measured import Measured
from megatron_epp.report.rounds import Rounds, turns

CAP_SHARE = 0.9
"""Cap on activations, as a share of what whole documents take: just below it."""
PER_STAGE = 4
"""Documents of a batch for each stage, by the rule that four microbatches per stage make the bubble small (GPipe)."""
PARITY_CONTEXT, FEW = 1024, 3
"""Context and iterations of trainings that compare losses only."""
WHOLE, ELASTIC = "1F1B, whole documents", "elastic plans"


@dataclass(frozen=True, slots=True)
class Setting:
    """Sizes of the demonstration, and its folder.

    Attributes:
        folder: for everything that it writes.
        num_ranks: of the pipeline, one stage each.
        context: tokens of the longest document.
        iterations: of a training whose time counts, after `WARM_UP` others.
        rounds: trainings with each schedule.
        note: called with what is next.
    """

    folder: Path
    num_ranks: int
    context: int
    iterations: int
    rounds: int
    note: Callable[[str], None]

    @property
    def batch(self) -> int:
        """Documents of a batch."""
        return PER_STAGE * self.num_ranks

    def train(self, name: str, data: str, iterations: int, record: bool = False, **changes: Any) -> Run:
        """Train in a folder of its own.

        Args:
            name: of the folder.
            data: prefix of the documents.
            iterations: of the training.
            record: write the gradients of the first iteration.
            changes: flags.
        """
        self.note(name.replace("-", " "))
        settings = tiny_gpt(
            data_path=data,
            train_iters=iterations,
            lr_warmup_iters=1,
            global_batch_size=self.batch,
            pipeline_model_parallel_size=self.num_ranks,
        )
        settings |= {"seq_length": self.context, "max_position_embeddings": self.context} | changes
        folder = self.folder / "trainings" / name
        environment = {RECORD: str(folder)} if record else {}
        return train(folder, self.num_ranks, settings, program="megatron_epp.mcore.pinned", environment=environment)

    def traced(self, name: str) -> list[tuple[Plan, Measured]]:
        """Read plans and times of the counted iterations of a training with `every_iteration`."""
        return traces(self.folder / "trainings" / name, WARM_UP + self.iterations)[WARM_UP:]

    @property
    def every_iteration(self) -> dict[str, Any]:
        """Flags that write the plan and the times of every iteration."""
        return {"epp_trace": list(range(1, WARM_UP + self.iterations + 1)), "epp_measure_memory": True}


@dataclass(frozen=True, slots=True)
class Parity:
    """Losses of stock Megatron, attention included, and of elastic plans, and the difference of gradients.

    Attributes:
        losses: of every iteration, stock and elastic.
        gradients: largest difference of a parameter's gradient in the first iteration, relative to its norm.
    """

    losses: tuple[tuple[float, float], ...]
    gradients: float


def parity(setting: Setting) -> Parity:
    """Train a few iterations with stock Megatron and with elastic plans."""
    context = min(PARITY_CONTEXT, setting.context)
    data = documents.write(setting.folder / "documents", "parity", documents.skewed(FEW * setting.batch, context))
    sizes = {"seq_length": context, "max_position_embeddings": context}
    stock = setting.train("parity-stock", data, FEW, record=True, epp_schedule="stock", **sizes)
    elastic = setting.train("parity-elastic", data, FEW, record=True, epp_slices=2, **sizes)
    return Parity(tuple(zip(stock.losses, elastic.losses, strict=True)), _gradient_difference(setting))


def _gradient_difference(setting: Setting) -> float:
    import torch

    worst = 0.0
    for rank in range(setting.num_ranks):
        stock, elastic = (
            torch.load(setting.folder / "trainings" / name / f"gradients-{rank}.pt", weights_only=True)
            for name in ("parity-stock", "parity-elastic")
        )
        for name, wanted in stock.items():
            worst = max(worst, float((elastic[name] - wanted).norm() / wanted.norm()))
    return worst


def measured_costs(setting: Setting, data: str) -> Path:
    """Measure the model's times on this machine once, as `--epp-costs measure` does; return the file with them."""
    folder = setting.folder / "trainings" / "measuring-costs"
    setting.train("measuring-costs", data, WARM_UP, epp_costs="measure", save=folder, save_interval=WARM_UP + 1)
    return folder / "epp_costs.json"


def cap_gb(peak_bytes: int, costs: PipelineCosts) -> float:
    """Return the cap in 2^30 bytes that leaves activations a `CAP_SHARE` of a peak."""
    return (CAP_SHARE * peak_bytes + min(stage.static_bytes for stage in costs.stages)) / 2**30


@dataclass(frozen=True, slots=True)
class Schedule:
    """Figures of one schedule on the skewed documents.

    Attributes:
        tokens_per_second: of every round.
        peak_bytes: largest measured peak of activations of any rank.
        planned_us: makespans of the counted iterations, as planned.
        own_us: makespans if every action takes its processor time; None on a GPU.
        losses: of every iteration.
    """

    tokens_per_second: Rounds
    peak_bytes: int
    planned_us: float
    own_us: float | None
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Race:
    """Both schedules on the skewed documents.

    Attributes:
        load: median load average during the rounds.
        num_ranks: of a training.
        cap_bytes: cap on activations.
    """

    whole: Schedule
    elastic: Schedule
    load: float
    num_ranks: int
    cap_bytes: int


def race(setting: Setting, data: str, costs: Path) -> Race:
    """Train the skewed documents in alternating rounds: whole with Megatron's 1F1B, and with elastic plans under the cap."""
    iterations = WARM_UP + setting.iterations
    probe = setting.train("memory-of-whole-documents", data, iterations, epp_schedule="whole", epp_measure_memory=True)
    peak = max(probe.peak_activation_bytes)
    whole = {"epp_schedule": "whole"}
    elastic = {"epp_costs": costs, "epp_memory_cap_gb": cap_gb(peak, _costs(costs))}
    setting.train("whole-traced", data, iterations, epp_costs=costs, epp_planner="1f1b", **setting.every_iteration)
    traced = setting.train("elastic-traced", data, iterations, **elastic, **setting.every_iteration)
    found: dict[str, list[Run]] = {WHOLE: [], ELASTIC: []}
    loads = []
    for number, order in enumerate(turns((WHOLE, ELASTIC), setting.rounds), start=1):
        for name in order:
            folder, flags = ("elastic", elastic) if name == ELASTIC else ("whole", whole)
            found[name].append(setting.train(f"{folder}-round-{number}", data, iterations, **flags))
            loads.append(os.getloadavg()[0])
    return Race(
        _schedule(setting, "whole-traced", found[WHOLE], peak),
        _schedule(setting, "elastic-traced", found[ELASTIC], max(traced.peak_activation_bytes)),
        statistics.median(loads),
        setting.num_ranks,
        int(CAP_SHARE * peak),
    )


def _schedule(setting: Setting, traced: str, runs: Sequence[Run], peak_bytes: int) -> Schedule:
    each = [compare(*one) for one in setting.traced(traced)]
    own_us = [one.undisturbed_us for one in each if one.undisturbed_us is not None]
    return Schedule(
        Rounds(tuple(run.tokens_per_second for run in runs)),
        peak_bytes,
        sum(one.planned_us for one in each),
        sum(own_us) if len(own_us) == len(each) else None,
        tuple(runs[0].losses),
    )


@dataclass(frozen=True, slots=True)
class LongDocument:
    """A document as long as the context beside short ones, under a cap that whole documents exceed.

    Attributes:
        lengths: of the batch.
        plain_bytes: peak of whole documents without recompute, as planned.
        whole_bytes: measured peak of whole documents with every layer recomputed.
        elastic_bytes: measured peak of elastic plans.
        cap_bytes: cap on activations.
        refusal: what the planner of whole documents says under the cap.
        losses: of every iteration, whole and elastic.
        plan: of one iteration.
    """

    lengths: tuple[int, ...]
    plain_bytes: int
    whole_bytes: int
    elastic_bytes: int
    cap_bytes: int
    refusal: str
    losses: tuple[tuple[float, float], ...]
    plan: Plan


def long_document(setting: Setting, costs: Path) -> LongDocument:
    """Train a long document beside short ones: whole with every layer recomputed, and with elastic plans under a cap below it."""
    lengths = documents.one_long(setting.batch, setting.context)
    data = documents.write(setting.folder / "documents", "long", lengths)
    layers = tiny_gpt()["num_layers"] // setting.num_ranks
    flags = {"epp_measure_memory": True}
    whole = setting.train("long-document-whole", data, FEW, epp_schedule="whole", epp_recompute=layers, **flags)
    peak, known = max(whole.peak_activation_bytes), _costs(costs)
    cap = cap_gb(peak, known)
    elastic = setting.train("long-document-elastic", data, FEW, epp_costs=costs, epp_memory_cap_gb=cap, epp_trace=1, **flags)
    made = load(setting.folder / "trainings" / "long-document-elastic" / "plan.json")
    plainly = plan(_problem(made, UNLIMITED_BYTES), known, Options(planner="1f1b"))
    peaks = zip(plainly.predicted.peak_bytes, plainly.static_bytes, strict=True)
    return LongDocument(
        lengths,
        max(most - static for most, static in peaks),
        peak,
        max(elastic.peak_activation_bytes),
        int(CAP_SHARE * peak),
        _refusal(made, known, int(cap * 2**30)),
        tuple(zip(whole.losses, elastic.losses, strict=True)),
        made,
    )


def _refusal(made: Plan, costs: PipelineCosts, cap_bytes: int) -> str:
    try:
        plan(_problem(made, cap_bytes), costs, Options(planner="1f1b"))
    except EppError as error:
        return str(error)
    return ""


def _problem(made: Plan, cap_bytes: int) -> Problem:
    return Problem(made.lengths, made.placement, (cap_bytes,) * made.num_ranks)


def _costs(path: Path) -> PipelineCosts:
    return PipelineCosts.from_json(path.read_text(encoding="utf-8"))
