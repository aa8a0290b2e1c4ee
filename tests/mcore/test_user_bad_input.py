"""A caller's mistakes, and a rank without memory, end every rank with a line that names the cause, before weights change."""

import json
import re
from pathlib import Path

import pytest

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
    environment = {"RECORD_TO": str(tmp_path)}
    finished = launch(4, CHANGED, "failing", *flags, env=environment, timeout_s=SECONDS)
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
