"""With `--epp-costs learn` the first batches are planned by formulas and all later ones by learnt costs, on every replica."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_epp.cost.kept import from_state
from megatron_epp.cost.learning import RECORDED, WARM_UP
from megatron_epp.mcore.costs.learnt import FILE_NAME
from megatron_epp.plan.serialize import load
from tests.support.mcore.forked import launch
from tests.support.mcore.parity_figures import (
    SMALL_BATCH,
    Figures,
    answers_only,
    check_closeness,
    masked_documents,
    parity_of,
)
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

LOOKAHEAD = 1
FIRST = WARM_UP + RECORDED + LOOKAHEAD + 1
"""First batch that is planned by learnt costs."""
LEARN = f"--epp-costs learn --epp-lookahead {LOOKAHEAD}"
ITERATIONS = FIRST + 1
CASES = {
    "sliced": {"cell": {"pp": 2, "split": True}, "model": "llama", "plan": f"--epp-slices 3 --epp-recompute 1 {LEARN}"},
    "replicas": {"cell": {"pp": 2, "dp": 2}, "model": "gpt2", "plan": f"--epp-slices 2 {LEARN}"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def figures(folder: Path) -> dict[str, Figures]:
    cases = {name: dict(case) for name, case in CASES.items()}
    cases["sliced"]["both"] = f"--data-path {masked_documents(folder / 'answers', answers_only())}"
    for name, case in cases.items():
        case["plan"] = f"{case['plan']} --epp-report-dir {folder / name} --epp-trace {FIRST - 1} {FIRST}"
    return parity_of(folder, cases, ITERATIONS, 400, SMALL_BATCH)


@pytest.mark.parametrize("name", CASES)
def test_plans_by_learnt_costs_train_as_the_stock_schedule_does(figures: dict[str, Figures], name: str) -> None:
    check_closeness(figures[name])
    assert figures[name]["num_losses"] == [ITERATIONS, 1]


@pytest.mark.parametrize("name", CASES)
def test_costs_change_at_the_agreed_batch(figures: dict[str, Figures], folder: Path, name: str) -> None:
    assert "error" not in figures[name]
    before, after = (load(folder / name / f"plan-{number}.json") for number in (FIRST - 1, FIRST))
    assert before.costs != "learnt"
    assert after.costs == "learnt"


TRAINING = shlex.split(
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl local --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --override-opt-param-scheduler "
    "--tokenizer-type NullTokenizer --vocab-size 255 --split 80,20,0 --eval-iters 1 --eval-interval 100 --log-interval 1 "
    f"--calculate-per-token-loss --ckpt-format torch_dist --epp {LEARN}"
)


def test_a_resumed_run_plans_by_the_learnt_costs_from_its_first_batch(tmp_path: Path) -> None:
    lengths = long_tailed_lengths(80, 64)
    data = write_pair(tmp_path / "documents", documents_of(lengths, vocab_size=255))
    kept = tmp_path / "checkpoints"

    def train(iterations: int, *flags: object) -> str:
        arguments = [*TRAINING, "--data-path", data, "--train-iters", iterations, "--epp-report-dir", tmp_path / "report"]
        finished = launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *arguments, *flags)
        assert finished.returncode == 0, finished.output[-5000:]
        return finished.output

    learning = train(WARM_UP + RECORDED, "--save", kept, "--save-interval", WARM_UP + RECORDED)  # ends before learnt plans
    said = re.findall(
        r"costs learnt from (\d+) iterations: they took ([\d.]+) of the time by formulas .* batch (\d+)", learning
    )
    assert [(number, batch) for number, _, batch in said] == [(str(RECORDED), str(FIRST))]
    assert float(said[0][1]) > 0
    (one,) = from_state(json.loads((kept / FILE_NAME).read_text()))
    assert one.costs.name == "learnt"

    resumed = train(WARM_UP + RECORDED + 1, "--load", kept, "--epp-trace", WARM_UP + RECORDED + 1)
    assert "costs learnt from" not in resumed
    assert "costs are those that an earlier run of this model has learnt" in resumed
    assert load(tmp_path / "report" / "plan.json").costs == "learnt"
