"""Trainings by flags run once what sequences of a batch begin with in common, with the losses and gradients of whole ones."""

import json
import shlex

import numpy as np
import pytest

from megatron_epp.data.indexed_documents import MASK_SUFFIX
from scripts.parity.cells import CONTEXT, MODELS, OPTIMIZERS, VOCABULARY, Cell, common_flags
from scripts.parity.runs import compare
from tests.support.mcore import matrix
from tests.support.mcore.parity_figures import check_closeness
from tests.support.mcore.synthetic_documents import write_pair

BATCH, PROMPT = 4, 40


def conversations(iterations):
    """Return tokens and masks of answers to one prompt, which is not trained: of as many batches, and two more."""
    random = np.random.RandomState(5)
    prompt = random.randint(1, VOCABULARY - 1, PROMPT)
    answers = [random.randint(1, VOCABULARY - 1, 3 + 2 * (number % 10)) for number in range(iterations * BATCH + 2)]
    texts = [np.concatenate([prompt, own]) for own in answers]
    return [(text, (np.arange(len(text)) >= PROMPT).astype(int)) for text in texts]


def write_samples(folder, iterations):
    """Write rows with the columns of a loss, and return the flags that train on them."""
    rows = [
        {"tokens": tokens.tolist(), "trained": mask.tolist(), "old_logprobs": -4.5, "advantages": 0.3 * at - 1}
        for at, (tokens, mask) in enumerate(conversations(iterations))
    ]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--epp-samples", *[str(folder / "samples.jsonl")] * 2, "--epp-loss", "megatron_epp.losses:ClippedRatio"]


def write_documents(folder, iterations):
    """Write a pair and a mask, as `megatron-epp prepare --chat` does, and return the flags that train on them."""
    texts, masks = zip(*conversations(iterations), strict=True)
    prefix = write_pair(folder / "chats", texts)
    np.concatenate(masks).astype(np.uint8).tofile(f"{prefix}{MASK_SUFFIX}")
    return ["--data-path", str(prefix), "--epp-documents", "truncate"]


WAYS = [
    pytest.param(write_samples, Cell(pp=2), "plain", 2, id="samples"),
    pytest.param(write_documents, Cell(pp=2), "plain", 2, id="conversations"),
    pytest.param(write_samples, Cell(dp=2, pp=2), "overlapped", 10, id="replicas, parts of the optimizer"),
]


@pytest.mark.parametrize(("write", "cell", "optimizer", "iterations"), WAYS)
def test_prompts_of_several_answers_run_once_as_whole_sequences_train(write, cell, optimizer, iterations, tmp_path):
    data, flags = write(tmp_path, iterations), common_flags(iterations, CONTEXT, BATCH, validates=True)
    del flags[flags.index("--epp-documents") : flags.index("--epp-documents") + 2]
    flags += [*data, *cell.flags, *shlex.split(f"{MODELS['llama']} {OPTIMIZERS[optimizer]} --epp-report-dir {tmp_path}/report")]
    runs, lines = {}, {}
    for shares in ("off", "on"):
        runs[shares] = matrix.train(cell.num_processes, [*flags, "--epp-share-prefixes", shares], limit_s=300)
        lines[shares] = [json.loads(line) for line in (tmp_path / "report" / "iterations.jsonl").read_text().splitlines()]
    figures = compare(runs["off"], runs["on"])
    check_closeness(figures, "RelayAttention")
    assert figures["num_losses"][0] == iterations
    every = {shares: zip(*(run.plans for run in ranks[: cell.dp]), strict=True) for shares, ranks in runs.items()}
    shared = {shares: [[plan.num_shared_tokens for plan in own] for own in every[shares]] for shares in runs}
    assert {shares: [*map(sum, own)] for shares, own in shared.items()} == {
        "off": [0] * iterations,
        "on": [(BATCH - cell.dp) * (PROMPT - 1)] * iterations,
    }
    assert [line["shared_tokens"] for line in lines["on"]][-iterations:] == [own[0] for own in shared["on"]]


def test_a_model_that_may_not_share_is_refused_where_sharing_is_asked_for(tmp_path):
    flags = [*common_flags(1, CONTEXT, BATCH, validates=True), *write_documents(tmp_path, 2), "--epp-share-prefixes", "on"]
    flags += shlex.split(f"{MODELS['llama']} --num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0")
    with pytest.raises(AssertionError, match="--epp-share-prefixes does not go with experts, whose losses and capacity count"):
        matrix.train(1, flags)
