"""Launches small training runs and reads what they report. Shared by the quickstart and the benchmark."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
_LINE = re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Run:
    """One finished training run.

    Attributes:
        lines: the figures of each iteration, as `--epp-report-dir` writes them.
        iteration_ms: Megatron's own time of each iteration, optimizer included.
    """

    lines: tuple[dict[str, Any], ...]
    iteration_ms: tuple[float, ...]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    def tokens_per_second(self, skip: int = 1) -> float:
        """Over all iterations but the first few."""
        return 1e3 * sum(line["tokens"] for line in self.lines[skip:]) / sum(self.iteration_ms[skip:])

    @property
    def peak_activation_bytes(self) -> list[int]:
        """Largest of all iterations, per pipeline rank."""
        return [max(column) for column in zip(*(line["peak_activation_bytes"] for line in self.lines), strict=True)]


def flags_of(settings: dict[str, Any]) -> list[str]:
    """``{"num_layers": 4, "swiglu": True}`` as ``["--num-layers", "4", "--swiglu"]``; False and None are left out."""
    flags: list[str] = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        flags.append("--" + name.replace("_", "-"))
        if value is not True:
            flags.extend(str(v) for v in (value if isinstance(value, list) else [value]))
    return flags


def tiny_gpt(**changes: Any) -> dict[str, Any]:
    """The settings of ``configs/models/tiny-gpt.yaml`` with changes; on a GPU in bf16 over NCCL."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "models" / "tiny-gpt.yaml").read_text())["megatron"]
    if torch.cuda.is_available():
        settings |= {"bf16": True, "distributed_backend": "nccl"}
    else:
        settings |= {"distributed_backend": "gloo"}
    return settings | changes


def pipeline_size(wanted: int) -> int:
    """As wanted on CPU; no more than there are GPUs otherwise."""
    return min(wanted, torch.cuda.device_count()) if torch.cuda.is_available() else wanted


def train(folder: Path, num_ranks: int, settings: dict[str, Any], timeout_s: float = 600) -> Run:
    """Train with torchrun on this machine and read the figures.

    Args:
        folder: where the log and the figures go; figures of an earlier run are removed.
        num_ranks: processes.
        settings: flags, `--epp` ones included.

    Raises:
        SystemExit: the run failed; shows the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "iterations.jsonl"
    figures.unlink(missing_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-port", str(port)]
    command += ["-m", "megatron_epp.mcore.pretrain_gpt", *flags_of(settings | {"epp": True, "epp_report_dir": folder})]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"} | os.environ
    log = folder / "train.log"
    with open(log, "w", encoding="utf-8") as output:
        output.write(" ".join(command) + "\n")
        output.flush()
        try:
            code = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, timeout=timeout_s
            ).returncode
        except subprocess.TimeoutExpired:
            code = f"none after {timeout_s:.0f} s"
    text = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        raise SystemExit(f"training failed (exit code {code}); the end of {log}:\n" + "\n".join(text.splitlines()[-25:]))
    times = {int(m[1]): float(m[2]) for m in _LINE.finditer(text)}
    lines = tuple(json.loads(line) for line in figures.read_text(encoding="utf-8").splitlines())
    return Run(lines, tuple(times[line["iteration"]] for line in lines))


def write_documents(prefix: Path, lengths: Iterable[int], vocab_size: int = 256) -> str:
    """Write documents of random tokens that train so many positions each; returns the prefix for --data-path."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.RandomState(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.from_numpy(generator.randint(0, vocab_size, length + 1)), [length + 1])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def machine() -> str:
    """This machine in a few words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    model = "CPU"
    if Path("/proc/cpuinfo").exists():
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
        model = names[0] if names else model
    return f"{os.cpu_count()} cores, {model}"
