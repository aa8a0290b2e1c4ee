"""Losses of samples train in slices as in whole sequences on one stage, in every layout and through Megatron's own loop."""

import json
import shlex
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from scripts.parity.cells import CONTEXT, LENGTHS, MODELS, VOCABULARY, Cell, common_flags
from scripts.parity.runs import compare
from tests.support.mcore import matrix
from tests.support.mcore.parity_figures import check_closeness

OWN = "tests.support.mcore.own_losses"
BATCH, ITERATIONS = 8, 2
CELLS = {
    "pipeline": (Cell(pp=2), "--epp-slices 3"),
    "there and back, weights apart": (Cell(pp=2, virtual=2, placement="v", split=True), "--epp-slices 4"),
    "recompute, loss by blocks": (Cell(pp=2), "--epp-slices 7 --epp-recompute 1 --epp-loss-block-tokens 5"),
    "tensor and sequence parallel": (Cell(tp=2, sp=True), "--epp-slices 3"),
    "context parallel": (Cell(cp=2), "--epp-slices 3"),
    "context parallel in a pipeline": (Cell(cp=2, pp=2), "--epp-slices 3"),
    "replicas": (Cell(dp=2), "--epp-slices 2 --use-distributed-optimizer"),
    "experts": (Cell(pp=2, dp=2, experts=4, ep=2), "--epp-slices 3"),
}
LOSSES = {"over tokens": f"{OWN}:GRPO", "over sequences": f"{OWN}:GSPO"}
BY_DEFAULT = {
    ("over tokens", "pipeline"),
    ("over tokens", "there and back, weights apart"),
    ("over tokens", "context parallel"),
    ("over tokens", "experts"),
    ("over sequences", "recompute, loss by blocks"),
    ("over sequences", "tensor and sequence parallel"),
    ("over sequences", "context parallel in a pipeline"),
    ("over sequences", "replicas"),
}
ROWS = [
    pytest.param(loss, cell, id=f"{loss}: {cell}", marks=[pytest.mark.slow] * ((loss, cell) not in BY_DEFAULT))
    for cell in sorted(CELLS, key=lambda name: CELLS[name][0].num_processes)
    for loss in LOSSES
]
WITHOUT_ROUTERS = "--moe-aux-loss-coeff 0 --moe-router-load-balancing-type none"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """A file of samples, of which some train nothing, and one for evaluation."""
    folder, random = tmp_path_factory.mktemp("samples"), np.random.RandomState(3)
    paths = []
    for name, count in (("train", len(LENGTHS)), ("valid", BATCH)):
        lines = []
        for number, length in enumerate(min(length, CONTEXT) for length in LENGTHS[:count]):
            tokens = length + 1
            values = {
                "tokens": random.randint(0, VOCABULARY - 1, tokens).tolist(),
                "trained": ((random.rand(tokens) < 0.6) & (number % 7 != 5)).astype(int).tolist(),
                "old_logprobs": (-4.5 + 0.3 * random.randn(tokens)).tolist(),
                "reference_logprobs": (-4.5 + 0.3 * random.randn(tokens)).tolist(),
                "importance": (0.5 + random.rand(tokens)).tolist(),
                "advantages": random.randn() if number % 2 else random.randn(tokens).tolist(),
            }
            lines.append(json.dumps(values))
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


@pytest.fixture(scope="module")
def whole(samples, tmp_path_factory):
    """Trainings on whole sequences on one stage, by loss and cell: each with the checkpoint that it began from."""

    @cache
    def run(loss, cell):
        folder = tmp_path_factory.mktemp("whole")
        return matrix.train(cell.num_processes, flags(samples, loss, cell, "--epp-slices 1"), folder, limit_s=300), folder

    return run


def flags(samples, loss, cell, plan):
    common = common_flags(ITERATIONS, CONTEXT, BATCH, validates=True)
    del common[common.index("--epp-documents") : common.index("--epp-documents") + 2]
    more = f"{MODELS['llama']} {plan} {WITHOUT_ROUTERS if cell.experts else ''}"
    return [*common, *shlex.split(more), *cell.flags, "--epp-samples", *map(str, samples), "--epp-loss", loss]


@pytest.mark.parametrize(("loss", "name"), ROWS)
def test_slices_train_as_whole_sequences_on_one_stage(samples, whole, loss, name):
    cell, plan = CELLS[name]
    sharing = replace(cell, pp=1, virtual=1, placement="looped", split=False, cp=1, dp=cell.ep)
    expected, checkpoint = whole(LOSSES[loss], sharing)
    load = ["--load", str(checkpoint), "--finetune"]
    found = matrix.train(cell.num_processes, [*flags(samples, LOSSES[loss], cell, plan), *load], limit_s=300)
    figures = compare(expected, found)
    check_closeness(figures, "RelayAttention")
    assert any(plan["slices"] > 1 for replica in figures["plans"] for plan in replica)
    assert figures["num_losses"][0] == ITERATIONS


def test_next_tokens_train_as_without_a_loss(samples):
    cell, plan = Cell(pp=2), "--epp-slices 3"
    given = flags(samples, "megatron_epp.losses:NextToken", cell, plan)
    runs = [matrix.train(2, one, limit_s=300) for one in (given[: given.index("--epp-loss")], given)]
    check_closeness(compare(*runs), "RelayAttention")
