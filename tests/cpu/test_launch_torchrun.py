"""The launcher around torchrun: a folder for its processes while it runs, and one line when one of them fails."""

import os
import subprocess
import sys

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from megatron_epp.launch import lifetime
from megatron_epp.launch.lifetime import FOLDER_VARIABLE
from megatron_epp.tools.launch import torchrun

ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture
def launched(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in (FOLDER_VARIABLE, *ALLOCATOR):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

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


EXPANDABLE, SPLIT = "expandable_segments:True", "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("version", "by_user", "expected"),
    [
        ("2.6.0a0+ecf3bae40a.nv25.01", {}, {ALLOCATOR[1]: EXPANDABLE}),
        ("2.9.1", {}, {ALLOCATOR[0]: EXPANDABLE}),
        ("2.13.0", {ALLOCATOR[0]: SPLIT}, {ALLOCATOR[0]: SPLIT}),
        ("2.13.0", {ALLOCATOR[1]: SPLIT}, {ALLOCATOR[1]: SPLIT}),
    ],
)
def test_segments_of_gpu_memory_expand_by_the_name_that_torch_reads_unless_the_user_says_otherwise(
    launched, monkeypatch, version, by_user, expected
):
    seen = []
    monkeypatch.setattr(torchrun, "version_of", lambda package: version)
    for name, value in by_user.items():
        monkeypatch.setenv(name, value)
    launched(lambda arguments: seen.append({name: os.environ[name] for name in ALLOCATOR if name in os.environ}))
    assert seen == [expected]


def test_a_refusal_is_the_launchers_last_word_once_for_all_ranks(launched, monkeypatch, tmp_path, capsys):
    files = [tmp_path / f"{rank}.json" for rank in range(2)]

    def refuse(arguments):
        for rank, file in enumerate(files):
            monkeypatch.setenv(lifetime.FILE_VARIABLE, str(file))
            assert lifetime.hand_over(f"megatron_epp, rank {rank}: too few layers\nLower --stages.", 3)  # the rank is silent
        failures = {rank: ProcessFailure(rank, 1, 1, str(file)) for rank, file in enumerate(files)}
        raise ChildFailedError("script", failures)

    with pytest.raises(SystemExit) as ended:
        launched(refuse)
    assert ended.value.code == 3
    assert capsys.readouterr().err.endswith("megatron_epp, rank 0: too few layers\nLower --stages.\n")


def test_under_a_users_own_torchrun_its_summary_has_the_refusal_and_the_rank_prints_it_too(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv(lifetime.FILE_VARIABLE, str(tmp_path / "error.json"))
    assert not lifetime.hand_over("megatron_epp, rank 0: too few layers", 1)
    failed = ChildFailedError("script", {0: ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))})
    assert "megatron_epp, rank 0: too few layers" in str(failed).splitlines()[-2]
    monkeypatch.delenv(lifetime.FILE_VARIABLE)
    assert not lifetime.hand_over("without torchrun it is printed as well", 1)


PRINTED = """\
no GPU found: Megatron runs on the CPU
WARNING:megatron_epp.mcore.patches.environment:not installed
/site-packages/megatron/core/optimizer.py:25: UserWarning: Apex is not installed
  epp_lookahead ................................... 3
INFO:megatron.core.timers:(min, max) time across ranks (ms):
INFO:megatron_epp.mcore.data:train text: 6 documents
WARNING:megatron.core.rerun_state_machine:Result validation enabled
WARNING: Setting args.overlap_p2p_comm to False
 [2026-11-25 03:15:16.416518] iteration        1/       3 | consumed samples:            4 | lm loss: 5.9E+00 |
[rank1]: ValueError: no such thing
  successfully saved checkpoint from iteration       2 to a
 validation loss at iteration 3 on validation set | lm loss value: 5.8E+00 |
"""
SHORT = (0, 1, 5, 7, 8, 10, 11)
"""Lines of these that are shown."""


@pytest.fixture
def logged(launched, monkeypatch, tmp_path):
    """Runs the launcher with a file for all output, and a stand-in for torchrun whose process prints."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "")

    def run(outcome=None, path=tmp_path / "train.log"):
        monkeypatch.setenv(torchrun.LOG_VARIABLE, str(path))

        def main(arguments):
            subprocess.run([sys.executable, "-c", f"import sys; sys.stderr.write({PRINTED!r})"], check=True)
            assert torchrun.LOG_VARIABLE not in os.environ
            if outcome is not None:
                raise outcome

        launched(main)

    return run


def test_the_terminal_gets_the_short_form_and_a_file_everything(logged, tmp_path, capfd):
    logged()
    lines = PRINTED.splitlines()
    assert capfd.readouterr().out.splitlines() == [lines[number] for number in SHORT]
    os.write(1, b"and the terminal is there again\n")
    assert capfd.readouterr().out == "and the terminal is there again\n"
    logged()
    assert (tmp_path / "train.log").read_text() == 2 * PRINTED, "a run that goes on appends"


def test_on_a_failure_the_last_lines_are_shown_with_the_path_of_all(logged, tmp_path, capfd):
    with pytest.raises(SystemExit, match="megatron-epp: rank 3 failed first"):
        logged(ChildFailedError("script", {3: ProcessFailure(local_rank=1, pid=1, exitcode=7, error_file="none")}))
    error = capfd.readouterr().err
    path = tmp_path / "train.log"
    assert error == f"--- the last lines of {path} ---\n{PRINTED.rstrip()}\n--- all of it is in {path} ---\n"


def test_a_log_that_cannot_be_written_is_refused_with_what_to_set(logged):
    says = r"/proc/nowhere/a.log cannot be written .*: set launch.folder, or launch.full_log=true"
    with pytest.raises(SystemExit, match=says):
        logged(path="/proc/nowhere/a.log")
