"""Bad input ends a run with one or two lines that name what to change, an exit code, and nothing half-written."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_epp.launch.run_folder import LOCK
from megatron_epp.mcore.arguments.table import names_in_loop
from megatron_epp.mcore.entry import errors_in_one_line
from megatron_epp.plan.errors import EppError, Names, Remedy
from tests.support.mcore.forked import launch
from tests.support.mcore.launch import Finished

FLAGS = shlex.split(
    "--transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 "
    "--global-batch-size 4 --lr 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size 257 "
    "--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --eval-interval 1000 --train-iters 2 --split 100,0,0"
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    prefix = tmp_path_factory.mktemp("documents") / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for i in range(16):
        builder.add_document(torch.arange(40 + i) % 256, [40 + i])
    builder.finalize(f"{prefix}.idx")
    return prefix


def train(prefix: Path, *flags: object, num_processes: int = 1) -> Finished:
    command = ["-m", "megatron_epp.mcore.pretrain_gpt", *FLAGS, "--seq-length", 64, "--data-path", prefix, "--epp"]
    return launch(num_processes, *command, *flags)


@pytest.mark.parametrize(
    ("names", "said"), [({}, "raise --epp-memory-cap-gb"), (names_in_loop(["memory_cap_gb"]), "raise memory_cap_gb")]
)
def test_the_line_at_the_end_of_a_process_has_the_names_of_who_started_it(names: Names, said: str) -> None:
    with pytest.raises(SystemExit, match=f"no plan; {said} to 1.00"), errors_in_one_line():
        raise EppError("no plan", Remedy("raise", "cap_bytes", 1 << 30)).with_context(names=names)


def message(finished: Finished) -> str:
    """The two lines a refused run leaves for its user; fails unless there is an exit code and no traceback of the script."""
    assert finished.returncode != 0, finished.output[-3000:]
    lines = finished.output.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("megatron_epp, rank")), None)
    assert first is not None, finished.output[-3000:]
    assert "pretrain_gpt.py" not in "".join(re.findall(r"Traceback.*?Error", finished.output, re.DOTALL))
    return " ".join(lines[first : first + 2])


def test_a_truncated_index_is_refused(documents, tmp_path):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"cut{suffix}").write_bytes(Path(f"{documents}{suffix}").read_bytes())
    index = tmp_path / "cut.idx"
    index.write_bytes(index.read_bytes()[:-20])
    assert "cut.idx" in message(train(tmp_path / "cut"))


def test_a_cap_below_the_minimum_names_the_smallest_cap_which_then_trains(documents, tmp_path):
    text = message(train(documents, "--epp-memory-cap-gb", 1e-5, "--epp-report-dir", tmp_path / "report"))
    assert "--epp-memory-cap-gb" in text
    assert [path.name for path in (tmp_path / "report").iterdir()] == [LOCK], "no report of a training that did not begin"
    smallest = float(re.search(r"--epp-memory-cap-gb to ([\d.]+),", text)[1])
    # of the batch that the message is about: later ones may need more
    assert train(documents, "--epp-memory-cap-gb", smallest, "--train-iters", 1).returncode == 0


def test_a_nan_in_the_loss_ends_the_run_as_megatron_ends_it(documents):
    finished = train(documents, "--lr", 1e30, "--clip-grad", 0, "--rerun-mode", "validate_results", "--train-iters", 4)
    assert finished.returncode != 0
    assert re.search(r"found (NaN|Inf) in (the loss|local)", finished.output), finished.output[-3000:]


def test_a_nan_in_the_loss_saves_the_batch_to_run_again_as_megatron_does(documents, tmp_path):
    """Megatron's rerun machine exits with 16 to be started on another device, and with the batch in the checkpoint."""
    breaks = ("--lr", 1e30, "--clip-grad", 0, "--train-iters", 4, "--save", tmp_path, "--save-interval", 100)
    finished = train(documents, *breaks)
    assert finished.returncode == 16, finished.output[-3000:]
    assert "Traceback" not in finished.output
    assert "successfully saved checkpoint" in finished.output
    again = train(documents, *breaks, "--load", tmp_path)
    assert "Will rerun step" in again.output
    assert "Got rescheduled on the same GPU" in again.output, again.output[-3000:]  # the saved batch has given the same loss
    assert again.returncode == 16
