"""Starts training processes the way a user does, and reads back what they did."""

import contextlib
import os
import random
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
"""Environment of every run: it sees no GPU."""

# A GPT that trains in milliseconds. The padded vocabulary is 128 whatever the tensor-parallel size.
TINY = shlex.split(
    "--transformer-impl local --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64 --hidden-dropout 0 "
    "--attention-dropout 0 --eval-interval 1000 --eval-iters 1 --log-interval 1 --ckpt-format torch_dist --num-workers 0"
)
TINY_ON_DOCUMENTS = [*(flag for flag in TINY if flag != "--mock-data"), "--micro-batch-size", "1"]
"""The same without mock data, and with one sequence in a microbatch."""

EVEN = shlex.split("--epp-layout even --epp-vocab-parallel off --epp-split-weight-gradient off")
"""Flags with which nothing of a layout is chosen: what a test is of does not move with what a search finds."""

CHOOSING = TINY_ON_DOCUMENTS + shlex.split("--epp --split 100,0,0 --eval-iters 0 --calculate-per-token-loss")
"""The same with plans, and all documents for training; their path is not among the flags."""

PLANNED = CHOOSING + EVEN
"""The same with Megatron's layers."""


@dataclass(frozen=True)
class Finished:
    """Result of a launch.

    steps: {iteration: {"loss": ..., "grad_norm": ...}} as exact floats, from the rank that knows the loss.
    weights: a digest per rank of the parameters after the last step.
    figures: that the processes recorded (`record_figures`).
    """

    returncode: int
    output: str
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: step["loss"] for iteration, step in self.steps.items()}


def launch(num_processes: int, *command: object, env: dict[str, str] | None = None, timeout_s: float = 180) -> Finished:
    """Run `command` (script or `-m module`, then its arguments) in `num_processes` processes under torch's launcher.

    They see no GPU, unless `env` says otherwise.

    Raises AssertionError with the output when it takes longer than `timeout_s`; every process it started is gone then.
    """
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num_processes}",
        f"--master-port={free_port()}",
    ]
    return run([*launcher, *command], ENVIRONMENT | (env or {}), timeout_s)


def alone(*command: object, env: dict[str, str] | None = None, timeout_s: float = 180) -> Finished:
    """Run `command`, as for `launch`, in a fresh process that is its only rank, without a launcher, which takes seconds."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return run([sys.executable, *command], ENVIRONMENT | rank | (env or {}), timeout_s)


def run(command: Sequence[object], env: dict[str, str], timeout_s: float) -> Finished:
    """Run a command that starts processes of its own.

    Raises AssertionError with the output when it takes longer than `timeout_s`; every process it started is gone then.
    """
    process = subprocess.Popen(
        [*map(str, command)], env={**os.environ, **env}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torch's launcher then ends its workers, by force after half a minute
        output, _ = process.communicate()
        raise AssertionError(f"not finished after {timeout_s} s:\n{output[-5000:]}") from None
    return Finished(process.returncode, output)


def free_port() -> int:
    """A port nobody listens on now, below those that the system hands out by itself: nobody gets it before it is used."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(20000, 32768)
            probe.bind(("", port))  # on all addresses, as the server that will listen there
            return port
