"""Measured steps of several models and machines, planned with their sizes and recompute: how far times by formula are off.

Nothing is fitted to them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import Plan
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.tools.advice.question import Configuration, Question
from megatron_epp.tools.formulas import ModelShape, Rates
from megatron_epp.tools.formulas.analytic import MICROSECONDS, exchange_line
from megatron_epp.tools.formulas.library import load_cluster
from megatron_epp.tools.report.text import table
from scripts.bench.frame import Bench, Figures
from scripts.bench.public.rows import ACTIVATION, EXPERTS, NORMS, ROWS, UP, Row

SLOW_HOST_US = 1080.0, 1480.0
"""Upper end of the time in which a host launches a dense layer's forward and backward (`H100_NODE` says of what)."""
CLOSE, LARGE = 0.1, 0.2
"""Errors of plans: of close ones, and of those of which the table says what a slice lacks."""


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step and its plan.

    Attributes:
        row: as it was measured.
        planned_s: by the plan.
        again_s: of it, recompute on a rank.
        reduction_s: that reducing gradients and gathering weights takes, which recipes overlap and the plan leaves out.
        optimizer_s: that the optimizer needs to read and write its states, which the plan leaves out.
        slow_host_s: of a step with a host that takes `SLOW_HOST_US`, where the plan is far off.
    """

    row: Row
    planned_s: float
    again_s: float
    reduction_s: float
    optimizer_s: float
    slow_host_s: float | None

    @property
    def rest_ms(self) -> float:
        """Time that a chunk takes longer than planned, forward and backward on a stage; the pipeline's ends count as chunks."""
        row = self.row
        chunks = max(1, row.slices) * row.sequences // (row.config.data * row.per_chunk)
        return 1e3 * (row.measured_s - self.planned_s) / (row.config.virtual * chunks + row.config.pipeline - 1)

    @property
    def error(self) -> float:
        return self.planned_s / self.row.measured_s - 1


def question_of(row: Row) -> Question:
    """Return the question of which the row's sizes are one answer, with the row's dispatcher."""
    flags = row.flags | {"epp_loss_block_tokens": 0}
    if row.dispatcher != "alltoall":
        flags |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": row.dispatcher}
    lengths = (row.tokens,) * (row.sequences // row.config.data)
    cluster = load_cluster(row.cluster)
    return Question(flags, cluster, row.config.devices, UNLIMITED_BYTES, lengths, row.tokens * row.per_chunk)


def again_line(row: Row, shape: ModelShape, rates: Rates) -> LinearTime:
    """Time of the parts of a layer that run again in its backward."""
    flops, num_bytes, line = 0.0, 0.0, LinearTime()
    if NORMS in row.again:
        num_bytes += 4 * shape.hidden_bytes_per_token
    if ACTIVATION in row.again:
        num_bytes += 3 * shape.ffn_hidden_size * shape.experts_per_token * shape.bytes_per_value / shape.ranks
    if EXPERTS in row.again:
        flops += 2 * shape.mlp_parameters_per_token / shape.ranks
        num_bytes += 2 * shape.mlp_bytes_per_token
        line += exchange_line(shape.mlp_exchanges, rates)
    if UP in row.again:
        queries = (shape.query_rank or 0) * shape.query_width
        flops += 2 * (shape.expansion_parameters + queries) / shape.ranks
        num_bytes += (shape.query_width + shape.kv_bytes_per_token) / shape.ranks
    return line + LinearTime(0.0, MICROSECONDS * (flops / rates.linear_flops + num_bytes / rates.memory_bytes))


def compared(row: Row) -> Step:
    """Plan a measured step: the same sizes and schedule, no cap, every layer recomputing what the recipe says."""
    asked, config = question_of(row), row.config
    shape, rates = asked.shape(config), asked.rates
    again, costs = again_line(row, shape, rates), asked.costs(config)
    planned_s = planned(row, asked, again).predicted.makespan_us / MICROSECONDS
    layers, states = [0.0] * config.pipeline, [0.0] * config.pipeline
    for rank, count, stage in zip(config.rank_of, config.layers, costs.stages, strict=True):
        layers[rank] += count
        states[rank] += 2 * stage.static.optimizer + stage.static.gradients + stage.static.weights
    return Step(
        row=row,
        planned_s=planned_s,
        again_s=again.time_us(sum(asked.lengths) * max(layers), 0) / MICROSECONDS,
        reduction_s=asked.reduction_us(config) / MICROSECONDS,
        optimizer_s=max(states) / rates.memory_bytes,
        slow_host_s=_with_slow_host(row, asked, again) if abs(planned_s / row.measured_s - 1) > LARGE else None,
    )


def planned(row: Row, asked: Question, again: LinearTime) -> Plan:
    """Plan a measured step without a memory cap, in Megatron's order; microbatches are not larger than in the measured run."""
    config, costs = row.config, asked.costs(row.config)
    planner = "1f1b-sliced" if row.slices > 1 else "1f1b-packed"
    limit = None if row.slices > 1 else asked.context
    options = Options(planner=planner, context=asked.context, recompute=0, slices=row.slices or None, chunk_tokens=limit)
    problem = Problem(asked.lengths, config.rank_of, (UNLIMITED_BYTES,) * config.pipeline, token_multiple=config.ranks)
    return plan(problem, _recomputing(costs, again), options)


def _with_slow_host(row: Row, asked: Question, again: LinearTime) -> float:
    rates = replace(asked.cluster.rates, launch_forward_us=SLOW_HOST_US[0], launch_backward_us=SLOW_HOST_US[1])
    slow = replace(asked, cluster=replace(asked.cluster, rates=rates))
    return planned(row, slow, again).predicted.makespan_us / MICROSECONDS


def _recomputing(costs: PipelineCosts, again: LinearTime) -> PipelineCosts:
    """Costs whose layers' backwards take longer by what runs again."""
    stages = (stage.changed(LAYER, backward=stage.layers.backward + again) for stage in costs.stages)
    return replace(costs, stages=tuple(stages))


def rows_of(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a table of measured and planned steps, and the errors' median and largest."""
    header = ("", "model, sizes, sequences x tokens", "measured", "planned", "off", "recomputed", "not in the plan")
    lines = []
    for step in steps:
        row = step.row
        left_out = [
            f"optimizer {step.optimizer_s * 1e3:.0f} ms, reduction {step.reduction_s * 1e3:.0f} ms where nothing hides it"
        ]
        if step.slow_host_s is not None:
            left_out.append(f"{step.slow_host_s:.2f} s with a slow host")
            left_out.append(f"measured above the plan: {step.rest_ms:.1f} ms of each chunk on a stage")
        lines.append(
            [
                row.number,
                f"{row.name}, {sizes_of(row.config)}, {row.sequences:,} x {row.tokens:,}",
                f"{row.measured_s:.2f} s",
                f"{step.planned_s:.2f} s",
                f"{step.error:+.0%}",
                f"{', '.join(row.again)}: {step.again_s:.2f} s" if row.again else "",
                "; ".join([*left_out, *([row.left_out] if row.left_out else [])]),
            ]
        )
    yield from table(header, lines, left=(0, 1, 5, 6))
    errors = [abs(step.error) for step in steps]
    close = sum(error <= CLOSE for error in errors)
    yield f"Median error {median(errors):.1%}, largest {max(errors):.0%}, {close} of {len(errors)} within {CLOSE:.0%}."


def sizes_of(config: Configuration) -> str:
    """Parallel sizes above 1."""
    names = {"TP": config.tensor, "CP": config.context, "PP": config.pipeline, "VPP": config.virtual, "DP": config.data}
    return " ".join(f"{name} {size}" for name, size in (names | {"EP": config.expert}).items() if size > 1)


def row(args: Namespace, measured: Row) -> Figures:
    step = compared(measured)
    return {field.name: getattr(step, field.name) for field in fields(step) if field.name != "row"} | {"error": step.error}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    measured = {row.number: row for row in ROWS}
    names = [field.name for field in fields(Step) if field.name != "row"]
    return "\n".join(rows_of([Step(measured[row["case"]], **{name: row[name] for name in names}) for row in rows]))


BENCH = Bench(about=__doc__, cases=lambda args: {row.number: row for row in ROWS}, row=row, text=text, takes_jobs=True)
