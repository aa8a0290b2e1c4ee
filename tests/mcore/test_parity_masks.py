"""Training with a mask of trained tokens: as Megatron's own schedule with the same mask, also if there is nothing to train."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_epp.data.sampler import GlobalBatchSampler
from scripts.parity.cells import CONTEXT, LENGTHS, MODELS, VOCABULARY, common_flags
from tests.support.mcore.forked import RECORDER, launch
from tests.support.mcore.parity_figures import Figures, check_closeness, masked_documents, parity_of

ITERATIONS = 2
SEED = 1234
NUM_TRAINING = round(0.8 * len(LENGTHS))
"""Documents of the training split; the others are for validation."""
MASKED, FEW = "part of every document", "one of two replicas"


def batches_of(size: int, count: int) -> list[tuple[int, ...]]:
    """The documents of a run's first batches."""
    sampler = GlobalBatchSampler(NUM_TRAINING, size, seed=SEED)
    return [next(sampler) for _ in range(count)]


def whole(documents: set[int]) -> list[np.ndarray]:
    """Masks of documents that are trained as a whole or not at all."""
    return [np.full(length + 1, number in documents) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figures]:
    folder = tmp_path_factory.mktemp("parity")
    random = np.random.RandomState(5)
    masked = masked_documents(folder / "masked", [random.rand(length + 1) < 0.3 for length in LENGTHS])
    first_of_each = {batch[0] for batch in batches_of(2, ITERATIONS)}
    few = masked_documents(folder / "few", whole(first_of_each | set(range(NUM_TRAINING, len(LENGTHS)))))
    cases = {
        MASKED: {
            "cell": {"pp": 2},
            "model": "llama",
            "plan": "--epp-slices 3 --epp-loss-block-tokens 5",
            "both": f"--data-path {masked} --seed {SEED}",
        },
        FEW: {
            "cell": {"dp": 2},
            "model": "gpt2",
            "plan": "--epp-slices 3",
            "both": f"--data-path {few} --seed {SEED} --global-batch-size 2",
        },
    }
    return parity_of(folder, cases, ITERATIONS)


def test_plans_train_the_masked_labels_that_the_stock_schedule_trains(figures: dict[str, Figures]) -> None:
    check_closeness(figures[MASKED])
    (plans,) = figures[MASKED]["plans"]
    assert any(kind in ("split", "hybrid") for plan in plans for kind in plan["kinds"])


def test_a_replica_without_a_trained_token_trains_as_the_stock_schedule_does(figures: dict[str, Figures]) -> None:
    check_closeness(figures[FEW])
    assert [[plan["sequences"] for plan in replica] for replica in figures[FEW]["plans"]] == [[1] * ITERATIONS] * 2


def train(folder: Path, data: str, schedule: str) -> tuple[dict[str, dict[str, float]], str]:
    """Train on two replicas. Returns every iteration's loss and norm of gradients, and the log."""
    folder.mkdir()
    flags = [*common_flags(3, CONTEXT, 4, validates=True), *shlex.split(MODELS["llama"]), "--data-path", data]
    flags += ["--seed", SEED, "--log-interval", 1, "--use-distributed-optimizer", "--epp-schedule", schedule]
    done = launch(2, RECORDER, *flags, "--epp-report-dir", folder, env={"RECORD_TO": str(folder)})
    assert done.returncode == 0, done.output[-5000:]
    return json.loads((folder / "rank1.json").read_text())["steps"], done.output


def test_a_batch_without_a_trained_token_is_reported_as_0_and_the_run_goes_on(tmp_path: Path) -> None:
    first, _, third = batches_of(4, 3)
    data = masked_documents(tmp_path / "data", whole({*first, *third}))
    steps, reported = {}, {}
    for schedule in ("elastic", "stock"):
        steps[schedule], log = train(tmp_path / schedule, data, schedule)
        lines = (tmp_path / schedule / "iterations.jsonl").read_text().splitlines()
        reported[schedule] = [json.loads(line)["loss"] for line in lines]
        assert log.count("number of nan iterations:   0") == 3
        told = "none of the 4 sequences up to sample 8 has a trained token: their loss and gradients are 0"
        assert log.count(told) == (schedule == "elastic")
        assert re.search(r"validation loss .* lm loss value: 0\.0+E\+00", log)
    for schedule, found in steps.items():
        assert found["2"] == {"loss": 0.0, "grad_norm": 0.0}
        assert reported[schedule] == pytest.approx([found[number]["loss"] for number in ("1", "2", "3")], rel=1e-6)
        for number in ("1", "3"):
            assert found[number]["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.2)
            assert found[number] == pytest.approx(steps["stock"][number], rel=1e-5)
