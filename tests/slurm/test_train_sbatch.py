"""scripts/train.sbatch on a real SLURM with two virtual nodes: it trains, survives a killed task, and other ways in agree."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.mcore.forked import launch
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.slurm_cluster import Cluster, missing, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
ITERATIONS = 20
LIMIT_S = 300
TINY = [
    "-c", "recipes/tiny-cpu", "num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64",
    "max_position_embeddings=64", "global_batch_size=8", f"train_iters={ITERATIONS}", "lr_decay_iters=100", "num_workers=0",
    "ckpt_format=torch_dist",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"SLURM is not installed, {', '.join(missing())} missing: apt install slurm-wlm munge"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), 2) as running:
        yield running


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("documents")
    return write_pair(folder / "text", documents_of(long_tailed_lengths(64, longest=65), vocab_size=256))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder to submit from, with scripts/ in it."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "scripts").symlink_to(REPOSITORY / "scripts")
    return folder


def environment() -> dict[str, str]:
    """The nodes are one host, known to itself as 127.0.0.1; the package is that of this checkout."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"MASTER_ADDR": "127.0.0.1", "PATH": path, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}


def losses(text: str) -> dict[int, str]:
    """Printed losses by iteration; of an iteration that ran twice, the last."""
    return {int(i): loss for i, loss in re.findall(r"iteration\s+(\d+)/.*?lm loss: (\S+)", text)}


def children_with(word: str, job: str) -> list[int]:
    """Processes of a job whose command line has a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in arguments and f"SLURM_JOB_ID={job}".encode() in variables:
            found.append(int(folder.name))
    return found


@dataclass(frozen=True)
class Job:
    """Return the output of a job's first start, in which a task was killed, and of its second."""

    first: str
    again: str


@pytest.fixture(scope="module")
def job(cluster, documents, home) -> Job:
    """A job of two nodes that has submitted itself, lost a task and run to its end."""
    save = home / "checkpoints"
    flags = [*TINY, f"data_path={documents}", f"save={save}", f"load={save}", "save_interval=8"]
    submitted = subprocess.run(
        ["bash", "scripts/train.sbatch", *flags],
        cwd=home, env=cluster.env | environment() | {"SBATCH_ARGS": "--parsable --nodes 2"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    output = home / "logs" / f"epp-{job}.out"

    def text() -> str:
        return output.read_text() if output.exists() else ""

    def tell() -> str:
        return f"{text()[-4000:]}\n{cluster.logs()}"

    wait_for(lambda: 10 in losses(text()), LIMIT_S, "ten iterations have run", tell)
    workers = children_with("megatron_epp.mcore.pretrain_gpt", job)
    assert len(workers) >= 4  # a launcher and a worker on either node
    variables = [Path(f"/proc/{worker}/environ").read_bytes() for worker in workers]
    assert not any(b"EPP_RENDEZVOUS_TOKEN=" in one for one in variables), "who has met needs no token"
    os.kill(max(workers), signal.SIGKILL)
    wait_for(lambda: "start 2" in text(), LIMIT_S, "the job has started again", tell)
    wait_for(lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), LIMIT_S, "the job has ended", tell)
    assert cluster.state(job) == "COMPLETED", tell()
    return Job(*text().split("start 2", 1))


def test_a_killed_task_puts_the_job_back_into_the_queue_and_it_goes_on_from_its_checkpoint(job):
    assert "goes back into the queue" in job.first
    assert ITERATIONS not in losses(job.first)
    resumed = losses(job.again)
    assert min(resumed) > 1, "it went on from a checkpoint"
    assert max(resumed) == ITERATIONS
    # After a start Megatron prints, with the second iteration, the mean of the first two.
    repeated = (losses(job.first).keys() & resumed.keys()) - {min(resumed) + 1}
    assert repeated, "what ran after the checkpoint ran again"
    assert all(losses(job.first)[i] == resumed[i] for i in repeated)


def test_flags_settings_and_slurm_give_the_same_losses(job, documents, home):
    """The ones of the job's first start: it has trained with the same settings, but for where it saves."""
    settings = [*TINY, "exit_interval=2", f"data_path={documents}"]
    env = os.environ | environment()
    printed = subprocess.run(
        ["bash", "scripts/train.sh", "--dry-run", *settings],
        cwd=home, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert printed.returncode == 0, printed.stdout[-2000:] + printed.stderr[-2000:]
    flags = shlex.split(printed.stdout.split("megatron_epp.mcore.pretrain_gpt ", 1)[1])
    by_flags = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *flags)
    assert by_flags.returncode == 0, by_flags.output[-5000:]
    assert losses(by_flags.output) == {i: losses(job.first)[i] for i in (1, 2)}
