"""`--epp-batch-tokens`: what is in a batch, what Megatron counts, and that a resumed run goes on at the right place."""

import re
from pathlib import Path

import numpy as np

from megatron_epp.data.sampler import TokenBatchSampler
from megatron_epp.mcore.data.documents import build_splits
from megatron_epp.mcore.data.encoders import identity_of_run
from scripts.random_documents import write_documents
from tests.support.mcore.forked import train
from tests.support.mcore.launch import TINY_ON_DOCUMENTS
from tests.support.mcore.megatron_flags import data_arguments

LENGTHS = [30, 3, 2, 17, 9, 4, 32, 1, 14, 5, 31, 6, 11, 7, 12, 25]
BATCH_TOKENS = 64
ITERATIONS, SAVED = 6, 3


def run(folder: Path, data: str, *flags: object, iterations: int = ITERATIONS) -> tuple[dict[int, dict[str, float]], list[int]]:
    """Train two replicas. Returns losses and norms of gradients, and the samples that the log counts as consumed."""
    given = ["--data-path", data, "--split", "100,0,0", "--eval-iters", 0, "--lr-decay-iters", 10, "--lr-decay-style", "linear"]
    done = train(folder, 2, *given, "--epp", *flags, iterations=iterations, tiny=TINY_ON_DOCUMENTS)
    return done.steps, [int(count) for count in re.findall(r"consumed samples: +(\d+)", done.output)]


def test_samples_are_counted_and_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", LENGTHS, 120)
    ours = ["--epp-batch-tokens", BATCH_TOKENS, "--save", tmp_path / "saved", "--save-interval", SAVED]
    whole, consumed = run(tmp_path / "whole", data, *ours)
    sampler = TokenBatchSampler(np.array(LENGTHS), BATCH_TOKENS, least=2)
    sizes = [len(next(sampler)) for _ in range(ITERATIONS)]
    assert len(set(sizes)) > 2
    assert consumed == np.cumsum(sizes).tolist()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed, again = run(tmp_path / "resumed", data, "--epp-batch-tokens", BATCH_TOKENS, "--load", tmp_path / "saved")
    assert again == consumed[SAVED:]
    assert resumed == {number: step for number, step in whole.items() if number > SAVED}


def test_with_equal_lengths_it_trains_as_with_as_many_sequences(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", [16] * 20, 120)
    by_tokens = run(tmp_path / "tokens", data, "--epp-batch-tokens", 8 * 16 + 15, "--global-batch-size", 2, iterations=3)
    by_count = run(tmp_path / "count", data, "--global-batch-size", 8, iterations=3)
    assert by_tokens == by_count


def test_a_weighted_blend_has_sequences_for_all_batches(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", LENGTHS, 120)
    args = data_arguments(data_path=["1", data, "2", data], split="1,0,0", eval_iters=0)
    (few, _), (more, _) = (build_splits(args, (10, 0, 0), identity_of_run(args), tokens)[0] for tokens in (0, 5000))
    assert len(few) == 10
    assert more.lengths.sum() >= 5000
    assert more.lengths[:10].tolist() == few.lengths.tolist()
