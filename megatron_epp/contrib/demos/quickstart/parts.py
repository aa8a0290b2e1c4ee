"""The three parts of the demonstration, each of a few trainings, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_epp.contrib.demos.fidelity import compare
from megatron_epp.contrib.demos.quickstart import source_files
from megatron_epp.contrib.demos.quickstart.demo_setting import CAP_SHARE, Setting, cap_gb, known_costs
from megatron_epp.contrib.demos.rounds import Occupancy, OthersMeter, Rounds, turns
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.launch.runs import WARM_UP, RecordedRun, tiny_gpt
from megatron_epp.plan.errors import InfeasibleError
from megatron_epp.plan.plan import UNLIMITED_BYTES, Plan
from megatron_epp.plan.serialize import load
from megatron_epp.planner import Options, Problem, plan

PARITY_CONTEXT, FEW = 1024, 3
"""Context and iterations of trainings that compare losses only."""
WHOLE, ELASTIC = "1F1B, whole documents", "elastic plans"


@dataclass(frozen=True, slots=True)
class Parity:
    """Losses of stock Megatron, attention included, and of elastic plans, and the difference of gradients.

    Attributes:
        losses: of every iteration, stock and elastic.
        gradients: largest difference of a parameter's gradient in the first iteration, relative to its norm.
    """

    losses: tuple[tuple[float, float], ...]
    gradients: float


def parity_context(setting: Setting) -> int:
    """Return the longest document's tokens; stock attention keeps all scores, so longer ones would take gigabytes."""
    return min(PARITY_CONTEXT, setting.context)


def parity(setting: Setting) -> Parity:
    """Train a few iterations with stock Megatron and with elastic plans."""
    context = parity_context(setting)
    data = source_files.write(setting.folder / "documents", "parity", source_files.skewed(FEW * setting.batch, context))
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
class SkewedDocuments:
    """Both schedules on the skewed documents.

    Attributes:
        occupancy: of the machine during the rounds.
        cap_bytes: cap on activations.
    """

    whole: Schedule
    elastic: Schedule
    occupancy: Occupancy
    cap_bytes: int


def peak_of_whole(setting: Setting, data: str) -> int:
    """Train whole documents with Megatron's 1F1B once; return the measured peak of activations, in bytes."""
    flags: dict[str, Any] = {"epp_schedule": "whole", "epp_measure_memory": True}
    return max(setting.train("memory-of-whole-documents", data, WARM_UP + setting.iterations, **flags).peak_activation_bytes)


def skewed_documents(setting: Setting, data: str, costs: Path, peak_bytes: int) -> SkewedDocuments:
    """Train skewed documents in alternating rounds: whole with Megatron's 1F1B, and with elastic plans under the cap.

    Args:
        costs: file of `measured_costs`.
        peak_bytes: what `peak_of_whole` returns.
    """
    iterations = WARM_UP + setting.iterations
    whole: dict[str, Any] = {"epp_schedule": "whole"}
    elastic: dict[str, Any] = {"epp_costs": costs, "epp_memory_cap_gb": cap_gb(peak_bytes, known_costs(costs))}
    setting.train("whole-traced", data, iterations, epp_costs=costs, epp_planner="1f1b", **setting.every_iteration)
    traced = setting.train("elastic-traced", data, iterations, **elastic, **setting.every_iteration)
    runs: dict[str, list[RecordedRun]] = {WHOLE: [], ELASTIC: []}
    others = OthersMeter()
    for number, order in enumerate(turns((WHOLE, ELASTIC), setting.rounds), start=1):
        for name in order:
            folder, flags = ("elastic", elastic) if name == ELASTIC else ("whole", whole)
            with others.measured():
                runs[name].append(setting.train(f"{folder}-round-{number}", data, iterations, **flags))
    return SkewedDocuments(
        _schedule(setting, "whole-traced", runs[WHOLE], peak_bytes),
        _schedule(setting, "elastic-traced", runs[ELASTIC], max(traced.peak_activation_bytes)),
        others.occupancy(setting.num_ranks),
        int(CAP_SHARE * peak_bytes),
    )


def _schedule(setting: Setting, traced: str, runs: Sequence[RecordedRun], peak_bytes: int) -> Schedule:
    each = [compare(*run) for run in setting.traced(traced)]
    own_us = [comparison.undisturbed_us for comparison in each if comparison.undisturbed_us is not None]
    return Schedule(
        Rounds(tuple(run.tokens_per_second for run in runs)),
        peak_bytes,
        sum(comparison.planned_us for comparison in each),
        sum(own_us) if len(own_us) == len(each) else None,
        tuple(runs[0].losses),
    )


@dataclass(frozen=True, slots=True)
class LongDocument:
    """A document as long as the context among short ones, under a cap that whole documents exceed.

    Attributes:
        lengths: of the batch.
        plain_bytes: peak of whole documents without recompute, as planned.
        whole_bytes: measured peak of whole documents with every layer recomputed.
        elastic_bytes: measured peak of elastic plans.
        cap_bytes: cap on activations.
        needed_bytes: activations for which the planner of whole documents asks under the cap; None if it does not refuse.
        losses: of every iteration, whole and elastic.
        plan: of one iteration.
    """

    lengths: tuple[int, ...]
    plain_bytes: int
    whole_bytes: int
    elastic_bytes: int
    cap_bytes: int
    needed_bytes: int | None
    losses: tuple[tuple[float, float], ...]
    plan: Plan


def long_document(setting: Setting, costs: Path) -> LongDocument:
    """Train a long document among short ones: whole with every layer recomputed, with elastic plans under a lower cap."""
    lengths = source_files.one_long(setting.batch, setting.context)
    data = source_files.write(setting.folder / "documents", "long", lengths)
    layers = tiny_gpt()["num_layers"] // setting.num_ranks
    flags = {"epp_measure_memory": True}
    whole = setting.train("long-document-whole", data, FEW, epp_schedule="whole", epp_recompute=layers, **flags)
    peak, known = max(whole.peak_activation_bytes), known_costs(costs)
    cap = cap_gb(peak, known)
    elastic = setting.train("long-document-elastic", data, FEW, epp_costs=costs, epp_memory_cap_gb=cap, epp_trace=1, **flags)
    elastic_plan = load(setting.folder / "trainings" / "long-document-elastic" / "plan.json")
    plainly = plan(_problem(elastic_plan, UNLIMITED_BYTES), known, Options(planner="1f1b"))
    return LongDocument(
        lengths,
        _activation_bytes(plainly),
        peak,
        max(elastic.peak_activation_bytes),
        int(CAP_SHARE * peak),
        _needed_bytes(elastic_plan, known, int(cap * 2**30)),
        tuple(zip(whole.losses, elastic.losses, strict=True)),
        elastic_plan,
    )


def _needed_bytes(elastic_plan: Plan, costs: PipelineCosts, cap_bytes: int) -> int | None:
    """Return the bytes of activations of whole documents under the least cap that they fit; None if they fit this one."""
    try:
        plan(_problem(elastic_plan, cap_bytes), costs, Options(planner="1f1b"))
    except InfeasibleError as error:
        return _activation_bytes(plan(_problem(elastic_plan, error.least_cap_bytes), costs, Options(planner="1f1b")))
    return None


def _activation_bytes(elastic_plan: Plan) -> int:
    """Return the largest planned peak of activations of any rank."""
    return max(peak - static for peak, static in zip(elastic_plan.predicted.peak_bytes, elastic_plan.static_bytes, strict=True))


def _problem(elastic_plan: Plan, cap_bytes: int) -> Problem:
    return Problem(elastic_plan.lengths, elastic_plan.placement, (cap_bytes,) * elastic_plan.num_ranks)
