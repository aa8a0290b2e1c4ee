"""A hundred and fifty iterations of Megatron's loop leave no tensor behind."""

from pathlib import Path

from tests.support.mcore.forked import launch
from tests.support.mcore.soak_cases import EARLY, LATE, LONGEST, VOCABULARY
from tests.support.mcore.synthetic_documents import documents_of, write_pair

WORKER = "tests.support.mcore.soak_worker"


def test_many_iterations_of_training_leave_no_tensor_behind(tmp_path: Path) -> None:
    lengths = [LONGEST // 2 + i % (LONGEST // 2) for i in range(61)]
    data = write_pair(tmp_path / "documents", documents_of(lengths, vocab_size=VOCABULARY))
    finished = launch(1, "-m", WORKER, env={"SOAK_DATA": data})
    assert finished.returncode == 0, finished.output[-5000:]
    tensors = {int(iteration): count for figures in finished.figures for iteration, count in figures["tensors"].items()}
    # The thread that reads ahead may or may not hold the next batch when tensors are counted.
    assert min(tensors[i] for i in LATE) <= max(tensors[i] for i in EARLY)
