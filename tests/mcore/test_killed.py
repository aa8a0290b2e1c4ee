"""Nothing is left of a training that is killed, and one that is interrupted goes on from its checkpoint to the bit."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_epp.launch.lifetime import FOLDER_VARIABLE
from tests.support.mcore import interruptions
from tests.support.mcore.interruptions import TORCHRUN, alive, files
from tests.support.mcore.launch import ENVIRONMENT, TINY

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


def wait_until(happened: Callable[[], object], tell: Callable[[], object]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end_s, tell()
        time.sleep(0.1)


@pytest.fixture
def run(temporary: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A training that has saved a checkpoint, and so has helper processes: its launcher and its ranks."""
    log = tmp_path / "log"
    command = [*TORCHRUN, "--nproc-per-node", "2", *TRAINING, "--save", str(tmp_path / "saved"), "--save-interval", "3"]
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, env=environment(temporary), stdout=output, stderr=output)
    try:
        wait_until(lambda: (tmp_path / "saved" / SAVED).exists() or launcher.poll() is not None, log.read_text)
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
    wait_until(lambda: not alive(temporary), lambda: [process.cmdline() for process in alive(temporary)])
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
    wait_until(lambda: not alive(temporary), lambda: f"process {pid} lives on")
    assert files(temporary) == []


def test_thirty_trials_have_every_happening_and_moments_inside_a_save() -> None:
    trials = [interruptions.trial_of(seed) for seed in range(30)]
    assert {trial.happening for trial in trials} == set(interruptions.HAPPENINGS)
    assert {trial.ranks for trial in trials} == {2, 4}
    assert {trial.in_save for trial in trials} == {False, True}


@pytest.mark.slow  # minutes; `test_resume.py` and `test_killed.py` have one moment each
def test_no_trial_has_a_fault(tmp_path: Path, temporary: Path) -> None:
    assert list(interruptions.faults_of_trials(range(30), tmp_path, temporary)) == []
