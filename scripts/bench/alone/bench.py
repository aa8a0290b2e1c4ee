"""Makespans of plans of many stages, measured on one GPU: every rank's part of a plan runs there by itself.

    python -m scripts.bench.alone                              an 8B model on 8 stages, six ways to plan under one cap
    python -m scripts.bench.alone --layers te --costs FILE     with Transformer Engine's layers, planned with measured costs
    python -m scripts.bench.alone --reduced                    a tiny model on 4 stages, on a CPU too
    python -m scripts.bench.alone --plan plan-3.json --measured measured-3.json --model tiny-gpt
                                                               a plan that a training has run, next to what it took there

Each rank in turn builds its stages as training does, runs its actions by the executor of training until memory has been met and
kernels chosen, once more to be timed, and is gone. Its messages are made up or dropped, so every action's time is its own;
the peak is that of torch's allocator. Measured times are then put on the plan's dependencies; messages and copies take their
planned times there. Not in it: links that are slower than planned, communication kernels that overlap compute, ranks of unlike
speed, the reduction of gradients, the optimizer's step. Its states are counted, not allocated. The result is a makespan by
measured times, not a measured training.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_epp.contrib.demos.fidelity import Comparison, compare
from megatron_epp.cost import PipelineCosts, analytic_profile, on_device
from megatron_epp.cost.library import balanced_layers, load_cluster, load_costs, load_flags, shape_of
from megatron_epp.cost.output_layer import AUTO, loss_block_tokens
from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.plan import Action, EppError, Plan, load, save
from megatron_epp.plan.operations import is_compute
from megatron_epp.plan.units import format_bytes
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.report.measured import Measured
from megatron_epp.report.text import format_us, table
from scripts.bench.alone.rank import STATE_BYTES, Model, Ran, one_rank, run

FOLDER = Path(__file__).resolve().parents[3] / "runs" / "bench_alone"
HOST_BYTES = 64 << 30
WAYS = {
    "elastic": Options(),
    "1F1B, packed, all recomputed": Options(planner="1f1b-packed", recompute=1 << 10),
    "Seq1F1B": Options(planner="seq1f1b"),
    "1F1B, packed": Options(planner="1f1b-packed"),
    "elastic, offload": Options(offload=True),
    "elastic, weights apart": Options(split_weight=True),
}
"""The most telling first: time may end before the last."""
REDUCED = ("elastic", "elastic, weights apart", "1F1B, packed, all recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan.

    Attributes:
        way: key of `WAYS`, or the plan's file.
        reason: why there are no figures; empty where there are.
        planned_us, measured_us: makespans, as planned and by measured times.
        tokens_per_second: by measured times.
        planned_bytes, measured_bytes: largest peak of a rank.
        kinds: by kind of action, its number, and microseconds planned and measured.
    """

    way: str
    reason: str = ""
    planned_us: float = 0.0
    measured_us: float = 0.0
    tokens_per_second: float = 0.0
    planned_bytes: int = 0
    measured_bytes: int = 0
    kinds: dict[str, tuple[int, float, float]] | None = None


def ran(plan: Plan, model: Model, end_s: float = float("inf")) -> Iterator[Ran]:
    """Run every rank of a plan by itself, none later than a time of `time.monotonic`, and print a line for each."""
    import torch

    for rank in range(plan.num_ranks):
        if time.monotonic() > end_s:
            return
        measured = run(plan, rank, model, HOST_BYTES if any(plan.copies) or plan.kv_offload else 0)
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        busy_us = sum(end - start for text, start, end, _ in measured.events if is_compute(Action.parse(text).op))
        peaks = map(format_bytes, (plan.predicted.peak_bytes[rank], measured.peak_bytes))
        print(f"rank {rank}: {format_us(busy_us)} of compute; peak {' planned, '.join(peaks)} measured", flush=True)
        yield measured


def row_of(way: str, plan: Plan, ranks: Sequence[Ran]) -> tuple[Row, Comparison]:
    """Put the times of all ranks on a plan's dependencies."""
    compared = compare(plan, Measured.of(plan, [rank.events for rank in ranks]))
    row = Row(
        way=way,
        planned_us=compared.planned_us,
        measured_us=compared.replayed_us,
        tokens_per_second=1e6 * plan.num_tokens / compared.replayed_us,
        planned_bytes=max(plan.predicted.peak_bytes),
        measured_bytes=max(rank.peak_bytes for rank in ranks),
        kinds={kind: (took.count, took.planned_us, took.measured_us) for kind, took in compared.kinds.items()},
    )
    return row, compared


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the table of plans, and under it planned and measured times by kind of action."""
    head = ("plans by", "makespan planned", "by measured times", "tokens/s", "peak planned", "peak measured", "")
    cells = [[row.way, *[""] * 5, row.reason] if row.reason else _cells(row) for row in rows]
    kinds = [
        [row.way, kind, f"{count:,}", format_us(planned_us), format_us(measured_us), f"{planned_us / measured_us - 1:+.1%}"]
        for row in rows
        for kind, (count, planned_us, measured_us) in (row.kinds or {}).items()
    ]
    by_kind = ("plans by", "kind of action", "number", "planned", "measured", "planned is")
    return [*table(head, cells, left=(0, 6)), "", *table(by_kind, kinds, left=(0, 1))]


def _cells(row: Row) -> list[str]:
    times, peaks = map(format_us, (row.planned_us, row.measured_us)), map(format_bytes, (row.planned_bytes, row.measured_bytes))
    return [row.way, *times, f"{row.tokens_per_second:,.0f}", *peaks, ""]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    from megatron_epp.mcore import entry

    entry.prepare()  # before Megatron is imported: its functions as training has them, on a CPU too
    import torch

    logging.disable(logging.WARNING)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.zeros(1, device=device)  # CUDA is initialised, which the runtime asks for
    flags = load_flags("tiny-gpt" if args.reduced else args.model)
    flags["ffn_hidden_size"] = shape_of(flags).ffn_hidden_size  # where the model's file leaves it to Megatron's arguments
    model = Model(flags, args.layers == "te", 0, device, torch.bfloat16 if on_gpu or not args.plan else torch.float32)
    args.output.mkdir(parents=True, exist_ok=True)
    with one_rank():
        if args.plan:
            return _as_trained(args, model)
        rows, end_s = [], time.monotonic() + args.seconds
        for row in _planned(args, model, end_s):
            rows.append(row)
            (args.output / "report.json").write_text(json.dumps({"rows": [_as_json(row) for row in rows]}, indent=1) + "\n")
    print("\n".join(lines_of(rows)))
    return 0


def _planned(args: argparse.Namespace, model: Model, end_s: float) -> Iterator[Row]:
    """Plan a batch in every way that is asked for, and run the plans. Yields a row for each."""
    lengths = args.lengths or _lengths(args.reduced)
    stages, cap_bytes = (4, 1 << 50) if args.reduced else (args.stages, int(args.cap_gb * 2**30))
    block_tokens = loss_block_tokens(AUTO, model.flags["vocab_size"], max(lengths))
    costs = _costs(args, model, lengths, stages, block_tokens)
    problem = Problem(lengths, tuple(range(stages)), (cap_bytes,) * stages)
    print(f"{len(lengths):,} sequences, {sum(lengths):,} tokens, {stages} stages, cap {format_bytes(cap_bytes)}", flush=True)
    for way in args.ways or (REDUCED if args.reduced else WAYS):
        options = WAYS[way]
        if not isinstance(options.recompute, str):
            options = replace(options, recompute=max(costs.num_layers))
        try:
            plan_of_way = plan(problem, costs, options)
        except EppError as error:
            yield Row(way=way, reason=str(error).partition("\n")[0])
            continue
        name = way.replace(", ", "-").replace(" ", "-")
        save(plan_of_way, args.output / f"plan-{name}.json")
        print(way, flush=True)
        measured = [*ran(plan_of_way, replace(model, loss_block_tokens=block_tokens), end_s)]
        if len(measured) < stages:
            yield Row(way=way, reason=f"{len(measured)} of {stages} ranks have run within {args.seconds:g} s")
            continue
        Measured.of(plan_of_way, [rank.events for rank in measured]).save(args.output / f"measured-{name}.json")
        yield row_of(way, plan_of_way, measured)[0]


def _as_trained(args: argparse.Namespace, model: Model) -> int:
    """Run the plan of a training's iteration, and print its makespan by itself next to that of the training."""
    trained_plan, there = load(args.plan), Measured.load(args.measured)
    row, alone = row_of(args.plan.name, trained_plan, [*ran(trained_plan, model)])
    in_training = compare(trained_plan, there)
    print("\n".join(lines_of([row])))
    ratio = alone.replayed_us / in_training.measured_us
    print(f"makespan in training {format_us(in_training.measured_us)}, by times of ranks alone {ratio:.3f} of it")
    makespans = {
        "in_training_us": in_training.measured_us,
        "replayed_us": in_training.replayed_us,
        "alone_us": alone.replayed_us,
    }
    report = _as_json(row) | makespans
    (args.output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _lengths(reduced: bool) -> tuple[int, ...]:
    return (600, 300, 90, 40) if reduced else (16384, 12000, *(min(int(length), 16384) for length in wikipedia(218, 0)))


def _costs(args: argparse.Namespace, model: Model, lengths: Sequence[int], stages: int, block_tokens: int) -> PipelineCosts:
    shape = replace(shape_of({**model.flags, "bf16": True, "seq_length": max(lengths)}), loss_block_tokens=block_tokens)
    profile = load_costs(args.costs) if args.costs else analytic_profile(shape, load_cluster("h100x8").rates)
    layers = balanced_layers(profile, shape.num_layers, stages, lengths)
    costs = profile.costs(layers, state_bytes_per_parameter=STATE_BYTES)
    return on_device(costs) if model.device.type == "cuda" else costs  # on a CPU kept tensors are counted alone


def _as_json(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


def _parser() -> argparse.ArgumentParser:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.alone", description=__doc__, formatter_class=about)
    parser.add_argument("--model", default="llama3-8b", help="a shipped model (default: llama3-8b)")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--cap-gb", type=float, default=36.0, help="device memory of a rank (default: 36)")
    lengths = lambda text: tuple(map(int, text.split(",")))  # noqa: E731
    parser.add_argument("--lengths", type=lengths, help="of the batch, with commas (default: 220, of up to 16,384 tokens)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="plans (default: all)")
    parser.add_argument("--layers", choices=["local", "te"], default="local", help="whose (default: Megatron's local ones)")
    parser.add_argument("--costs", help="a profile of `megatron-epp profile` (default: formulas for H100s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further rank after so long")
    parser.add_argument("--plan", type=Path, help="run this plan of a training instead")
    parser.add_argument("--measured", type=Path, help="what it took there")
    parser.add_argument("--reduced", action="store_true", help="a tiny model on four stages, three plans")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, help=f"folder for the report (default: {FOLDER})")
    return parser
