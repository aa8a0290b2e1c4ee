"""Interrupt trainings at random moments, go on from their checkpoints, and compare every loss: a trial for each seed.

A trial draws the number of ranks, what happens, to which process, and when: after
some iteration, or inside a save. The run has to end by itself, and leave no process and no temporary file; a run whose planning
process ends goes on. Then it is resumed, and its losses have to be those of a run that nothing has happened to, to the bit.
"""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.calls import wait_for
from tests.support.mcore.launch import ENVIRONMENT, TINY
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

ITERATIONS, INTERVAL = 40, 6
LIMIT_S = 240
"""Time limit in seconds for a run to end by itself: 30 of waiting, 30 that torchrun gives its ranks, and a start."""
PLANNER_NICENESS = 1
"""The planning process is nicer than its rank by at least so much."""
TORCHRUN = [sys.executable, "-m", "megatron_epp.tools.launch.torchrun", "--standalone"]
HAPPENINGS = ("a rank killed", "a rank stopped", "all ranks killed", "launcher killed", "launcher terminated", "planner killed")
FLAGS = [flag for flag in TINY if flag != "--mock-data"]
FLAGS += ["--epp", "--micro-batch-size", 1, "--split", "100,0,0", "--eval-iters", 0, "--log-interval", 1]
FLAGS += ["--train-iters", ITERATIONS, "--epp-slices", 2, "--epp-wait-limit-seconds", 30, "--epp-save-limit-seconds", 30]
PARALLEL = {2: ["--pipeline-model-parallel-size", 2], 4: ["--pipeline-model-parallel-size", 2, "--use-distributed-optimizer"]}


def alive(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has ended, or is of another user
            pass
    return found


def files(folder: Path) -> list[Path]:
    return [path for pattern in ("pymp-*", "epp-*") for path in folder.glob(pattern)]


@dataclass(frozen=True, slots=True)
class Trial:
    """One of `HAPPENINGS` to a run's rank `victim`, so long behind an iteration, or behind the first sight of the next
    checkpoint's folder (`in_save`); `saves_aside`, where processes of their own write checkpoints.
    """

    ranks: int
    saves_aside: bool
    happening: str
    victim: int
    iteration: int
    in_save: bool
    delay_s: float


def trial_of(seed: int) -> Trial:
    draw = random.Random(seed)
    ranks = draw.choice((2, 4))
    iteration, in_save = draw.randint(1, ITERATIONS - 10), draw.random() < 0.4
    delay_s = draw.random() * (0.05 if in_save else 0.3)
    aside = draw.random() < 0.3
    return Trial(ranks, aside, draw.choice(HAPPENINGS), draw.randrange(ranks), iteration, in_save, delay_s)


class Starter:
    """Starts trainings, with temporary files in a folder of its own, whose path is short enough for those of sockets."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1)
        self.launcher: subprocess.Popen[bytes] | None = None
        self._before: set[int] = set()
        self._files: set[Path] = set()

    def start(self, trial: Trial, log: Path, arguments: list[object]) -> Future[int | None]:
        """Start a training. The result is its exit code, None where it had to be ended after `LIMIT_S`."""
        command = ["-m", "megatron_epp.mcore.pretrain_gpt", *map(str, arguments)]
        environment = ENVIRONMENT | {"TMPDIR": str(self._folder)}
        self._before, self._files = {process.pid for process in alive(self._folder)}, set(self._folder.iterdir())
        launcher = [*TORCHRUN, "--nproc-per-node", str(trial.ranks)]
        with log.open("ab") as output:
            self.launcher = subprocess.Popen([*launcher, *command], env=os.environ | environment, stdout=output, stderr=output)
        return self._pool.submit(_waited, self.launcher)

    def alive(self) -> list[psutil.Process]:
        """Processes that have this folder, but for those that were there before the training."""
        return [process for process in alive(self._folder) if process.pid not in self._before]

    def ranks(self) -> list[psutil.Process]:
        return sorted(psutil.Process(self.launcher.pid).children(), key=lambda process: process.pid)

    def left(self) -> list[str]:
        """Temporary files of multiprocessing and of this package; a start removes those of a launcher that was killed."""
        script = self._folder / "script.py"
        script.touch()
        environment = os.environ | ENVIRONMENT | {"TMPDIR": str(self._folder)}
        subprocess.run([*TORCHRUN, str(script)], env=environment, check=True, timeout=LIMIT_S)
        return sorted(path.name for path in set(files(self._folder)) - self._files)


def _waited(launcher: subprocess.Popen[bytes]) -> int | None:
    try:
        return launcher.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def losses(report: Path) -> dict[int, float]:
    path = report / "iterations.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {line["iteration"]: line["loss"] for line in map(json.loads, lines)}


def interrupt(starter: Starter, trial: Trial) -> None:
    ranks = starter.ranks()
    assert len(ranks) == trial.ranks, ranks
    rank = ranks[trial.victim]
    match trial.happening:
        case "a rank killed":
            rank.kill()
        case "a rank stopped":
            rank.suspend()
        case "all ranks killed":
            for each in [each for one in ranks for each in (*one.children(recursive=True), one)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        case "planner killed":
            nice = [each for one in ranks for each in one.children() if each.nice() - one.nice() >= PLANNER_NICENESS]
            assert nice, "no planning process found"
            nice[trial.victim % len(nice)].kill()
        case _:
            starter.launcher.send_signal(signal.SIGKILL if "killed" in trial.happening else signal.SIGTERM)


def outcome(trial: Trial, starter: Starter, folder: Path, data: str, whole: dict[int, float]) -> Iterator[str]:
    """Run a trial in an empty folder; yield its faults, beside the losses of a run that nothing happens to."""
    saved, log = folder / "saved", folder / "log"
    arguments: list[object] = [*FLAGS, *PARALLEL[trial.ranks], "--data-path", data, "--save", saved, "--load", saved]
    arguments += ["--save-interval", INTERVAL, *(["--async-save"] if trial.saves_aside else [])]
    running = starter.start(trial, log, [*arguments, "--epp-report-dir", folder / "first"])
    wait = functools.partial(wait_for, limit_s=LIMIT_S, pause_s=0.005)
    wait(lambda: running.done() or max(losses(folder / "first"), default=0) >= trial.iteration, what="iterations are done")
    if trial.in_save:
        known = set(saved.glob("iter_*"))
        wait(lambda: running.done() or set(saved.glob("iter_*")) - known, what="a save has begun")
    time.sleep(trial.delay_s)
    if running.done():
        yield f"it ended before anything happened: {log.read_text()[-3000:]}"
        return
    interrupt(starter, trial)
    code = running.result()
    if code is None:
        yield f"it did not end: {log.read_text()[-3000:]}"
    if (code == 0) != (trial.happening == "planner killed"):
        yield f"exit code {code}: {log.read_text()[-3000:]}"
    with contextlib.suppress(AssertionError):
        wait(lambda: not starter.alive(), what="processes have ended")
    yield from (f"process lives on: {process.cmdline()}" for process in starter.alive())
    yield from (f"temporary file is left: {name}" for name in starter.left())
    again: dict[int, float] = {}
    if code != 0:
        resumed = starter.start(trial, log, [*arguments, "--epp-report-dir", folder / "again"])
        if resumed.result() != 0:
            yield f"the resumed run fails: {log.read_text()[-3000:]}"
        again = losses(folder / "again")
    for found in (losses(folder / "first"), again):
        yield from (f"iteration {i}: loss {loss}, not {whole[i]}" for i, loss in found.items() if loss != whole[i])
    if max({**losses(folder / "first"), **again}) != ITERATIONS:
        yield "it did not get to its end"


def faults_of_trials(seeds: range, top: Path, short: Path) -> Iterator[str]:
    """Yield what is wrong with trials in an empty folder, and in another as a `Starter` takes it."""
    data = write_pair(top / "text", documents_of(long_tailed_lengths(64, longest=33), vocab_size=127))
    starter, whole = Starter(short), dict[int, dict[int, float]]()
    for seed in seeds:
        trial, folder = trial_of(seed), top / str(seed)
        folder.mkdir()
        if trial.ranks not in whole:
            report = top / f"whole-{trial.ranks}"
            arguments = [*FLAGS, *PARALLEL[trial.ranks], "--data-path", data, "--epp-report-dir", report]
            starter.start(Trial(trial.ranks, False, "", 0, 0, False, 0.0), folder / "whole", arguments).result()
            whole[trial.ranks] = losses(report)
            assert len(set(whole[trial.ranks].values())) == ITERATIONS, (folder / "whole").read_text()[-3000:]
        yield from (f"{trial}: {fault}" for fault in outcome(trial, starter, folder, data, whole[trial.ranks]))
