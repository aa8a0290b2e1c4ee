"""Steps that need no training: the machine's software, links and queues."""

from __future__ import annotations

import os
from dataclasses import asdict, replace

from megatron_epp.plan.units import format_bytes
from megatron_epp.tools.cli.doctor import PROBLEM, WARNING, look
from megatron_epp.tools.cli.doctor import text as doctor_text
from megatron_epp.tools.cli.first_run.outcome import SKIPPED, Outcome, Setting
from megatron_epp.tools.cli.terminal import progress
from megatron_epp.tools.report.text import format_us, table


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
