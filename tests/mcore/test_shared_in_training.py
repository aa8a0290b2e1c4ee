"""Trainings by flags run once what sequences of a batch begin with in common, with the losses and gradients of whole ones."""

import json
import shlex

import numpy as np
import pytest

from megatron_epp.data.indexed_documents import MASK_SUFFIX
from scripts.parity.cells import CONTEXT, MODELS, VOCABULARY, common_flags
from scripts.parity.runs import compare
from tests.support.mcore import matrix
from tests.support.mcore.parity_figures import check_closeness
from tests.support.mcore.synthetic_documents import write_pair

BATCH, ITERATIONS, PROMPT = 4, 2, 40


def conversations():
    """Return tokens and masks of answers to a prompt, which is not trained: of two batches, and two more for evaluation."""
    random = np.random.RandomState(5)
    prompt = random.randint(1, VOCABULARY - 1, PROMPT)
    answers = [random.randint(1, VOCABULARY - 1, 3 + 2 * number) for number in range(ITERATIONS * BATCH + 2)]
    return [(np.concatenate([prompt, own]), np.repeat([0, 1], [PROMPT, len(own)])) for own in answers]


def write_samples(folder):
    """Write rows with the columns of a loss, and return the flags that train on them."""
    rows = [
        {"tokens": tokens.tolist(), "trained": mask.tolist(), "old_logprobs": -4.5, "advantages": 0.3 * at - 1}
        for at, (tokens, mask) in enumerate(conversations())
    ]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--epp-samples", *[str(folder / "samples.jsonl")] * 2, "--epp-loss", "megatron_epp.losses:ClippedRatio"]


def write_documents(folder):
    """Write a pair and a mask, as `megatron-epp prepare --chat` does, and return the flags that train on them."""
    texts, masks = zip(*conversations(), strict=True)
    prefix = write_pair(folder / "chats", texts)
    np.concatenate(masks).astype(np.uint8).tofile(f"{prefix}{MASK_SUFFIX}")
    return ["--data-path", str(prefix), "--epp-documents", "truncate"]


@pytest.mark.parametrize("write", [write_samples, write_documents], ids=["samples", "conversations"])
def test_prompts_of_several_answers_run_once_with_the_losses_and_gradients_of_whole_sequences(write, tmp_path):
    data, flags = write(tmp_path), common_flags(ITERATIONS, CONTEXT, BATCH, validates=True)
    del flags[flags.index("--epp-documents") : flags.index("--epp-documents") + 2]
    flags += [*data, *shlex.split(f"{MODELS['llama']} --pipeline-model-parallel-size 2 --epp-report-dir {tmp_path}/report")]
    runs, lines = {}, {}
    for shares in ("off", "on"):
        runs[shares] = matrix.train(2, [*flags, "--epp-share-prefixes", shares], limit_s=300)
        lines[shares] = [json.loads(line) for line in (tmp_path / "report" / "iterations.jsonl").read_text().splitlines()]
    figures = compare(runs["off"], runs["on"])
    check_closeness(figures, "RelayAttention")
    assert figures["num_losses"][0] == ITERATIONS
    shared = {shares: [line["shared_tokens"] for line in own][-ITERATIONS:] for shares, own in lines.items()}
    assert shared == {"off": [0] * ITERATIONS, "on": [(BATCH - 1) * (PROMPT - 1)] * ITERATIONS}
    assert [plan.num_shared_tokens for plan in runs["on"][0].plans] == shared["on"]


def test_a_model_that_may_not_share_is_refused_where_sharing_is_asked_for(tmp_path):
    flags = [*common_flags(1, CONTEXT, BATCH, validates=True), *write_documents(tmp_path), "--epp-share-prefixes", "on"]
    flags += shlex.split(f"{MODELS['llama']} --num-experts 4 --moe-router-load-balancing-type none --moe-aux-loss-coeff 0")
    with pytest.raises(AssertionError, match="--epp-share-prefixes does not go with experts, whose losses and capacity count"):
        matrix.train(1, flags)
