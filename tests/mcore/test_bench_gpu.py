"""The benchmark for GPUs, reduced: every part runs and its figures fit together. None of them is judged.

The runs are in the set `slow`; what is done with their figures is not.
"""

import json
import subprocess
import sys

import pytest

from megatron_epp.launch import runs
from megatron_epp.launch.runs import TrainingError
from megatron_epp.plan import Action
from megatron_epp.report.measured import Event, Measured
from scripts.bench.gpu import bench as bench_gpu
from scripts.bench.gpu import runs as gpu_runs
from scripts.bench.gpu.ranks import TWO, Row, compare
from tests.support.mcore import forked


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-W", "ignore", "-m", "scripts.bench.gpu", "--reduced", "-o", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "report.md").read_text() in done.stdout
    return {row["case"]: row for row in json.loads((folder / "report.json").read_text())["rows"]}


@pytest.mark.slow
def test_every_part_has_run_and_says_how_long_it_took(report):
    assert list(report) == list(bench_gpu.PARTS)
    assert all("failed" not in part and part["seconds"] >= 0 for part in report.values())


@pytest.mark.slow
def test_numbers_in_bf16_are_those_of_megatron(report):
    part = report["parity"]
    assert part["met"], part
    assert all(row["theirs"] > 0 for row in part["rows"].values()), "bf16 and fp32 cannot agree to the bit"


@pytest.mark.slow
def test_sliced_and_unsliced_train_the_same(report):
    part = report["slices"]
    speed = part["tokens_per_second"]
    assert part["sliced_over_unsliced"] == pytest.approx(speed["sliced"] / speed["unsliced"])
    assert part["losses"]["sliced"] == pytest.approx(part["losses"]["unsliced"], rel=1e-4)


@pytest.mark.slow
def test_the_cap_asks_for_recompute_and_the_free_run_does_not(report):
    free, capped = report["peaks"]["rows"].values()
    assert free["recompute_share"] == 0 < capped["recompute_share"]
    assert capped["measured_bytes"] < free["measured_bytes"]
    for row in (free, capped):
        assert row["error"] == pytest.approx(row["planned_bytes"] / row["measured_bytes"] - 1)


@pytest.mark.slow
def test_something_was_offloaded_and_its_copies_were_timed(report):
    part = report["copies"]
    assert part["offload_share"] > 0
    assert part["copies_us"] > 0
    assert 0 <= part["hidden_share"] <= 1


@pytest.mark.slow
def test_plans_raced_packed_rows(report):
    part = report["race"]
    assert part["failures"] == {}
    assert set(part["tokens_per_second"]) == {"plans", "packed, all recomputed", "packed, 1 layers kept"}
    assert part["losses"]["plans"][:3] == pytest.approx(part["losses"]["packed, 1 layers kept"][:3], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ranks-1", "ranks-2", "ranks-4", "loops"])
def test_slices_on_ranks_train_as_whole_sequences(report, part):
    assert report[part]["met"], report[part]


def test_a_training_that_differs_or_fails_is_told_from_one_that_agrees(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_forks", forked.forks)
    rows = {
        "same": Row(2, TWO),
        "other weights": Row(2, TWO, {"seed": 7}),
        "refused": Row(2, TWO, {"epp_slices": 0}),
    }
    found = compare(gpu_runs.Launches(tmp_path, 120), gpu_runs.Sizes.reduced(), rows)
    assert found["same"]["holds"]
    assert not found["other weights"]["holds"]
    assert found["other weights"]["ours"] > 1e-3 > found["other weights"]["allowed"]
    assert "epp-slices" in found["refused"]["failed"]


def test_copies_are_hidden_where_their_own_rank_computes():
    def events(*rows):
        return tuple(Event(Action.parse(text), start, end) for text, start, end in rows)

    first = events(("0F0", 0, 10), ("0O0", 4, 14), ("0L0", 20, 30), ("0B0", 25, 40))
    second = events(("1F0", 10, 20))
    found = bench_gpu.hidden_copies([Measured("", (first, second))])
    assert found == {"copies_us": 20, "hidden_share": (6 + 5) / 20}


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB.", gpu_runs.OutOfMemory),
        ("[rank0]: RuntimeError: something else", TrainingError),
    ],
)
def test_a_run_that_finds_no_memory_is_told_from_one_that_fails(tmp_path, monkeypatch, text, error):
    def train(folder, ranks, settings, limit_s, environment):
        folder.mkdir(parents=True)
        (folder / "train.log").write_text(f"starting\n{text}\nmore\n")
        raise TrainingError("training failed")

    monkeypatch.setattr(gpu_runs, "train", train)
    settings = gpu_runs.Sizes.reduced().settings(64)
    with pytest.raises(error) as raised:
        gpu_runs.Launches(tmp_path, 60).run("long unsliced", settings, (64,))
    if error is gpu_runs.OutOfMemory:
        assert "Tried to allocate 64.00 GiB" in str(raised.value)
