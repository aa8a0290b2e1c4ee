"""A rank that runs out of memory ends the run with what to change; with `--epp-oom-retry` it costs a second try."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mcore.forked import launch
from tests.support.mcore.launch import Finished
from tests.support.mcore.oom_cases import CASES, FAULT_ITERATION, ITERATIONS, LENGTHS, LIMIT_MINUTES, VOCABULARY
from tests.support.mcore.synthetic_documents import documents_of, write_pair

WORKER = "tests.support.mcore.oom_worker"
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Trained:
    """What all ranks of a run did, and its report's lines."""

    ranks: list[dict[str, Any]]
    lines: list[dict[str, Any]]

    def of(self, what: str) -> list[Any]:
        return next((rank[what] for rank in self.ranks if rank[what]), [])


def start(folder: Path, *names: str) -> Finished:
    data = write_pair(folder / "documents", documents_of([n + 1 for n in LENGTHS], vocab_size=VOCABULARY))
    environment = {"OOM_DATA": data, "OOM_FOLDER": str(folder), "OOM_CASES": "; ".join(names)}
    return launch(2, "-m", WORKER, env=environment, timeout_s=400)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Callable[[str], Trained], str]:
    """Every case but the one that ends the run, and what they printed."""
    folder = tmp_path_factory.mktemp("oom")
    finished = start(folder, *(name for name in CASES if name != "ends"))
    assert finished.returncode == 0, finished.output[-5000:]

    def of(name: str) -> Trained:
        ranks = [torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1)]
        return Trained(ranks, [json.loads(line) for line in (folder / name / "iterations.jsonl").read_text().splitlines()])

    return of, finished.output


@pytest.mark.parametrize("name", [name for name in CASES if name + ", again" in CASES])
def test_a_second_try_trains_as_if_nothing_had_happened(trained: Any, name: str) -> None:
    of, _ = trained
    undisturbed, tried = of(name), of(f"{name}, again")
    # Of the pipeline the second plan has the chunks of the first in the same order; of the replicas it adds up in another.
    tolerance = 0.0 if name == "pipeline" else TOLERANCE
    assert len(tried.of("losses")) == ITERATIONS
    assert tried.of("losses") == pytest.approx(undisturbed.of("losses"), rel=tolerance)
    assert tried.of("validation") == pytest.approx(undisturbed.of("validation"), rel=tolerance)
    assert apart(undisturbed, tried) <= tolerance


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(", again")])
def test_every_process_group_has_the_runs_time_limit(trained: Any, name: str) -> None:
    of, _ = trained
    assert any("_planning_ranks" in rank["limits_s"] for rank in of(name).ranks)
    for rank in of(name).ranks:
        assert {"activations", "gradients", "reports", "control", "_all_ranks"} <= rank["limits_s"].keys()
        assert set(rank["limits_s"].values()) == {60.0 * LIMIT_MINUTES}


def apart(expected: Trained, found: Trained) -> float:
    """Norm of the difference of all weights over their norm."""
    square, whole = 0.0, 0.0
    for one, other in zip(expected.ranks, found.ranks, strict=True):
        assert one["final"].keys() == other["final"].keys()
        square += sum(float((other["final"][name] - tensor).norm()) ** 2 for name, tensor in one["final"].items())
        whole += sum(float(tensor.norm()) ** 2 for tensor in one["final"].values())
    return math.sqrt(square / whole)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(", again")])
def test_the_iteration_runs_again_below_a_lower_cap_which_stays(trained: Any, name: str) -> None:
    of, _ = trained
    tried = of(name)
    plans = tried.ranks[0]["plans"]
    assert len(plans) == ITERATIONS + 1
    caps = [cap for cap, _ in plans]
    assert caps[0] == caps[FAULT_ITERATION - 1]
    faulty = CASES[name].fails
    assert caps[FAULT_ITERATION][faulty] < caps[0][faulty]
    assert set(caps[FAULT_ITERATION:]) == {caps[FAULT_ITERATION]}
    assert all(plans[i][1][faulty] < plans[FAULT_ITERATION - 1][1][faulty] for i in range(FAULT_ITERATION, len(plans)))
    assert [line["oom_retries"] for line in tried.lines] == [0] * (FAULT_ITERATION - 1) + [1] * (
        ITERATIONS - FAULT_ITERATION + 1
    )


def test_the_log_tells_of_both_tries_and_counts_them(trained: Any) -> None:
    _, output = trained
    assert re.search(r"action 1B\d+ failed: out of memory on stage 1, chunk \d+: ", output)
    assert f"out of memory in iteration {FAULT_ITERATION}: it runs again, and from now on plans are made for caps of" in output
    assert "retries after running out of memory: 1" in output


def test_without_the_flag_the_run_ends_with_bytes_and_flags(tmp_path: Path) -> None:
    finished = start(tmp_path, "ends")
    assert finished.returncode != 0
    first = finished.output.index(f"megatron_epp, rank {CASES['ends'].fails}: pipeline rank 1")
    lines = finished.output[first:].splitlines()[:3]
    assert re.search(
        r"action 1B\d+ failed: out of memory on stage 1, chunk \d+: \d+ tokens, 2 layers, recompute: none", lines[0]
    )
    assert re.search(
        r"planned for the rank at this action: .* GiB, with no cap; in use: .* GiB, and .* GiB more wanted", lines[1]
    )
    assert re.fullmatch(r"most likely to help: --epp-memory-cap-gb \S+ or --epp-chunk-tokens \d+", lines[2])
    assert "OutOfMemoryError" not in finished.output
