"""Nothing is left of a training that is killed, and one that is interrupted goes on from its checkpoint to the bit."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megatron_epp.cost.kept import FILE_NAME, RECORDED, WARM_UP
from megatron_epp.launch.lifetime import FOLDER_VARIABLE
from tests.support.calls import wait_for
from tests.support.mcore import forked, interruptions
from tests.support.mcore.forked import launch
from tests.support.mcore.interruptions import TORCHRUN, alive, files
from tests.support.mcore.launch import ENVIRONMENT, PLANNED, TINY
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

LIMIT_S = 240
TRAINING = ["-m", "megatron_epp.mcore.pretrain_gpt", *TINY, "--pipeline-model-parallel-size", "2", "--train-iters", "100000"]
SAVED = "latest_checkpointed_iteration.txt"
WITH_MANAGER = """
import multiprocessing, os, signal
from megatron_epp.mcore.patches import environment, patching
patching.apply(environment.of_every_run())
manager = multiprocessing.get_context({method!r}).Manager()
print(manager._process.pid, manager.list([7])[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a path short enough for sockets. It is in the environment of every process below."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def environment(temporary: Path) -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT, "TMPDIR": str(temporary)}


@pytest.fixture
def run(temporary: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A training that has saved a checkpoint, and so has helper processes: its launcher and its ranks."""
    log = tmp_path / "log"
    command = [*TORCHRUN, "--nproc-per-node", "2", *TRAINING, "--save", str(tmp_path / "saved"), "--save-interval", "3"]
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, env=environment(temporary), stdout=output, stderr=output)
    try:
        saved = tmp_path / "saved" / SAVED
        wait_for(lambda: saved.exists() or launcher.poll() is not None, LIMIT_S, "it has saved", log.read_text)
        ranks = psutil.Process(launcher.pid).children()
        assert len(ranks) == 2, log.read_text()[-5000:]
        assert len(alive(temporary)) > 3
        assert files(temporary)
        yield launcher, ranks
    finally:
        for process in alive(temporary):
            process.kill()
        launcher.wait()


@pytest.mark.slow  # starts Megatron under a launcher; by default small processes do it in `test_launch_lifetime.py`
@pytest.mark.parametrize("killed", ["a rank, then the launcher", "the launcher alone, with a rank that is stopped"])
def test_a_killed_run_ends(
    killed: str, run: tuple[subprocess.Popen[bytes], list[psutil.Process]], temporary: Path, tmp_path: Path
) -> None:
    launcher, ranks = run
    if killed.startswith("a rank"):
        ranks[0].kill()
    else:
        ranks[0].send_signal(signal.SIGSTOP)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not alive(temporary), LIMIT_S, "all have ended", lambda: [one.cmdline() for one in alive(temporary)])
    script = tmp_path / "script.py"
    script.touch()
    subprocess.run([*TORCHRUN, "--nproc-per-node", "2", str(script)], env=environment(temporary), check=True, timeout=LIMIT_S)
    assert files(temporary) == []


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_without_a_launcher_a_helper_ends_with_its_killed_rank_and_leaves_no_folder(method: str, temporary: Path) -> None:
    variables = {name: value for name, value in environment(temporary).items() if name != FOLDER_VARIABLE}
    program = [sys.executable, "-c", WITH_MANAGER.format(method=method)]
    rank = subprocess.run(program, env=variables, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    pid, number = map(int, rank.stdout.split())
    assert number == 7
    assert rank.returncode == -signal.SIGKILL
    wait_for(lambda: not alive(temporary), LIMIT_S, f"process {pid} has ended")
    assert files(temporary) == []


def test_thirty_trials_have_every_happening_and_moments_inside_a_save() -> None:
    trials = [interruptions.trial_of(seed) for seed in range(30)]
    assert {trial.happening for trial in trials} == set(interruptions.HAPPENINGS)
    assert {trial.ranks for trial in trials} == {2, 4}
    assert {trial.in_save for trial in trials} == {False, True}


@pytest.mark.slow  # minutes; other tests here have one moment each
def test_no_trial_has_a_fault(tmp_path: Path, temporary: Path) -> None:
    assert list(interruptions.faults_of_trials(range(30), tmp_path, temporary)) == []


ITERATIONS = 8
INTERVAL = 3
KILLED = 4
"""The run is killed as soon as it is seen to have done this iteration: after its first checkpoint."""

FLAGS = PLANNED + shlex.split(
    "--pipeline-model-parallel-size 2 --seq-length 192 --max-position-embeddings 192 --hidden-dropout 0.1 "
    f"--train-iters {ITERATIONS} --vocab-size 255 --split 80,20,0 --eval-iters 1 --eval-interval 3 --log-interval 1000 "
    "--epp-slices 3 --epp-recompute 1 "
    "--window-size 40,0 --window-attn-skip-freq 2 --softmax-type learnable "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--spec tests.support.mcore.delta_hybrid two_gpt_layers --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 4"
)


def training(data: str, report: Path, *flags: object) -> list[object]:
    return ["-m", "megatron_epp.mcore.pretrain_gpt", *FLAGS, "--data-path", data, "--epp-report-dir", report, *flags]


def finish(data: str, report: Path, *flags: object) -> dict[int, float]:
    """Train to the end in forked ranks and return the exact loss of every iteration."""
    finished = launch(2, *training(data, report, *flags), timeout_s=240)
    assert finished.returncode == 0, finished.output[-5000:]
    return losses(report)


def kill_ranks() -> None:
    """End the ranks and all that they have started, as a lost machine does: none of them gets to say goodbye."""
    run = [each for rank in forked.ranks() for each in (rank, *rank.children(recursive=True))]
    assert run
    for each in run:
        each.kill()


def losses(report: Path) -> dict[int, float]:
    path = report / "iterations.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last one may be half-written
    return {line["iteration"]: line["loss"] for line in map(json.loads, lines)}


def kill_in_iteration(data: str, report: Path, iteration: int, *flags: object) -> None:
    """Train in forked ranks and kill them as soon as they are seen to have done an iteration."""
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(launch, 2, *training(data, report, *flags), timeout_s=240)
        while max(losses(report), default=0) < iteration:
            if run.done():
                pytest.fail(f"the run did not get to iteration {iteration}:\n{run.result().output[-5000:]}")
            time.sleep(0.02)
        kill_ranks()
        assert run.result().returncode == -signal.SIGKILL


def test_a_killed_run_resumes_bitwise(tmp_path: Path) -> None:
    """Plans are made from learnt times, which no second run measures alike: they have to come from the checkpoint folder.

    The run that is killed has the costs of one before, whose folder it does not save to.

    Dropout is on, and evaluation runs in between: random states and consumed samples have to come back too. The first documents
    are several sequences each.
    """
    lengths = [700, 450, 386, *long_tailed_lengths(60, 250)]
    data = write_pair(tmp_path / "documents", documents_of(lengths, vocab_size=255))
    checkpoints, learnt, learning = tmp_path / "checkpoints", tmp_path / "learnt", ("--epp-costs", "learn")
    first: Sequence[object] = ("--save", tmp_path / "first", "--save-interval", 9, "--train-iters", WARM_UP + RECORDED)
    finish(data, tmp_path / "first", *learning, *first)
    learnt.mkdir()
    (tmp_path / "first" / FILE_NAME).rename(learnt / FILE_NAME)
    saving: Sequence[object] = ("--save", checkpoints, "--save-interval", INTERVAL, *learning)
    kill_in_iteration(data, tmp_path / "killed", KILLED, *saving, "--load", learnt)
    before = losses(tmp_path / "killed")
    saved = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    assert saved in range(INTERVAL, ITERATIONS, INTERVAL)
    uninterrupted = finish(data, tmp_path / "whole", *learning, "--load", learnt)
    after = finish(data, tmp_path / "resumed", *saving, "--load", checkpoints)
    print(f"\nkilled after iteration {max(before)}, resumed from {saved}: {after}")
    assert sorted(uninterrupted) == list(range(1, ITERATIONS + 1))
    assert sorted(after) == list(range(saved + 1, ITERATIONS + 1))
    assert before == {i: uninterrupted[i] for i in before}
    assert after == {i: uninterrupted[i] for i in after}
    assert len(set(uninterrupted.values())) == ITERATIONS
