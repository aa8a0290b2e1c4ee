"""Steps without a training: software, links and queues, and plans against Megatron's own schedule at the user's sizes."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import asdict, replace
from pkgutil import resolve_name

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import brief_text
from megatron_epp.plan.units import format_bytes, format_gib
from megatron_epp.planner import Options
from megatron_epp.tools.advice.causes import Stock
from megatron_epp.tools.advice.judge import Judged, choices_of, exactly, shares_by_work
from megatron_epp.tools.advice.question import COUNTED_FOR_EACH, Configuration, Question
from megatron_epp.tools.cli.doctor import PROBLEM, WARNING, look
from megatron_epp.tools.cli.doctor import text as doctor_text
from megatron_epp.tools.cli.first_run.launch import PASSED, SKIPPED, Outcome, Setting, StockLaunch
from megatron_epp.tools.cli.lengths import PARENTS, limited, of_parents, read_lengths
from megatron_epp.tools.cli.planning_flags import cap_of
from megatron_epp.tools.cli.terminal import progress
from megatron_epp.tools.report.text import format_us, table

_NOTICED = 1.03  # smallest gain that is not called a tie
_NOT_SUBTRACTED = "what the flags below, which plans refuse, are worth to you; the 1F1B of the table has none of them either"


def doctor(setting: Setting) -> Outcome:
    findings = list(look())
    failed = [finding for finding in findings if finding.status == PROBLEM]
    odd = failed + [finding for finding in findings if finding.status == WARNING]
    lines = doctor_text(odd or findings).split("\n")[:-2]
    lines.append(f"{len(findings)} subjects looked at; `megatron-epp doctor` lists all")
    todo = f"{failed[0].subject}: {failed[0].todo or 'see above'}" if failed else ""
    return Outcome.judged(not failed, lines, todo, {"findings": [*map(asdict, findings)]})


def links(setting: Setting) -> Outcome:
    """Send messages of several sizes between two ranks, and run whole plans over all ranks, also next to collectives."""
    if setting.num_gpus == 1:
        return Outcome(SKIPPED, ("one GPU: no messages to send",), "run it again on a node with two GPUs or more")
    from megatron_epp.runtime.links.processes import measure_link
    from megatron_epp.tools.machine.queue_check import check_queues, queue_plans

    gpus, ranks = bool(setting.num_gpus), setting.num_gpus or 4
    width, limit_s = (16384, 60.0) if gpus else (64, 30.0)  # fp32 values of a token: the largest message has 60 MB with GPUs
    how = width, gpus, limit_s  # a message without progress for so long is stuck
    with progress("sending messages"):
        points = measure_link(gpus)
    with progress("running plans"):
        runs = check_queues(queue_plans(ranks), *how)
        if ranks >= 4 and ranks % 2 == 0:  # two pipelines side by side, of at least two ranks each
            again = check_queues(queue_plans(ranks // 2), *how, pipelines=2)
            runs += [replace(run, name=f"{run.name}, 2 ranks a stage") for run in again]
    rows = [[format_bytes(size), format_us(time_us), f"{size / time_us / 1e3:.2f}"] for size, _, time_us in points]
    ran = [[timed.name, str(timed.num_messages), format_bytes(timed.message_bytes), format_us(timed.time_us)] for timed in runs]
    wrong = [timed for timed in runs if timed.num_wrong]
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    lines = [
        *table(("message", "time", "GB/s"), rows),
        "",
        f"plans over {ranks} ranks ({'NCCL' if gpus else 'gloo'}, CUDA_DEVICE_MAX_CONNECTIONS {queues}):",
        *table(("plan", "messages", "largest", "time"), ran),
        f"{sum(timed.num_wrong for timed in runs)} values arrived other than they were sent",
    ]
    todo = f"messages are mixed up ({', '.join(timed.name for timed in wrong)}): send this report, and do not train"
    figures = {"messages": [point._asdict() for point in points], "plans": [*map(asdict, runs)]}
    return Outcome.judged(not wrong, lines, todo, figures)


def question_of(setting: Setting) -> tuple[Question, str]:
    """Return the user's batch at their sizes, and why parents of its lengths are left out; empty if they are not."""
    launch, source = setting.launch, setting.lengths_from
    size = int(launch.flags.get("global_batch_size") or 1)
    read = limited(read_lengths(source, size), argparse.Namespace(context=launch.context, documents="split"), source)
    flags = launch.flags | {"attention_dropout": 0.0}  # as the changed command has it
    (batch,), note = resolve_name(f"{PARENTS}as_trained")([of_parents("part", read, 0, size)], flags)
    asked = launch.devices, cap_of(None, setting.cluster), batch.lengths, launch.context
    options = Options(context=launch.context)
    return Question(launch.flags, setting.cluster, *asked, options=options, borrowed=batch.borrowed), note


def configuration_of(question: Question, launch: StockLaunch) -> Configuration:
    flags = launch.flags
    names = "tensor_model", "context", "pipeline_model", "expert_model"
    tensor, context, pipeline, expert = (int(flags.get(f"{name}_parallel_size") or 1) for name in names)
    data = max(1, launch.devices // (tensor * context * pipeline))
    sharing = int(flags.get("expert_tensor_parallel_size") or tensor)
    config = Configuration(tensor, context, pipeline, data, expert, sharing if flags.get("num_experts") else 1)
    return replace(config, layers=question.even_layers(config))


def gain(setting: Setting) -> Outcome:
    """Plan the user's lengths, compare, and end with the lines to change. Raises `InfeasibleError` if no plan fits."""
    question, note = question_of(setting)
    config = configuration_of(question, setting.launch)
    with progress("planning"):
        *_, stock = choices_of(question, config, shares_by_work(question, config)).steps(even_only=True)
        elastic = exactly(question, config)
    speedup = math.inf if stock is None else stock.step_us / elastic.parts.step_us
    refused = refusals(setting.launch)
    even = ", a tie: these lengths are even enough for 1F1B" if speedup < _NOTICED else ""
    said = f"gain: {speedup:.2f}x at your sizes{even}; `megatron-epp advise` tries others"
    said = "your sizes do not fit with Megatron's own schedule; with plans they do" if stock is None else said
    lines = [
        f"{len(question.lengths):,} sequences of {brief_text(setting.lengths_from)}, {question.tokens_text}, the longest "
        f"{max(question.lengths):,}; {config.name}; costs by formula for {setting.cluster.name}",
        *[note] * bool(note),
        *_rows(question, stock, elastic),
        *[COUNTED_FOR_EACH] * bool(question.borrowed),
        said,
        *[f"not subtracted: {_NOT_SUBTRACTED}"] * bool(refused),
        *refused,
        "",
        "the lines to change in your launch command:",
        *setting.launch.changes(),
    ]
    figures = {
        "layout": asdict(config),
        "speedup": speedup if math.isfinite(speedup) else None,
        "elastic": asdict(elastic.parts) | {"peak_bytes": elastic.peak_bytes},
        "stock": stock and {"step_us": stock.step_us, "row_tokens": stock.row_tokens, "recompute": stock.recompute},
        "changes": setting.launch.changes(),
    }
    return Outcome(PASSED, tuple(lines), "", figures)


def _rows(question: Question, stock: Stock | None, elastic: Judged) -> list[str]:

    def rate(step_us: float) -> list[str]:
        return [format_us(step_us), f"{1e6 * question.tokens / step_us:,.0f}"]

    fill, own = f"1F1B: does not fit {format_gib(question.cap_bytes)}", ["-", "-"]
    if stock is not None:
        fill, own = f"1F1B, packed to {stock.row_tokens:,}, {stock.recompute}", rate(stock.step_us)
    parts = elastic.parts
    shares = [f"{part_us / parts.step_us:.1%}" for part_us in (parts.bubble_us, parts.recompute_us)]
    rows = [[fill, *own, "-", "-", "-"], ["elastic", *rate(parts.step_us), *shares, format_bytes(elastic.peak_bytes)]]
    return table(("predicted", "step", "tokens/s", "bubble", "recompute", "peak memory"), rows)


def refusals(launch: StockLaunch) -> list[str]:
    """Return the other flags, and combinations of flags, that `--epp` refuses."""
    if not (refused := launch.refused()):
        from megatron_epp.mcore import entry

        known, _ = entry.megatron_parser().parse_known_args(launch.elastic_argv())
        try:
            entry.check_run(known, launch.devices)
        except EppError as error:
            refused = str(error).split("\n")
    lines = [f"  {line}" for line in refused]
    return ["", "flags to change besides, as a plan cannot honour them:", *lines] if lines else []
