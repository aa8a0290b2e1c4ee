"""Public measurements of training next to plans with the same sizes and recompute: sixteen rows of several models and machines,
and one long sequence, for which `advise` also searches better sizes.

Nothing is fitted to them: they show how far times by formula are off, and in which part.

    python -m scripts.bench.public
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_epp.advice.configuration_search import Advice, advise
from megatron_epp.advice.question import Configuration, Question
from megatron_epp.cli.planning_flags import cap_of
from megatron_epp.cost.library import load_cluster
from megatron_epp.plan import Plan
from megatron_epp.planner import UNLIMITED_BYTES, Options, plan
from megatron_epp.report.text import table
from scripts.bench.public.rows import ROWS
from scripts.bench.public.steps import compared as planned_step
from scripts.bench.public.steps import rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A public measurement of one step of training one sequence, every layer recomputed.

    Attributes:
        name: of the run.
        source: where it was published.
        flags: Megatron's flags of the model.
        cluster: of the machine.
        devices: all of which share the sequence (CP).
        tokens: of the sequence.
        step_s: seconds of a step.
        memory_gb: of each device, in 10^9 bytes.
        remarks: what differs from plans, in words.
    """

    name: str
    source: str
    flags: dict[str, Any]
    cluster: str
    devices: int
    tokens: int
    step_s: float
    memory_gb: float
    remarks: str


QWEN3_8B: dict[str, Any] = {
    "num_layers": 36,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "group_query_attention": True,
    "num_query_groups": 8,
    "vocab_size": 151936,
    "untie_embeddings_and_output_weights": True,
    "swiglu": True,
    "bf16": True,
}
PUBLISHED = (
    Measured(
        name="Qwen3-8B, 1M tokens, TRL",
        source="Hugging Face TRL, pull request 6846",
        flags=QWEN3_8B,
        cluster="h100x8",
        devices=8,
        tokens=1 << 20,
        step_s=380.0,
        memory_gb=56.2,
        remarks="weights, gradients and optimizer divided over all devices (FSDP), layers' inputs offloaded, ring attention",
    ),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A measurement and a plan of the same training.

    Attributes:
        name: of the measurement.
        measured_s, planned_s: of a step; the plan's without the reduction of gradients.
        measured_gb, planned_gb: of the fullest device, in 10^9 bytes; the plan has no cap.
        attention_tflops: in attention, of each device, recompute included, in 10^12 operations.
        rest_s: what the plan takes for all but attention.
        recomputed: every layer of the plan is recomputed.
    """

    name: str
    measured_s: float
    planned_s: float
    measured_gb: float
    planned_gb: float
    attention_tflops: float
    rest_s: float
    recomputed: bool

    @property
    def measured_rate(self) -> float:
        """TFLOP/s in attention that the measurement implies, if all the rest takes as long as planned."""
        return self.attention_tflops / (self.measured_s - self.rest_s)

    @property
    def planned_rate(self) -> float:
        """TFLOP/s in attention of the plan, forward and backward."""
        return self.attention_tflops / (self.planned_s - self.rest_s)


def question_of(measured: Measured) -> Question:
    """Return the question of which parallel sizes are best for the measured batch on the measured devices."""
    cluster = load_cluster(measured.cluster)
    options = Options(context=measured.tokens)
    return Question(
        measured.flags, cluster, measured.devices, cap_of(None, cluster), (measured.tokens,), measured.tokens, options=options
    )


def _config(measured: Measured) -> Configuration:
    return Configuration(1, measured.devices, 1, 1, layers=(int(measured.flags["num_layers"]),))


def planned(measured: Measured) -> Plan:
    """Plan the measured batch with the measured sizes, every layer recomputed, without a memory cap."""
    asked, layers = question_of(measured), int(measured.flags["num_layers"])
    config = _config(measured)
    problem = replace(asked.problem(config, asked.lengths), cap_bytes=(UNLIMITED_BYTES,))
    return plan(problem, asked.costs(config), replace(asked.options, recompute=layers))


def compared(measured: Measured) -> Compared:
    """Compare a measurement with its plan."""
    plan, layers = planned(measured), int(measured.flags["num_layers"])
    pairs = measured.tokens * (measured.tokens + 1) / 2 / measured.devices
    width = int(measured.flags["num_attention_heads"]) * int(measured.flags["kv_channels"])
    forward, backward = 4 * width * pairs * layers, 10 * width * pairs * layers
    layer = question_of(measured).profile(_config(measured)).layer
    us_per_pair = 2 * layer.forward.per_pair_us + layer.backward.per_pair_us
    attention_s = us_per_pair * pairs * measured.devices * layers / 1e6
    planned_s = plan.predicted.makespan_us / 1e6
    return Compared(
        name=measured.name,
        measured_s=measured.step_s,
        planned_s=planned_s,
        measured_gb=measured.memory_gb,
        planned_gb=max(plan.predicted.peak_bytes) / 1e9,
        attention_tflops=(2 * forward + backward) / 1e12,
        rest_s=planned_s - attention_s,
        recomputed=all(recompute.num_layers == layers for row in plan.recompute for recompute in row),
    )


def lines(measured: Measured, result: Compared, advice: Advice | None) -> Iterator[str]:
    """Yield a table, and what the difference comes from.

    Args:
        advice: for its batch and devices; None leaves the row out.
    """
    rows = [
        [f"measured ({measured.source})", f"CP {measured.devices}", f"{measured.step_s:.0f} s", f"{measured.memory_gb:.1f} GB"],
        [
            "planned, every layer recomputed",
            f"CP {measured.devices}",
            f"{result.planned_s:.0f} s",
            f"{result.planned_gb:.1f} GB",
        ],
    ]
    if advice is not None:
        best = advice.best[0]
        offload = ", offload" * advice.question.options.offload
        step, peak = f"{best.parts.step_us / 1e6:.0f} s", f"{best.peak_bytes / 1e9:.1f} GB"
        rows.append(["best that advise finds", f"{best.config.name}{offload}", step, peak])
    yield from table((measured.name, "sizes", "step", "fullest device"), rows, left=(0, 1))
    yield ""
    yield (
        f"Attention is {result.attention_tflops / 1e3:,.0f} PFLOP of each device. If the rest takes the {result.rest_s:.0f} s "
        f"that are planned for it, it ran at {result.measured_rate:.0f} TFLOP/s, and the plan has {result.planned_rate:.0f}."
    )
    yield f"In the measured run: {measured.remarks}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-advice", action="store_true", help="leave out the search for the best sizes")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args()
    steps = [planned_step(row) for row in ROWS]
    if args.json:
        for step in steps:
            figures = {"planned_s": step.planned_s, "again_s": step.again_s, "error": step.error}
            print(json.dumps({"row": step.row.number, "name": step.row.name, "measured_s": step.row.measured_s} | figures))
    else:
        print("\n".join((*rows_of(steps), "")))
    for measured in PUBLISHED:
        result = compared(measured)
        if args.json:
            print(json.dumps(asdict(result) | {"measured_rate": result.measured_rate, "planned_rate": result.planned_rate}))
            continue
        options = Options(context=measured.tokens, offload=True)
        advice = None if args.no_advice else advise(replace(question_of(measured), options=options))
        print("\n".join(lines(measured, result, advice)))
