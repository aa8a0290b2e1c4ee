"""Training on documents longer than the context: what is a label and how often, and what a resumed run may change."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

from tests.support.mcore.forked import job
from tests.support.mcore.launch import TINY
from tests.support.mcore.synthetic_documents import write_pair

CONTEXT, BATCH = 32, 8
NUM_TOKENS = [100, 33, 2, 70, 9, 34, 300, 1, 64, 5, 31, 65, 41, 7, 12]
"""Lengths of the documents, which make 32 sequences."""
EPOCH = 4
"""Iterations."""
FLAGS = [flag for flag in TINY if flag != "--mock-data"]
FLAGS[FLAGS.index("--micro-batch-size") + 1] = "1"
FLAGS += [
    "--vocab-size",
    "1024",
    "--split",
    "100,0,0",
    "--eval-iters",
    "0",
    "--lr-decay-iters",
    "100",
    "--pipeline-model-parallel-size",
    "2",
    "--epp",
]


@pytest.fixture(scope="module")
def documents():
    """No token is there twice, so that a label tells where it stands."""
    return np.split(np.random.RandomState(3).permutation(sum(NUM_TOKENS)), np.cumsum(NUM_TOKENS)[:-1])


@pytest.fixture(scope="module")
def data(documents, tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("data") / "corpus", documents)


def run(folder, data, *flags, iterations=EPOCH):
    folder.mkdir()
    given = ["--data-path", data, "--train-iters", iterations, "--epp-report-dir", folder, *flags]
    return job(2, "labels", flags=[*map(str, (*FLAGS, *given))], env={"RECORD_TO": str(folder)})


def trained(folder, data, *flags):
    """Losses, and the rows of the first and the last stage."""
    done = run(folder, data, *flags)
    assert done.returncode == 0, done.output[-5000:]
    losses = [json.loads(line)["loss"] for line in (folder / "iterations.jsonl").read_text().splitlines()]
    return losses, *(json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)), done.output


@pytest.fixture(scope="module")
def split(data, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "split", data, "--epp-slices", 3)


def test_in_an_epoch_every_token_but_a_documents_first_is_a_label_exactly_once(split, documents):
    _, _, last, _ = split
    labels = sorted(label for _, label, counts, _ in last if counts)
    assert labels == sorted(label for document in documents for label in document[1:].tolist())


def test_every_label_follows_its_input_in_its_document_and_positions_begin_anew(split, documents):
    following = {a: (b, at) for document in documents for at, (a, b) in enumerate(pairwise(document.tolist()))}
    for rows in split[1:3]:
        counted = [(token, label, position) for token, label, counts, position in rows if counts]
        assert len(counted) == sum(n - 1 for n in NUM_TOKENS)
        for token, label, position in counted:
            after, at = following[token]
            assert (label, position) == (after, at % CONTEXT)


def test_megatrons_own_schedule_has_the_same_losses_on_split_documents(split, data, tmp_path):
    stock, *_ = trained(tmp_path / "stock", data, "--epp-schedule", "stock")
    assert len(stock) == EPOCH
    assert stock == pytest.approx(split[0], rel=1e-5)


def test_truncated_documents_lose_labels_and_a_warning_says_how_many(data, documents, tmp_path):
    _, _, last, output = trained(tmp_path / "truncated", data, "--epp-documents", "truncate")
    labels = {label for _, label, counts, _ in last if counts}
    assert labels == {label for document in documents for label in document[1 : CONTEXT + 1].tolist()}
    left_out = sum(max(0, n - CONTEXT - 1) for n in NUM_TOKENS)
    assert len(re.findall(rf"truncate leaves out {left_out:,} of {sum(NUM_TOKENS):,} tokens", output)) == 1


def test_a_resumed_run_keeps_to_what_its_checkpoint_did_with_long_documents(data, tmp_path):
    saved = ["--save", tmp_path / "checkpoints", "--save-interval", 2, "--epp-documents", "truncate"]
    assert run(tmp_path / "saving", data, *saved, "--exit-interval", 2, iterations=4).returncode == 0
    resumed = run(tmp_path / "split", data, "--load", tmp_path / "checkpoints", iterations=4)
    assert resumed.returncode != 0
    assert "--epp-documents was truncate in the run that saved this checkpoint, and is split" in resumed.output
    again = ["--load", tmp_path / "checkpoints", "--epp-documents", "truncate", "--seed", 5]
    resumed = run(tmp_path / "truncated", data, *again, iterations=4)
    assert resumed.returncode == 0, resumed.output[-5000:]
    assert resumed.output.count("--seed was 1234 and is 5: sequences come in another order") == 1
    anew = ["--load", tmp_path / "checkpoints", "--finetune"]
    assert run(tmp_path / "anew", data, *anew, iterations=2).returncode == 0
