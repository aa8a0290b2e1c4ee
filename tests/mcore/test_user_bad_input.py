"""Bad input, a caller's mistakes and a rank without memory end every rank with a line that names the cause."""

import json
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
from tests.support.mcore.forked import CHANGED, job, launch
from tests.support.mcore.jobs.oom import CASES, FAILING_RANK, LENGTHS, LIMIT_MINUTES, VOCABULARY
from tests.support.mcore.launch import TINY, Finished
from tests.support.mcore.synthetic_documents import documents_of, write_pair

SECONDS = 120
"""Far less than any time limit of messages."""

DIFFER = "differ between ranks of a replica: microbatch 1 has 8 tokens in 1 sequences on rank 0 and 16 in 1 on rank 1"


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("pipeline, microbatches differ", DIFFER),
        ("tensor parallel, microbatches differ", DIFFER),
        ("two iterators", "there are 2 data iterators for 1 model chunks"),
        ("one too few", "rank 0: the data iterator ended after 6 of 7 microbatches; rank 1: the data iterator ended"),
    ],
)
def test_what_ranks_can_agree_on_beforehand_is_refused_alike_on_all(case: str, cause: str) -> None:
    finished = job(2, "frameworks:wrong", case=case, timeout_s=SECONDS)
    assert finished.returncode == 1
    for rank in (0, 1):
        assert f"rank {rank}: weights are as they were" in finished.output
        (line,) = [line for line in finished.output.splitlines() if line.startswith(f"megatron_epp, rank {rank}: ")]
        assert cause in line
    assert "stepped" not in finished.output


@pytest.mark.parametrize(
    ("case", "failing", "cause"),
    [
        ("other lengths", 0, r"0F0 failed: .* \[24, 1, 16\] where lengths \[48\] ask for \[48, 1, 16\]: give .*, shape_of"),
        ("another type", 0, "0F0 failed: .* made torch.float64, .* are torch.float32: set pipeline_dtype"),
        ("four values", 1, r"1F0 failed: .* returned 4 values: a plan needs \(loss, report\) or \(loss, num_tokens, report\)"),
        ("one number for each token", 1, r"1F0 failed: the loss of microbatch 0 is of shape \[1, 24\], not a tensor of one"),
        ("tensor parallel, fails on rank 1", 1, "0F3 failed: ValueError: this sample has no image"),
    ],
)
def test_what_fails_on_one_rank_ends_the_other_with_its_cause(case: str, failing: int, cause: str) -> None:
    finished = job(2, "frameworks:wrong", case=case, timeout_s=SECONDS)
    assert finished.returncode == 1
    place = f"pipeline rank {0 if 'tensor' in case else failing}, step"
    said = [line for line in finished.output.splitlines() if re.search(cause, line)]
    assert [line for line in said if line.startswith(f"megatron_epp, rank {failing}: {place}")]
    other = f"rank {1 - failing} ends, since rank {failing} failed: {place}"
    assert [line for line in said if other in line]
    assert f"rank {failing}: weights are as they were" in finished.output
    assert "changed" not in finished.output
    assert "stepped" not in finished.output


def test_what_fails_in_one_replica_ends_the_others_too(tmp_path: Path) -> None:
    """They would wait for its gradients."""
    flags = [*TINY, "--train-iters", 5, "--pipeline-model-parallel-size", 2, "--epp", "--epp-microbatches", "user"]
    finished = launch(4, CHANGED, "failing", *flags, env={"RECORD_TO": str(tmp_path)}, timeout_s=SECONDS)
    assert finished.returncode == 1
    cause = "pipeline rank 1, step 2, action 1F0 failed: ValueError: this sample has no image"
    assert f"megatron_epp, rank 3: {cause}" in finished.output
    for rank in range(3):
        assert f"rank {rank} ends, since rank 3 failed: {cause}" in finished.output
    assert " iteration        2/" in finished.output
    assert " iteration        3/" not in finished.output


SAID = (
    r"action 1B\d+ failed: out of memory on stage 1, chunk \d+: \d+ tokens, 2 layers, recompute: none",
    r"planned for the rank at this action: .* [KMG]iB, with no cap; in use: .* [KMG]iB, and .* [KMG]iB more wanted",
    r"^most likely to help: --epp-memory-cap-gb \S+ or --epp-chunk-tokens \d+$",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oom")


@pytest.fixture(scope="module")
def finished(folder: Path) -> Finished:
    data = write_pair(folder / "documents", documents_of([n + 1 for n in LENGTHS], vocab_size=VOCABULARY))
    return job(2, "oom", data=data, folder=folder, timeout_s=400)


@pytest.mark.parametrize("name", CASES)
def test_every_process_group_has_the_runs_time_limit(finished: Finished, folder: Path, name: str) -> None:
    limits_s = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]
    assert any("planning_ranks" in of_rank for of_rank in limits_s)
    for of_rank in limits_s:
        assert {"activations", "gradients", "figures", "control"} <= of_rank.keys()
        assert set(of_rank.values()) == {60.0 * LIMIT_MINUTES}


def test_the_run_ends_with_bytes_and_flags(finished: Finished) -> None:
    assert finished.returncode != 0
    first = finished.output.index(f"megatron_epp, rank {FAILING_RANK}: pipeline rank 1")
    lines = finished.output[first:].splitlines()[:3]
    for line, said in zip(lines, SAID, strict=True):
        assert re.search(said, line)
    assert "OutOfMemoryError" not in finished.output
    assert f"rank 0 ends, since rank {FAILING_RANK} failed: pipeline rank 1" in finished.output


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
