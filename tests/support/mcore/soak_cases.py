"""The training runs of the soak."""

import shlex
from dataclasses import dataclass

LONGEST, VOCABULARY = 64, 95


@dataclass(frozen=True)
class SoakCase:
    """Training run after some iterations of which things are counted.

    Before each count it waits for the watchdog, which lets go of an iteration up to a second after its end.

    window: iterations of the first counts, and of the last.
    counts_objects: counts all of Python's objects instead of tensors alone.
    """

    iterations: int
    pipeline_size: int
    first: int
    window: int = 10
    counts_objects: bool = False

    @property
    def early(self) -> range:
        """Iterations of the first counts, when caches are full."""
        return range(self.first, self.first + self.window)

    @property
    def late(self) -> range:
        """Iterations of the last counts."""
        return range(self.iterations - self.window + 1, self.iterations + 1)

    @property
    def flags(self) -> list[str]:
        return shlex.split(
            "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --transformer-impl local "
            f"--seq-length {LONGEST} --max-position-embeddings {LONGEST} --micro-batch-size 1 --global-batch-size 2 "
            f"--train-iters {self.iterations} --pipeline-model-parallel-size {self.pipeline_size} --lr 1e-3 "
            f"--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
            "--make-vocab-size-divisible-by 32 --attention-dropout 0 --hidden-dropout 0 --split 100,0,0 --eval-iters 0 "
            "--eval-interval 10000 --log-interval 10 --epp --epp-slices 2"
        )


CASES = {
    "tensors": SoakCase(iterations=100, pipeline_size=1, first=11, window=4),
    "objects": SoakCase(iterations=1000, pipeline_size=2, first=101, counts_objects=True),
}
