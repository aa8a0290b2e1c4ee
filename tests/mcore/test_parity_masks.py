"""Batches of which a mask trains nothing: reported as 0, as by Megatron's own schedule. `test_matrix.py` has other masks."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest

from scripts.parity.cells import CONTEXT, MODELS, VOCABULARY, common_flags
from tests.support.mcore.forked import RECORDER, launch
from tests.support.mcore.matrix import SEED, batches_of, whole
from tests.support.mcore.parity_figures import masked_documents


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
