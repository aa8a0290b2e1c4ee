"""How many tokens pass the output layer in training: those that are trained, or one of a chunk without any."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scripts.random_documents import write_documents
from tests.support.mcore.forked import CHANGED, RECORDER, job, launch
from tests.support.mcore.launch import TINY

LENGTHS = [30, 3, 2, 17, 9, 4, 32, 1, 14, 5, 31, 6, 11, 7, 12, 25]
FLAGS = [flag for flag in TINY if flag != "--mock-data"]
FLAGS[FLAGS.index("--micro-batch-size") + 1] = "1"
FLAGS += ["--split", "100,0,0", "--eval-iters", "0", "--train-iters", "2", "--epp", "--epp-slices", "3"]


@pytest.mark.parametrize("block_tokens", [0, 3])
def test_only_trained_tokens_pass_the_output_layer(tmp_path: Path, block_tokens: int) -> None:
    data = write_documents(tmp_path / "data", LENGTHS, 120)
    masks = [np.arange(length + 1) > 0.7 * length for length in LENGTHS]
    np.concatenate(masks).astype(np.uint8).tofile(f"{data}.mask")
    flags = ["--data-path", data, "--epp-loss-block-tokens", block_tokens]
    done = job(1, "rows", flags=[*map(str, (*FLAGS, *flags))], env={"RECORD_TO": str(tmp_path)})
    assert done.returncode == 0, done.output[-5000:]
    found = json.loads((tmp_path / "rows.json").read_text())
    assert 0 in found["trained"]
    assert sum(found["trained"]) < 0.5 * sum(found["tokens"])
    assert sum(found["multiplied"]) == sum(max(1, count) for count in found["trained"])


def test_a_model_that_gathers_its_logits_trains_as_one_that_does_not(tmp_path: Path) -> None:
    """Megatron's loss of whole logits is that of a shard plus the logarithm of the ranks."""
    data = write_documents(tmp_path / "data", LENGTHS, 120)
    flags = [*FLAGS, "--train-iters", 1, "--data-path", data, "--tensor-model-parallel-size", 2]
    trained = []
    for number, program in enumerate(((RECORDER,), (CHANGED, "gathered"))):
        (folder := tmp_path / str(number)).mkdir()
        done = launch(2, *program, *flags, env={"RECORD_TO": str(folder)})
        assert done.returncode == 0, done.output[-5000:]
        trained.append([json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)])
    shards, gathered = trained
    assert gathered == shards
