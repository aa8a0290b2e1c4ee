"""The launcher around torchrun: a folder for its processes while it runs, and one line when one of them fails."""

import os
import sys
from signal import Signals

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_epp.launch import torchrun
from megatron_epp.launch.lifetime import FOLDER_VARIABLE


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Runs the launcher with a stand-in for torchrun's own main."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)

    def run(main, *arguments):
        monkeypatch.setattr(torch.distributed.run, "main", main)
        monkeypatch.setattr(sys, "argv", ["torchrun", *arguments])
        torchrun.main()

    return run


def test_torchrun_gets_the_arguments_and_its_processes_a_folder(launched, tmp_path):
    seen = []
    launched(lambda arguments: seen.append((arguments, os.path.isdir(os.environ[FOLDER_VARIABLE]))), "--nnodes", "1", "script")
    assert seen == [(["--nnodes", "1", "script"], True)]
    assert FOLDER_VARIABLE not in os.environ
    assert not any(tmp_path.iterdir())


def test_a_process_that_fails_is_named_in_one_line(launched):
    def fail(arguments):
        raise ChildFailedError("script", {3: ProcessFailure(local_rank=1, pid=1, exitcode=7, error_file="none")})

    with pytest.raises(SystemExit, match="megatron-epp: rank 3 failed first, with exit code 7: its messages are above"):
        launched(fail)


def test_a_signal_is_named_in_one_line(launched):
    def stop(arguments):
        raise SignalException("stopped", Signals.SIGTERM)

    with pytest.raises(SystemExit, match="megatron-epp: stopped by signal SIGTERM"):
        launched(stop)
