"""A rank that runs out of memory ends the run with what to change. Every process group has the run's time limit."""

import json
import re
from pathlib import Path

import pytest

from tests.support.mcore.forked import job
from tests.support.mcore.jobs.oom import CASES, FAILING_RANK, LENGTHS, LIMIT_MINUTES, VOCABULARY
from tests.support.mcore.launch import Finished
from tests.support.mcore.synthetic_documents import documents_of, write_pair


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
    assert re.search(
        r"action 1B\d+ failed: out of memory on stage 1, chunk \d+: \d+ tokens, 2 layers, recompute: none", lines[0]
    )
    assert re.search(
        r"planned for the rank at this action: .* [KMG]iB, with no cap; in use: .* [KMG]iB, and .* [KMG]iB more wanted",
        lines[1],
    )
    assert re.fullmatch(r"most likely to help: --epp-memory-cap-gb \S+ or --epp-chunk-tokens \d+", lines[2])
    assert "OutOfMemoryError" not in finished.output
    assert f"rank 0 ends, since rank {FAILING_RANK} failed: pipeline rank 1" in finished.output
