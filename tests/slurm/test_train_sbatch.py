"""scripts/train.sbatch on a real SLURM with virtual nodes: it trains, survives a killed task, and other ways in agree."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.calls import wait_for
from tests.support.mcore.forked import launch
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.slurm_cluster import Cluster, missing

REPOSITORY = Path(__file__).resolve().parents[2]
ITERATIONS, MORE_ITERATIONS = 2, 20
LIMIT_S = 300
TASK_KILLED_ONCE = """\
echo "in start $((${SLURM_RESTART_COUNT:-0} + 1)): $*"
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then kill -KILL $$; fi
"""
"""In place of scripts/train.sh: it is killed in the first start of its job."""
TINY = [
    "-c", "recipes/tiny-cpu", "num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64",
    "max_position_embeddings=64", "global_batch_size=8", "lr_decay_iters=100", "num_workers=0",
    "ckpt_format=torch_dist",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    bool(missing()), reason=f"SLURM is not installed, {', '.join(missing())} missing: apt install slurm-wlm munge"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm"), 3) as running:
        yield running


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("documents")
    return write_pair(folder / "text", documents_of(long_tailed_lengths(64, longest=65), vocab_size=256))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
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


class Job:
    """A job that submits itself from a folder with scripts/, and what it has printed there."""

    def __init__(self, cluster: Cluster, home: Path, num_nodes: int, arguments: Sequence[str]) -> None:
        more = environment() | {"SBATCH_ARGS": f"--parsable --nodes {num_nodes}"}
        self.cluster = cluster
        self.name = cluster.run("bash", "-c", f"cd {home} && bash scripts/train.sbatch {shlex.join(arguments)}", **more).strip()
        self._output = home / "logs" / f"epp-{self.name}.out"

    @property
    def text(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        wait_for(happened, LIMIT_S, what, lambda: f"{self.text[-4000:]}\n{self.cluster.logs()}")

    def wait_for_its_end(self) -> None:
        self.wait_for(lambda: self.cluster.state(self.name) not in ("PENDING", "RUNNING", "COMPLETING"), "the job has ended")
        assert self.cluster.state(self.name) == "COMPLETED", self.text[-4000:]


@pytest.fixture(scope="module")
def jobs(cluster, documents, home, tmp_path_factory) -> tuple[Job, Job]:
    """Two jobs that have run side by side: a training on two nodes, and one whose only task was killed in its first start."""
    other = tmp_path_factory.mktemp("other")
    (other / "scripts").mkdir()
    (other / "scripts" / "train.sbatch").symlink_to(REPOSITORY / "scripts" / "train.sbatch")
    (other / "scripts" / "train.sh").write_text(TASK_KILLED_ONCE)
    both = (
        Job(cluster, home, 2, [*TINY, f"train_iters={ITERATIONS}", f"data_path={documents}"]),
        Job(cluster, other, 1, ["--epp", "two words"]),
    )
    for job in both:
        job.wait_for_its_end()
    return both


def test_a_killed_task_puts_the_job_back_into_the_queue(jobs):
    _, killed = jobs
    first, again = killed.text.split("start 2", 1)
    assert "training ended with exit code 137" in first
    assert "goes back into the queue (MOST_RESTARTS=3)" in first
    assert "in start 2: --epp two words --epp-checkpoint-fallback" in again
    assert "goes back into the queue" not in again


def test_flags_settings_and_slurm_give_the_same_losses(jobs, documents):
    training, _ = jobs
    settings = [*TINY, f"train_iters={ITERATIONS}", f"data_path={documents}"]
    printed = launch(1, "-m", "megatron_epp.tools.cli.main", "train", "--dry-run", *settings)
    assert printed.returncode == 0, printed.output[-2000:]
    flags = shlex.split(printed.output.split("megatron_epp.mcore.pretrain_gpt ", 1)[1])
    by_flags = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *flags)
    assert by_flags.returncode == 0, by_flags.output[-5000:]
    assert len(losses(training.text)) == ITERATIONS
    assert losses(by_flags.output) == losses(training.text)


@pytest.mark.slow  # two starts on two nodes; by default a job without training is put back, and `test_killed.py` resumes
def test_a_training_that_lost_a_task_goes_on_from_its_checkpoint(cluster, documents, home):
    save = home / "checkpoints"
    more = [f"train_iters={MORE_ITERATIONS}", f"data_path={documents}", f"save={save}", f"load={save}", "save_interval=8"]
    job = Job(cluster, home, 2, [*TINY, *more])
    job.wait_for(lambda: 10 in losses(job.text), "ten iterations have run")
    workers = children_with("megatron_epp.mcore.pretrain_gpt", job.name)
    assert len(workers) >= 4  # a launcher and a worker on either node
    os.kill(max(workers), signal.SIGKILL)
    job.wait_for(lambda: "start 2" in job.text, "the job has started again")
    job.wait_for_its_end()
    first, again = job.text.split("start 2", 1)
    assert "goes back into the queue" in first
    assert MORE_ITERATIONS not in losses(first)
    resumed = losses(again)
    assert min(resumed) > 1, "it went on from a checkpoint"
    assert max(resumed) == MORE_ITERATIONS
    # After a start Megatron prints, with the second iteration, the mean of the first two.
    repeated = (losses(first).keys() & resumed.keys()) - {min(resumed) + 1}
    assert repeated, "what ran after the checkpoint ran again"
    assert all(losses(first)[i] == resumed[i] for i in repeated)
