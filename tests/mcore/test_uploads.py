"""What a training's iterations read comes to the device by one copy: of documents, and of Megatron's own samples."""

import json
from pathlib import Path

import pytest

from scripts.random_documents import write_documents
from tests.support.mcore import forked
from tests.support.mcore.launch import TINY

PROGRAM = Path(forked.__file__).with_name("counted_training.py")
ITERATIONS = 4
LENGTHS = [30, 3, 2, 17, 9, 30, 12, 1, 24, 5, 31, 11, 25, 7, 12, 20]
FLAGS = [flag for flag in TINY if flag != "--mock-data"]
FLAGS[FLAGS.index("--micro-batch-size") + 1] = "1"
SOURCES = {
    "documents": "--epp-slices 3",
    "Megatron's samples": "--epp-slices 3 --epp-documents stream",
    "shards of the vocabulary": "--epp-slices 3 --epp-vocab-parallel on",
    "Megatron's schedule on documents": "--epp-schedule packed",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "corpus", LENGTHS, 120)


def counts(folder: Path, data: str, flags: str) -> list[list[dict[str, int]]]:
    """Counts of every rank after each iteration, from the beginning of the run."""
    given = ["--data-path", data, "--split", "100,0,0", "--eval-iters", 0, "--pipeline-model-parallel-size", 2]
    given += ["--calculate-per-token-loss", "--lr-decay-iters", 100, "--train-iters", ITERATIONS, "--epp", *flags.split()]
    done = forked.launch(2, PROGRAM, *FLAGS, *given, env={"RECORD_TO": str(folder)})
    assert done.returncode == 0, done.output[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("source", SOURCES)
def test_an_iteration_has_one_upload_and_no_other_copy_to_the_device(tmp_path: Path, data: str, source: str) -> None:
    for rank in counts(tmp_path, data, SOURCES[source]):
        assert all(seen.keys() == {"uploads", "tensors"} for seen in rank), rank
        ahead = [seen["uploads"] - number for number, seen in enumerate(rank, 1)]
        assert set(ahead) <= {0, 1}  # the next batch, which is uploaded while one runs
        assert rank[-1]["tensors"] > 5 * rank[-1]["uploads"]


def test_a_scripts_own_microbatches_are_left_where_they_are(tmp_path: Path, data: str) -> None:
    for rank in counts(tmp_path, data, "--epp-microbatches user"):
        assert rank[-1] == {}
