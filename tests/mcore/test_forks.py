"""Jobs of forked processes end as they would alone, in time, and with a reason."""

import threading
import time

import psutil
import pytest

from megatron_epp.contrib.demos.forked_ranks import Forks
from megatron_epp.plan import EppError
from tests.support.mcore.forked import launch

LIGHT = ("gc", "collect")
"""For a process that has not imported Megatron: jobs here do not train."""


def script(folder, text):
    path = folder / "script.py"
    path.write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{text}\n")
    return path


def test_every_rank_runs_the_program_and_what_all_say_is_in_one_log(tmp_path):
    finished = launch(2, script(tmp_path, "print(f'{rank} of {os.environ[\"WORLD_SIZE\"]}, {sys.argv[1:]}')"), "--flag", 7)
    assert finished.returncode == 0
    assert sorted(finished.output.splitlines()) == ["0 of 2, ['--flag', '7']", "1 of 2, ['--flag', '7']"]


def test_without_buffers_too_ranks_do_not_cut_each_others_lines(tmp_path):
    forks, log = Forks({"PYTHONUNBUFFERED": "1"}, LIGHT), tmp_path / "log"
    log.touch()
    forks.run(2, [str(script(tmp_path, "for _ in range(3000): print('of rank', rank)"))], {}, log, 60)
    forks.close()
    assert set(log.read_text().splitlines()) == {"of rank 0", "of rank 1"}


def test_the_first_rank_that_fails_ends_the_job_with_its_exit_code(tmp_path):
    finished = launch(2, script(tmp_path, "sys.exit(3) if rank else time.sleep(600)"))
    assert finished.returncode == 3


def test_a_job_that_takes_longer_than_it_may_is_ended(tmp_path):
    with pytest.raises(AssertionError, match=r"not finished after 0\.5 s:\n0 is up"):
        launch(1, script(tmp_path, "print(rank, 'is up')\ntime.sleep(600)"), timeout_s=0.5)


def test_without_the_process_that_forks_no_rank_lives_on(tmp_path):
    forks, log = Forks({}, LIGHT), tmp_path / "log"
    log.touch()

    def run():
        with pytest.raises(EppError, match="exit code -9"):
            forks.run(2, [str(script(tmp_path, "print(os.getpid(), flush=True)\ntime.sleep(600)"))], {}, log, 600)

    asking = threading.Thread(target=run)
    asking.start()
    wait_until(lambda: log.read_text().count("\n") == 2)
    ranks = [psutil.Process(int(line)) for line in log.read_text().splitlines()]
    forks._process.kill()
    asking.join()
    wait_until(lambda: not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks))
    forks.close()


def wait_until(happened):
    end_s = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.1)
