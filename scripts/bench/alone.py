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
speed, the reduction of gradients, the optimizer's step, whose states are counted, not allocated.
"""

from __future__ import annotations

import gc
import logging
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.data.sequence_lengths import wikipedia
from megatron_epp.plan import Action, EppError, Plan
from megatron_epp.plan.document import digest
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.operations import is_compute
from megatron_epp.plan.plan import Step
from megatron_epp.plan.serialize import load, save
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.sizing import loss_block_tokens
from megatron_epp.plan.units import format_bytes
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.tools.formulas import analytic_profile, on_device
from megatron_epp.tools.formulas.library import balanced_layers, load_cluster, load_costs, load_flags, shape_of
from megatron_epp.tools.report.text import format_us
from scripts.bench.alone_rank import STATE_BYTES, Model, Ran, one_rank, run
from scripts.bench.frame import RUNS, Bench, Figures, numbers
from scripts.tables import table

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


def replayed_us(plan: Plan, measured: Measured) -> float:
    """Return the makespan of a plan when every action takes the time that it took: without messages and the host's time."""
    events = {event.action: event for row in measured.ranks for event in row if is_compute(event.action.op)}

    def took_us(step: Step) -> float:  # two actions that take turns overlap
        times = [events[action] for action in step.actions]
        span_us = max(event.end_us for event in times) - min(event.start_us for event in times)
        return min(sum(event.took_us for event in times), span_us)

    ranks = tuple(tuple(step._replace(time_us=took_us(step)) for step in steps) for steps in plan.ranks)
    return simulate(replace(plan, ranks=ranks)).makespan_us


def figures_of(plan: Plan, ranks: Sequence[Ran]) -> Figures:
    """Put the times of all ranks on a plan's dependencies: makespans, tokens per second by measured times, and peaks."""
    measured = Measured.of(digest(plan), [rank.events for rank in ranks])
    measured_us = replayed_us(plan, measured)
    return {
        "planned_us": simulate(plan).makespan_us,
        "measured_us": measured_us,
        "tokens_per_second": 1e6 * plan.num_tokens / measured_us,
        "planned_bytes": max(plan.predicted.peak_bytes),
        "measured_bytes": max(rank.peak_bytes for rank in ranks),
    }


def planned(args: Namespace, way: str, model: Model, costs: PipelineCosts, problem: Problem, end_s: float) -> Figures:
    """Plan a batch in one way, and run the plan."""
    options = WAYS[way]
    if not isinstance(options.recompute, str):
        options = replace(options, recompute=max(costs.num_layers))
    try:
        plan_of_way = plan(problem, costs, options)
    except EppError as error:
        return {"reason": str(error).partition("\n")[0]}
    name = way.replace(", ", "-").replace(" ", "-")
    save(plan_of_way, args.output / f"plan-{name}.json")
    with one_rank():
        measured = [*ran(plan_of_way, model, end_s)]
    if len(measured) < plan_of_way.num_ranks:
        return {"reason": f"{len(measured)} of {plan_of_way.num_ranks} ranks have run within {args.seconds:g} s"}
    Measured.of(digest(plan_of_way), [rank.events for rank in measured]).save(args.output / f"measured-{name}.json")
    return figures_of(plan_of_way, measured)


def as_trained(args: Namespace, model: Model) -> Figures:
    """Run the plan of a training's iteration, for its makespan by itself next to that of the training."""
    trained_plan = load(args.plan)
    with one_rank():
        figures = figures_of(trained_plan, [*ran(trained_plan, model)])
    return figures | {"in_training_us": Measured.load(args.measured).makespan_us, "alone_us": figures["measured_us"]}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format the plans."""
    cells, said = [], []
    for row in rows:
        if "planned_us" not in row:
            cells.append([row["case"], *[""] * 5, row["reason"]])
            continue
        times, peaks = ([row[f"{when}_{what}"] for when in ("planned", "measured")] for what in ("us", "bytes"))
        speed = f"{row['tokens_per_second']:,.0f}"
        cells.append([row["case"], *map(format_us, times), speed, *map(format_bytes, peaks), ""])
        if "alone_us" in row:
            ratio = row["alone_us"] / row["in_training_us"]
            said.append(f"makespan in training {format_us(row['in_training_us'])}, by times of ranks alone {ratio:.3f} of it")
    head = ("plans by", "makespan planned", "by measured times", "tokens/s", "peak planned", "peak measured", "")
    return "\n\n".join([table(head, cells), *said])


def cases(args: Namespace) -> dict[str, Callable[[], Figures]]:
    from megatron_epp.mcore import entry

    entry.prepare()  # before Megatron is imported: its functions as training has them, on a CPU too
    import torch

    logging.disable(logging.WARNING)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.zeros(1, device=device)  # CUDA is initialised, which the runtime asks for
    flags = load_flags("tiny-gpt" if args.reduced else args.model)
    flags["ffn_hidden_size"] = shape_of(flags).ffn_hidden_size  # where the model's file leaves it to Megatron's arguments
    dtype = torch.bfloat16 if on_gpu or not args.plan else torch.float32
    model = Model(flags, args.layers == "te", 0, device, dtype)
    if args.plan:
        return {args.plan.name: partial(as_trained, args, model)}
    lengths = args.lengths or (600, 300, 90, 40)
    if not (args.lengths or args.reduced):
        lengths = (16384, 12000, *(min(int(length), 16384) for length in wikipedia(218, 0)))
    stages, cap_bytes = (4, 1 << 50) if args.reduced else (args.stages, int(args.cap_gb * 2**30))
    model = replace(model, loss_block_tokens=loss_block_tokens(AUTO, flags["vocab_size"], max(lengths)))
    problem = Problem(lengths, tuple(range(stages)), (cap_bytes,) * stages)
    costs = _costs(args, model, problem)
    print(f"{len(lengths):,} sequences, {sum(lengths):,} tokens, {stages} stages, cap {format_bytes(cap_bytes)}", flush=True)
    shared, ways = (model, costs, problem, time.monotonic() + args.seconds), args.ways or (REDUCED if args.reduced else WAYS)
    return {way: partial(planned, args, way, *shared) for way in ways}


def _costs(args: Namespace, model: Model, problem: Problem) -> PipelineCosts:
    flags = {**model.flags, "bf16": True, "seq_length": max(problem.lengths)}
    shape = replace(shape_of(flags), loss_block_tokens=model.loss_block_tokens)
    profile = load_costs(args.costs) if args.costs else analytic_profile(shape, load_cluster("h100x8").rates)
    layers = balanced_layers(profile, shape.num_layers, problem.num_stages, [problem])
    costs = profile.costs(layers, state_bytes_per_parameter=STATE_BYTES)
    return on_device(costs) if model.device.type == "cuda" else costs  # on a CPU kept tensors are counted alone


BENCH = Bench(
    about=__doc__,
    cases=cases,
    row=lambda args, case: case(),
    text=text,
    flags={
        "model": {"default": "llama3-8b", "help": "a shipped model (default: llama3-8b)"},
        "stages": {"type": int, "default": 8},
        "cap-gb": {"type": float, "default": 36.0, "help": "device memory of a rank (default: 36)"},
        "lengths": {"type": numbers, "help": "of the batch, with commas (default: 220, of up to 16,384 tokens)"},
        "ways": {"nargs": "+", "choices": WAYS, "help": "plans (default: all)"},
        "layers": {"choices": ["local", "te"], "default": "local", "help": "whose (default: Megatron's local ones)"},
        "costs": {"help": "a profile of `megatron-epp profile` (default: formulas for H100s)"},
        "seconds": {"type": float, "default": 1e9, "help": "begin no further rank after so long"},
        "plan": {"type": Path, "help": "run this plan of a training instead"},
        "measured": {"type": Path, "help": "what it took there"},
    },
    reduced="a tiny model on four stages, three plans",
    folder=RUNS / "bench_alone",
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
