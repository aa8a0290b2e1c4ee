"""Training on documents longer than the context, by every choice of `--epp-documents`."""

import json
import re
import shlex
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from tests.support.mcore.forked import job, of_ranks, train
from tests.support.mcore.launch import EVEN, TINY_ON_DOCUMENTS
from tests.support.mcore.synthetic_documents import write_pair

CONTEXT, BATCH = 32, 8
NUM_TOKENS = [100, 33, 2, 70, 9, 34, 300, 1, 64, 5, 31, 65, 41, 7, 12]
"""Lengths of the documents, which make 32 sequences."""
EPOCH = 4
FLAGS = shlex.split("--vocab-size 1024 --split 100,0,0 --eval-iters 0 --lr-decay-iters 100 --pipeline-model-parallel-size 2")
FLAGS += ["--epp"]


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
    return job(2, "consumed:labels", flags=[*map(str, (*TINY_ON_DOCUMENTS, *FLAGS, *EVEN, *given))])


def trained(folder, data, *flags):
    """Losses, and the rows of the first and the last stage."""
    done = run(folder, data, *flags)
    first, last = of_ranks(done)
    losses = [json.loads(line)["loss"] for line in (folder / "iterations.jsonl").read_text().splitlines()]
    return losses, first, last, done.output


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


def test_megatrons_own_schedule_predicts_several_tokens_of_packed_documents_as_of_single_ones(data, tmp_path):
    ahead = shlex.split("--mtp-num-layers 2 --position-embedding-type rope --no-rope-fusion --epp-schedule")
    stock, packed = (trained(tmp_path / schedule, data, *ahead, schedule)[0] for schedule in ("stock", "packed"))
    assert len(stock) == EPOCH
    assert packed == pytest.approx(stock, rel=1e-5)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def truncated(data, checkpoints, tmp_path_factory):
    saved = ["--save", checkpoints, "--save-interval", EPOCH // 2]
    run = trained(tmp_path_factory.mktemp("runs") / "truncated", data, "--epp-documents", "truncate", *saved)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(EPOCH // 2))
    return run


def test_truncated_documents_lose_labels_and_a_warning_says_how_many(truncated, documents):
    _, _, last, output = truncated
    labels = {label for _, label, counts, _ in last if counts}
    assert labels == {label for document in documents for label in document[1 : CONTEXT + 1].tolist()}
    left_out = sum(max(0, n - CONTEXT - 1) for n in NUM_TOKENS)
    assert len(re.findall(rf"truncate leaves out {left_out:,} of {sum(NUM_TOKENS):,} tokens", output)) == 1


@pytest.mark.usefixtures("truncated")
def test_a_run_that_does_otherwise_with_long_documents_may_take_the_weights_and_not_go_on(data, checkpoints, tmp_path):
    resumed = run(tmp_path / "split", data, "--load", checkpoints)
    assert resumed.returncode != 0
    assert "--epp-documents was truncate in the run that saved this checkpoint, and is split" in resumed.output
    assert run(tmp_path / "anew", data, "--load", checkpoints, "--finetune", iterations=1).returncode == 0


def test_megatrons_own_samples_train_as_without_epp_and_a_run_goes_on_from_its_checkpoint(data, tmp_path):
    given = shlex.split("--split 80,20,0 --pipeline-model-parallel-size 2 --calculate-per-token-loss --eval-interval 2")
    given += ["--vocab-size", 1024, "--lr-decay-iters", 100, "--eod-mask-loss", "--data-path", data]
    stream, saved = ["--epp", *EVEN, "--epp-documents", "stream", "--epp-slices", 3], tmp_path / "saved"
    run = partial(train, tmp_path / "run", 2, *given, iterations=3, tiny=TINY_ON_DOCUMENTS)
    stock, ours = run("--save", saved, "--save-interval", 2), run(*stream)
    assert len(stock.steps) == 3
    for number, step in stock.steps.items():
        assert ours.steps[number] == pytest.approx(step, rel=1e-5)
    validated, expected = (re.findall(r"validation loss at .* lm loss value: (\S+)", own.output) for own in (ours, stock))
    assert len(expected) > 0
    assert [*map(float, validated)] == pytest.approx([*map(float, expected)], rel=1e-5)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    assert run(*stream, "--load", saved).steps == {3: pytest.approx(stock.steps[3], rel=1e-5)}
