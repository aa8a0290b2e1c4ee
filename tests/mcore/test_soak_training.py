"""Many iterations of Megatron's loop leave no tensor behind, and no other object of Python's, without the garbage collector."""

from pathlib import Path

import pytest

from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.soak import CASES, LONGEST, VOCABULARY
from tests.support.mcore.synthetic_documents import documents_of, write_pair


def soaked(name: str, folder: Path) -> list[dict[int, int]]:
    lengths = [LONGEST // 2 + i % (LONGEST // 2) for i in range(61)]
    data = write_pair(folder / "documents", documents_of(lengths, vocab_size=VOCABULARY))
    case = CASES[name]
    figures = of_ranks(job(case.pipeline_size, "soak", data=data, name=name, timeout_s=0.6 * case.iterations))
    assert len(figures) == case.pipeline_size
    return [{int(iteration): count for iteration, count in own["counts"].items()} for own in figures]


def test_many_iterations_of_training_leave_no_tensor_behind(tmp_path: Path) -> None:
    case, (tensors,) = CASES["tensors"], soaked("tensors", tmp_path)
    # The thread that reads ahead may or may not hold the next batch when tensors are counted.
    assert min(tensors[i] for i in case.late) <= max(tensors[i] for i in case.early)


@pytest.mark.slow  # a thousand iterations, so that one object for every second of them shows
def test_a_thousand_iterations_of_a_pipeline_leave_no_object_behind(tmp_path: Path) -> None:
    case = CASES["objects"]
    for objects in soaked("objects", tmp_path):
        grown = min(objects[i] for i in case.late) - min(objects[i] for i in case.early)
        assert grown < (case.late.start - case.early.start) / 2, objects
