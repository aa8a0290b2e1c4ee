"""The launch command of a training as its user has it, with the lines to change; what steps share, find and report."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_epp.mcore.arguments.layout import world_of
from megatron_epp.mcore.arguments.refusals import OF_DOCUMENTS
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.tools.formulas.library import Cluster

_OURS = ["-m", "megatron_epp.run"]
_CHANGED = {"--micro-batch-size": "1", "--attention-dropout": "0"}  # flags that a plan needs at one value
_LASTING = """
    --load --save --save-interval --save-retain-interval --async-save --finetune --pretrained-checkpoint --ckpt-step
    --non-persistent-save-interval --non-persistent-ckpt-type --tensorboard-dir --wandb-project --wandb-exp-name
    --exit-interval --exit-duration-in-mins --log-interval --eval-iters --epp-schedule --epp-report-dir
"""
"""Flags that a short run to compare leaves out or sets: it keeps and loads nothing, and logs every iteration."""
VOCABULARY = 128256  # vocabulary that is assumed where only the tokenizer knows it
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
REDUCED = "reduced form: sizes are tiny and links are gloo's, so passing says that the code works here and times say nothing"


@dataclass(frozen=True, slots=True)
class StockLaunch:
    """A command that trains with Megatron's own schedule, on so many devices."""

    words: tuple[str, ...]  # of the command line
    script: int  # position of the training script among them
    flags: dict[str, Any]  # Megatron's flags with underscores, its defaults included
    devices: int

    @property
    def argv(self) -> tuple[str, ...]:
        return self.words[self.script + 1 :]

    @property
    def context(self) -> int:
        return int(self.flags["seq_length"])

    @property
    def changed(self) -> dict[str, str]:
        """Flags that need another value than the command gives, with the value that they need."""
        args, conflicts = argparse.Namespace(**self.flags), {conflict.flag: conflict for conflict in OF_DOCUMENTS}
        return {flag: value for flag, value in _CHANGED.items() if conflicts[flag].is_given(args)}

    def elastic_argv(self) -> list[str]:
        argv = [*self.argv, "--epp"]
        for flag, value in self.changed.items():
            if flag in argv:
                argv[argv.index(flag) + 1] = value
            else:
                argv += [flag, value]
        return argv

    def raced(self, schedule: str, folder: Path, iterations: int) -> list[str]:
        """Return the words of a command that trains a few iterations by a value of `--epp-schedule`, and saves nothing."""
        own, is_left_out = list[str](), False
        for word in self.elastic_argv():
            if word.startswith("--"):
                is_left_out = word.partition("=")[0] in _LASTING.split()
            if not is_left_out:
                own.append(word)
        own += ["--epp-schedule", schedule, "--epp-report-dir", str(folder)]
        own += ["--exit-interval", str(iterations), "--log-interval", "1", "--eval-iters", "0"]
        return [*self.words[: self.script], *_OURS, self.words[self.script], *own]

    def changes(self) -> list[str]:
        """Return the lines to change, as a diff: the launcher's line, and flags that need another value with plans."""
        before, script = self.words[: self.script], self.words[self.script]
        lines = [f"-{shlex.join([*before, script])} \\", f"+{shlex.join([*before, *_OURS, script])} --epp \\"]
        for flag, value in self.changed.items():
            lines += [f"-    {flag} {self.argv[self.argv.index(flag) + 1]} \\"] if flag in self.argv else []
            lines.append(f"+    {flag} {value} \\")
        return lines

    def refused(self) -> list[str]:
        """Return the flags that a plan cannot honour and that `changes` does not change, with what to do about each."""
        args = argparse.Namespace(**self.flags)
        conflicts = (conflict for conflict in OF_DOCUMENTS if conflict.flag not in _CHANGED and conflict.is_given(args))
        return [f"{conflict.flag}: {conflict.use}" for conflict in conflicts]


def read_launch(words: Sequence[str]) -> StockLaunch:
    """Read a launcher with its flags, a script of Megatron, and its flags. Raises `EppError` if no script or model is there."""
    from megatron_epp.mcore import entry

    script = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if script is None:
        how = "give it as in `-- torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS`"
        raise EppError(f"the launch command names no script: {how}")
    flags = vars(entry.megatron_parser().parse_known_args(list(words[script + 1 :]))[0])
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length") if flags.get(name) is None]
    if missing:
        absent = ", ".join(map(flag_of, missing))
        raise EppError(f"the launch command lacks {absent}: give it as it is expanded, with every variable replaced")
    flags["vocab_size"] = VOCABULARY if flags.get("vocab_size") is None else flags["vocab_size"]
    split_words = [part for word in words[:script] for part in word.split("=", maxsplit=1)]
    numbers = {name.replace("_", "-"): int(value) for name, value in pairwise(split_words) if value.isdecimal()}
    replica, started = world_of(flags), numbers.get("--nproc-per-node", 1) * numbers.get("--nnodes", 1)
    return StockLaunch(tuple(words), script, flags, max(replica, started - started % replica))


@dataclass(frozen=True, slots=True)
class Setting:
    folder: Path  # where logs and reports go
    machine: str  # name of this machine's GPUs or processor
    num_gpus: int
    is_reduced: bool  # everything is tiny, as on a CPU
    launch: StockLaunch  # the user's launch command, as it is today; an example unless `has_launch`
    has_launch: bool
    cluster: Cluster  # kind of machine that plans are for
    lengths_from: str  # source of the lengths, a value of ``--lengths``


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a step: `found` has lines for people, `figures` the same for programs, with units in the names."""

    status: str  # ``passed``, ``failed`` or ``skipped``
    found: tuple[str, ...]
    todo: str = ""  # about a failure or a skip
    figures: dict[str, Any] = field(default_factory=dict)
    time_s: float = 0.0

    @staticmethod
    def judged(holds: bool, lines: Sequence[str], todo: str, figures: dict[str, Any]) -> Outcome:
        """Make the result of a step that passes if a condition holds; `todo` is for the case that it does not."""
        return Outcome(PASSED if holds else FAILED, tuple(lines), todo * (not holds), figures)

    def lines(self) -> str:
        lines = [*self.found, f"{self.status}, {self.time_s:.1f} s", *[f"-> {self.todo}"] * bool(self.todo)]
        return "\n".join(f"  {line}".rstrip() for text in lines for line in text.split("\n"))


@dataclass(frozen=True, slots=True)
class MachineCheck:
    """A step that ``--steps`` selects by its name; `run` raises `EppError`."""

    name: str
    purpose: str
    expect: str  # what one sees where all is well
    on_failure: str  # what to do where the step ends in an error
    gpu_minutes: int  # estimate for a node of GPUs
    run: Callable[[Setting], Outcome]
    is_asked_for: bool = False  # it runs only where it is asked for


def verdict(done: Mapping[str, Outcome]) -> str:
    counts = []
    for status in (PASSED, FAILED, SKIPPED):
        if names := [name for name, outcome in done.items() if outcome.status == status]:
            counts.append(f"{len(names)} {status}" + f" ({', '.join(names)})" * (status != PASSED))
    return f"{', '.join(counts)}, {sum(outcome.time_s for outcome in done.values()):.0f} s in all"
