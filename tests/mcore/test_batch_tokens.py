"""Training on documents: longer than the context, in batches of so many tokens, and with tokens that a mask does not train."""

import contextlib
import json
import math
import re
import shlex
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_epp.data.sampler import TokenBatchSampler
from megatron_epp.mcore.data.documents import build_splits, identity_of_run
from megatron_epp.mcore.model.trained_rows import TrainedRows, rows_to_compute
from scripts.parity.cells import CONTEXT, MODELS, VOCABULARY, common_flags
from scripts.random_documents import write_documents
from tests.support.mcore.forked import RECORDER, job, launch, of_ranks, returned, succeeded, train
from tests.support.mcore.launch import EVEN, TINY_ON_DOCUMENTS
from tests.support.mcore.matrix import SEED, batches_of, whole
from tests.support.mcore.megatron_flags import data_arguments
from tests.support.mcore.parity_figures import masked_documents
from tests.support.mcore.synthetic_documents import write_pair

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
    assert by_tokens == run(tmp_path / "count", data, "--global-batch-size", 8, iterations=3)


def test_a_weighted_blend_has_sequences_for_all_batches(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", LENGTHS, 120)
    args = data_arguments(data_path=["1", data, "2", data], split="1,0,0", eval_iters=0)
    (few, _), (more, _) = (build_splits(args, (10, 0, 0), identity_of_run(args), tokens)[0] for tokens in (0, 5000))
    assert len(few) == 10
    assert more.lengths.sum() >= 5000
    assert more.lengths[:10].tolist() == few.lengths.tolist()


FLAGS = ["--split", "100,0,0", "--eval-iters", "0", "--epp", "--epp-slices", "3"]


@pytest.mark.parametrize("block_tokens", [0, 3])
def test_only_trained_tokens_pass_the_output_layer(tmp_path: Path, block_tokens: int) -> None:
    data = write_documents(tmp_path / "data", LENGTHS, 120)
    masks = [np.arange(length + 1) > 0.7 * length for length in LENGTHS]
    np.concatenate(masks).astype(np.uint8).tofile(f"{data}.mask")
    flags = shlex.split(f"--train-iters 2 --data-path {data} --epp-loss-block-tokens {block_tokens} --epp-slices 8")
    found = returned(job(1, "consumed:multiplied", flags=[*TINY_ON_DOCUMENTS, *FLAGS, *flags]))
    assert 0 in found["trained"]
    assert sum(found["trained"]) < 0.5 * sum(found["tokens"])
    assert sum(found["multiplied"]) == sum(max(1, count) for count in found["trained"])


def test_a_model_that_gathers_its_logits_trains_as_one_that_does_not(tmp_path: Path) -> None:
    """Megatron's loss of whole logits is that of a shard plus the logarithm of the ranks."""
    flags = [*FLAGS, "--data-path", write_documents(tmp_path / "data", LENGTHS, 120), "--tensor-model-parallel-size", 2]
    run = partial(train, tmp_path / "run", 2, *flags, iterations=1, tiny=TINY_ON_DOCUMENTS)
    shards, gathered = run(), run(change="gathered")
    assert (gathered.steps, gathered.weights) == (shards.steps, shards.weights)


def with_validation(folder: Path, data: str, schedule: str) -> tuple[dict[str, dict[str, float]], str]:
    """Train on two replicas. Returns every iteration's loss and norm of gradients, and the log."""
    folder.mkdir()
    flags = [*common_flags(3, CONTEXT, 4, validates=True), *shlex.split(MODELS["llama"]), "--data-path", data]
    flags += ["--seed", SEED, "--log-interval", 1, "--use-distributed-optimizer", "--epp-schedule", schedule]
    done = succeeded(launch(2, RECORDER, *flags, "--epp-report-dir", folder, env={"RECORD_TO": str(folder)}))
    return json.loads((folder / "rank1.json").read_text())["steps"], done.output


def test_a_batch_without_a_trained_token_is_reported_as_0_and_the_run_goes_on(tmp_path: Path) -> None:
    first, _, third = batches_of(4, 3)
    data = masked_documents(tmp_path / "data", whole({*first, *third}))
    steps, reported = {}, {}
    for schedule in ("elastic", "stock"):
        steps[schedule], log = with_validation(tmp_path / schedule, data, schedule)
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


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output_layer = torch.nn.Linear(1, 1)
        self.output_layer.sequence_parallel = True

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        raise NotImplementedError


def test_the_model_is_as_before_behind_the_chunk_and_behind_an_error() -> None:
    model = Model()
    before = dict(vars(model)), dict(vars(model.output_layer))
    with contextlib.suppress(IndexError), TrainedRows(model).instead(torch.tensor([7])):
        assert not model.output_layer.sequence_parallel
        raise IndexError
    assert (dict(vars(model)), dict(vars(model.output_layer))) == before


def test_all_tokens_are_computed_where_the_copy_of_rows_would_outweigh_the_logits() -> None:
    mask = torch.ones(100)
    assert rows_to_compute(mask, 10**6, 1) is None
    mask[:20] = 0
    assert rows_to_compute(mask, 10, 10) is None
    assert rows_to_compute(mask, 40, 10).tolist() == list(range(20, 100))
    assert rows_to_compute(mask, 40, 11) is None


LIMIT, BATCH = 32, 8
NUM_TOKENS = [100, 33, 2, 70, 9, 34, 300, 1, 64, 5, 31, 65, 41, 7, 12]
"""Lengths of the documents, which make 32 sequences."""
EPOCH = 4
SPLITTING = shlex.split(
    "--vocab-size 1024 --split 100,0,0 --eval-iters 0 --lr-decay-iters 100 --pipeline-model-parallel-size 2"
)
SPLITTING += ["--epp"]


@pytest.fixture(scope="module")
def documents():
    """No token is there twice, so that a label tells where it stands."""
    return np.split(np.random.RandomState(3).permutation(sum(NUM_TOKENS)), np.cumsum(NUM_TOKENS)[:-1])


@pytest.fixture(scope="module")
def data(documents, tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("data") / "corpus", documents)


def run_labels(folder, data, *flags, iterations=EPOCH):
    folder.mkdir()
    given = ["--data-path", data, "--train-iters", iterations, "--epp-report-dir", folder, *flags]
    return job(2, "consumed:labels", flags=[*map(str, (*TINY_ON_DOCUMENTS, *SPLITTING, *EVEN, *given))])


def trained(folder, data, *flags):
    """Losses, and the rows of the first and the last stage."""
    done = run_labels(folder, data, *flags)
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
            assert (label, position) == (after, at % LIMIT)


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
    run_labels = trained(tmp_path_factory.mktemp("runs") / "truncated", data, "--epp-documents", "truncate", *saved)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(EPOCH // 2))
    return run_labels


def test_truncated_documents_lose_labels_and_a_warning_says_how_many(truncated, documents):
    _, _, last, output = truncated
    labels = {label for _, label, counts, _ in last if counts}
    assert labels == {label for document in documents for label in document[1 : LIMIT + 1].tolist()}
    left_out = sum(max(0, n - LIMIT - 1) for n in NUM_TOKENS)
    assert len(re.findall(rf"truncate leaves out {left_out:,} of {sum(NUM_TOKENS):,} tokens", output)) == 1


@pytest.mark.usefixtures("truncated")
def test_a_run_that_does_otherwise_with_long_documents_may_take_the_weights_and_not_go_on(data, checkpoints, tmp_path):
    resumed = run_labels(tmp_path / "split", data, "--load", checkpoints)
    assert resumed.returncode != 0
    assert "--epp-documents was truncate in the run that saved this checkpoint, and is split" in resumed.output
    assert run_labels(tmp_path / "anew", data, "--load", checkpoints, "--finetune", iterations=1).returncode == 0


def test_megatrons_own_samples_train_as_without_epp_and_a_run_goes_on_from_its_checkpoint(data, tmp_path):
    given = shlex.split("--split 80,20,0 --pipeline-model-parallel-size 2 --calculate-per-token-loss --eval-interval 2")
    given += ["--vocab-size", 1024, "--lr-decay-iters", 100, "--eod-mask-loss", "--data-path", data]
    stream, saved = ["--epp", *EVEN, "--epp-documents", "stream", "--epp-slices", 3], tmp_path / "saved"
    run_labels = partial(train, tmp_path / "run", 2, *given, iterations=3, tiny=TINY_ON_DOCUMENTS)
    stock, ours = run_labels("--save", saved, "--save-interval", 2), run_labels(*stream)
    assert len(stock.steps) == 3
    for number, step in stock.steps.items():
        assert ours.steps[number] == pytest.approx(step, rel=1e-5)
    validated, expected = (re.findall(r"validation loss at .* lm loss value: (\S+)", own.output) for own in (ours, stock))
    assert len(expected) > 0
    assert [*map(float, validated)] == pytest.approx([*map(float, expected)], rel=1e-5)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    assert run_labels(*stream, "--load", saved).steps == {3: pytest.approx(stock.steps[3], rel=1e-5)}
