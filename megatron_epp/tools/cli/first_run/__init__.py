"""The command for the first hour on a machine: checks from the software to a plan, each with what to expect, and one report."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_epp.launch.machine import count_gpus, machine
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_words
from megatron_epp.plan.reading import nearest
from megatron_epp.plan.writing import write_text
from megatron_epp.plan.yaml_files import shipped
from megatron_epp.tools.cli.first_run import checks
from megatron_epp.tools.cli.first_run.checks import gain
from megatron_epp.tools.cli.first_run.launch import FAILED, REDUCED, MachineCheck, Outcome, Setting, read_launch, verdict
from megatron_epp.tools.cli.first_run.training import parity, race
from megatron_epp.tools.cli.lengths import SOURCES
from megatron_epp.tools.cli.terminal import Parser, output_folder, progress, say
from megatron_epp.tools.cli.train import quietly, versions
from megatron_epp.tools.formulas.library import load_cluster, load_flags

EXAMPLE = """\
example: everything, for your documents and your launch command as it is today
  megatron-epp first-run --lengths documents.idx -- \\
    torchrun --nproc-per-node 8 pretrain_gpt.py $YOUR_FLAGS
the same, and then ten iterations of that command with each schedule: is it faster on your GPUs?
  megatron-epp first-run --race --lengths documents.idx -- \\
    torchrun --nproc-per-node 8 pretrain_gpt.py $YOUR_FLAGS
only links and a tiny training
  megatron-epp first-run --steps links,parity
"""
STEPS = (
    MachineCheck(
        "doctor",
        "what this machine has, lacks and should change",
        "no problem; warnings name what would be faster",
        "follow the advice after the arrow, then run it again",
        1,
        checks.doctor,
    ),
    MachineCheck(
        "links",
        "messages between ranks, and whole plans of messages in the order in which training posts them",
        "every plan ends, every value arrives; GB/s of large messages near what the link can do",
        "run it again with NCCL_DEBUG=INFO; if a plan hangs, send the report: training would hang, too",
        4,
        checks.links,
    ),
    MachineCheck(
        "parity",
        "a tiny model with Megatron's own schedule and with plans",
        "losses agree: to rounding in fp32, and in bf16 as closely as Megatron's own agree with fp32",
        "the log that the message names has the reason; send the report with it",
        8,
        parity,
    ),
    MachineCheck(
        "plan",
        "your lengths, planned at your sizes, against Megatron's own schedule",
        "a gain above 1 for skewed lengths, a tie for even ones; then the lines to change in your launch command",
        "the message names what would fit",
        2,
        gain,
    ),
    MachineCheck(
        "race",
        "your launch command, ten iterations each with Megatron's own schedule, whole and packed, and with plans",
        "tokens per second of each, measured; plans take the time and the memory that they predict; equal losses",
        "the log that the message names has the reason",
        10,
        race,
        is_asked_for=True,
    ),
)
_FOLDER = "runs/first-run"


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--lengths", default="wikipedia", metavar="FILE|N,N,...|NAME", help=f"{SOURCES} (default: %(default)s)")
    names = ", ".join(shipped("clusters"))
    clusters = f"machine that the plan is for; shipped: {names} (default: this one with GPUs, else h100x8)"
    add("--cluster", metavar="NAME|FILE", help=clusters)
    model = "model to use without a launch command (default: llama3-8b on GPUs, tiny-gpt without)"
    add("--model", metavar="NAME|FILE", help=model)
    steps = f"only these of {', '.join(step.name for step in STEPS)} (default: all but race)"
    add("--steps", type=_names, metavar="NAME,...", help=steps)
    add("--race", action="store_true", help="train, too: ten iterations of your launch command with each schedule, unsaved")
    add("--reduced", action="store_true", help="everything tiny, in a minute or two: what runs on a CPU in any case")
    where = "where logs and the report go (default: %(default)s)"
    add("-o", "--output", type=output_folder, default=_FOLDER, metavar="FOLDER", help=where)
    launch = "your launch command as it is today, behind --, with variables replaced"
    add("launch", nargs="*", metavar="-- COMMAND", help=launch)


def run(args: argparse.Namespace) -> int:
    """Run the steps, write the report, and return 1 if a step failed. Raises `EppError` if there is nothing to begin with."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as in training: the strictest order of launches
    with progress("reading Megatron's flags"), quietly():
        setting = _setting(args)
    setting.folder.mkdir(parents=True, exist_ok=True)
    say(f"megatron-epp first-run on {setting.machine}" + f"\n{REDUCED}" * setting.is_reduced, flush=True)
    chosen = args.steps or [step.name for step in STEPS if not step.is_asked_for]
    steps = [step for step in STEPS if step.name in chosen or (args.race and step.name == "race")]
    done: dict[str, Outcome] = {}
    for number, step in enumerate(steps, start=1):
        about = "" if setting.is_reduced else f" (about {step.gpu_minutes} min)"
        say(f"\n[{number}/{len(steps)}] {step.name}: {step.purpose}{about}\n  expect: {step.expect}", flush=True)
        done[step.name] = _done(step, setting)
        say(done[step.name].lines(), flush=True)
        _write(setting, done)
    say(f"\n{verdict(done)}; to send to maintainers: {setting.folder / 'report.json'}")
    return int(any(outcome.status == FAILED for outcome in done.values()))


def _done(step: MachineCheck, setting: Setting) -> Outcome:
    """Run a step. An error is the step's result, so that the other steps still run."""
    start_s = time.monotonic()
    try:
        with quietly():
            outcome = step.run(setting)
    except Exception as error:  # whatever a broken installation or device raises; the report is for finding out
        text = error.text(TRAINING) if isinstance(error, EppError) else f"{type(error).__name__}: {error}"
        outcome = Outcome(FAILED, (text,), step.on_failure)
    if setting.num_gpus:
        import torch

        torch.cuda.empty_cache()  # the ranks of the next step need the memory
    return replace(outcome, time_s=time.monotonic() - start_s)


def _write(setting: Setting, done: dict[str, Outcome]) -> None:
    """Write the report, after every step, so that a machine that hangs leaves the steps before."""
    report = {
        "machine": setting.machine,
        "is_reduced": setting.is_reduced,
        "versions": versions(),
        "launch": setting.launch.words,
        "verdict": verdict(done),
        "steps": [{"name": name, "outcome": asdict(outcome)} for name, outcome in done.items()],
    }
    write_text(setting.folder / "report.json", json.dumps(report, indent=1, default=str) + "\n")


def _setting(args: argparse.Namespace) -> Setting:
    num_gpus, here = count_gpus(), machine()
    is_reduced = args.reduced or not num_gpus
    return Setting(
        folder=Path(args.output),
        machine=here,
        num_gpus=num_gpus,
        is_reduced=is_reduced,
        launch=read_launch(args.launch or _example_launch(args.model, is_reduced)),
        has_launch=bool(args.launch),
        cluster=load_cluster(args.cluster or _cluster_of(here, num_gpus, bool(args.launch))),
        lengths_from=args.lengths,
    )


def _example_launch(model: str | None, is_reduced: bool) -> list[str]:
    """Return a launch command for users who give none: a pipeline on a node of eight GPUs, or if reduced of two processes."""
    sizes: dict[str, Any] = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    sizes |= {"seq_length": 32768, "global_batch_size": 64}
    if is_reduced:
        sizes = {"pipeline_model_parallel_size": 2, "seq_length": 4096, "global_batch_size": 16}
    flags = {"hidden_dropout": 0.0} | load_flags(model or ("tiny-gpt" if is_reduced else "llama3-8b")) | sizes
    return ["torchrun", "--nproc-per-node", "2" if is_reduced else "8", "pretrain_gpt.py", *flag_words(flags)]


def _cluster_of(here: str, num_gpus: int, has_launch: bool) -> str:
    """Return the shipped cluster file of this machine's GPUs; an H100's for other GPUs, and for a launch command on a CPU."""
    if not num_gpus and not has_launch:
        return "this-machine"
    gpu = re.search(r"[AH]\d{3}", here)
    name = f"{gpu[0].lower()}x8" if gpu else ""
    return name if name in shipped("clusters") else "h100x8"


def _names(text: str) -> tuple[str, ...]:
    names, known = tuple(text.split(",")), [step.name for step in STEPS]
    if wrong := next((name for name in names if name not in known), ""):
        raise argparse.ArgumentTypeError(f"there is no step {wrong}{nearest(wrong, known)}; there are {', '.join(known)}")
    return names
