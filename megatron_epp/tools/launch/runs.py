"""Short training runs of a small GPT on this machine, and their figures, for the quickstart and the benchmarks."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_epp.cost.kept import FILE_NAME as COSTS
from megatron_epp.cost.kept import RECORDED
from megatron_epp.cost.kept import WARM_UP as NOT_RECORDED
from megatron_epp.launch.machine import count_gpus, sharing_gpus
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_words
from megatron_epp.plan.reading import naming_file, parse_json, read_text
from megatron_epp.tools.formulas.library import load_flags

OURS = "megatron_epp.mcore.pretrain_gpt"
ITERATION = re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
"""Pattern of Megatron's line in a log for an iteration: its number, and its time in milliseconds."""
_REASON = re.compile(r"^(?:\[rank\d+\]: )?(megatron_epp, rank \d+: .*|\S*(?:Error|Exception)\b.*)$", re.MULTILINE)
"""Pattern of the reason of a failure in a log. torch puts the rank in front of every line of a traceback."""
WARM_UP = 2  # iterations at the start of a run that do not count: memory is new, and Megatron prints their times together
_LIMIT_S = 3600.0
_FIGURES = "iterations.jsonl"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # default environment variables of a run


type Start = Callable[[int, Sequence[str], Mapping[str, str], Path, float], int | None]
"""Runs so many ranks with a module and its flags after ``-m``, more environment variables, a log that their output is appended
to, and a limit in seconds. Returns the exit code; None if they were ended at the limit."""
AS_MEGATRON = {"epp_layout": "even", "epp_vocab_parallel": "off", "epp_split_weight_gradient": "off"}
"""Flags with which nothing of a layout is chosen, so that runs begin with equal weights on equal stages."""


class TrainingError(EppError):
    """A training run failed. The message gives the reason, as far as its log does."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    lines: tuple[dict[str, Any], ...]  # the figures of each iteration, as `--epp-report-dir` writes them
    iteration_ms: tuple[float, ...]  # Megatron's own time of each iteration, optimizer included

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def counted(self) -> slice:
        """Iterations that count: those after `WARM_UP`, or the last one of a run that has no more."""
        return slice(min(WARM_UP, len(self.lines) - 1), None)

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * sum(int(line["tokens"]) for line in self.lines[self.counted]) / sum(self.iteration_ms[self.counted])

    @property
    def peak_activation_bytes(self) -> list[int]:
        return [max(column) for column in zip(*(line["peak_activation_bytes"] for line in self.lines), strict=True)]


def tiny_gpt(**changes: Any) -> dict[str, Any]:
    """Megatron's flags of the shipped model ``tiny-gpt`` with changes; on a GPU in bf16 over NCCL."""
    here = {"bf16": True, "distributed_backend": "nccl"} if count_gpus() else {"distributed_backend": "gloo"}
    return load_flags("tiny-gpt") | here | changes


def pipeline_size(wanted: int) -> int:
    return min(wanted, count_gpus() or wanted)


def train(
    folder: Path,
    num_ranks: int,
    settings: dict[str, Any],
    timeout_s: float = _LIMIT_S,
    program: str = OURS,
    environment: Mapping[str, str] = MappingProxyType({}),
    start: Start | None = None,
) -> RecordedRun:
    """Train on this machine, and read the figures. Raises `TrainingError` if the run failed, or exceeds `timeout_s`."""
    words = ["-m", program, *flag_words(settings | {"epp": True, "epp_report_dir": folder})]
    line = f"{num_ranks} ranks: {' '.join(words)}"
    return _recorded(folder, line, timeout_s, lambda log: (start or torchrun)(num_ranks, words, environment, log, timeout_s))


def torchrun(num_ranks: int, words: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float) -> int | None:
    """Start ranks by torch's launcher, as users do: a `Start`."""
    launcher = [sys.executable, "-m", "megatron_epp.tools.launch.torchrun", "--standalone", "--local-addr", "127.0.0.1"]
    sharing = sharing_gpus(num_ranks) if count_gpus() else {}
    launcher += ["--nproc-per-node", str(num_ranks), *(["--virtual-local-rank"] if sharing else [])]
    return _exit_code([*launcher, *words], log, limit_s, sharing | dict(environment))


def learnt_costs(folder: Path, num_ranks: int, settings: dict[str, Any], **how: Any) -> Path:
    """Train until costs are learnt; return the file with them, for `--epp-costs`, with which layers are Megatron's."""
    iterations = NOT_RECORDED + RECORDED
    learning = {"epp_costs": "learn", "train_iters": iterations, "save": folder, "save_interval": iterations + 1}
    train(folder, num_ranks, AS_MEGATRON | settings | learning, **how)
    return folder / COSTS


def launched(folder: Path, command: Sequence[str]) -> RecordedRun:
    """Run a command that writes figures to a folder (`--epp-report-dir`), and read them. Raises `TrainingError`."""
    return _recorded(folder, shlex.join(command), _LIMIT_S, lambda log: _exit_code(list(command), log, _LIMIT_S, {}))


def _recorded(folder: Path, line: str, timeout_s: float, run: Callable[[Path], int | None]) -> RecordedRun:
    """Run what appends to a log, and read the figures that it writes; `run` returns the exit code, None at its limit."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FIGURES).unlink(missing_ok=True)
    log = folder / "train.log"
    log.write_text(f"{line}\n", encoding="utf-8")
    code = run(log)
    if code is None:
        raise TrainingError(f"training has not ended after {timeout_s:.0f} s: see {log}")
    text = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        reason = reason_in(text)
        raise TrainingError(f"training ended with exit code {code}, see {log}" + (f": {reason}" if reason else ""))
    times = {int(m[1]): float(m[2]) for m in ITERATION.finditer(text)}
    with naming_file(folder / _FIGURES, TrainingError):
        written = enumerate(read_text(folder / _FIGURES).splitlines(), start=1)
        lines = tuple(parse_json(line, f"line {number}", with_nan=True) for number, line in written)
    return RecordedRun(lines, tuple(times[line["iteration"]] for line in lines))


def _exit_code(command: list[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> int | None:
    """Run a command that appends to a log; None if it takes longer than the limit. Raises `TrainingError` if none starts."""
    with open(log, "a", encoding="utf-8") as output:
        try:
            variables = {**_ENVIRONMENT, **os.environ, **environment}
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=variables, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            raise TrainingError(f"{command[0]} cannot be started: {error.strerror}") from error
    return done.returncode


def reason_in(log: str) -> str | None:
    """First line of a log that gives the reason for a failure; None if there is none."""
    return reason[1] if (reason := _REASON.search(log)) else None
