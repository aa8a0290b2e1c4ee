"""Every iteration says how long it was planned; a run that goes on plans by the costs that were learnt."""

import json
import re
import shlex
from pathlib import Path

from megatron_epp.cost.kept import FILE_NAME, RECORDED, WARM_UP, from_state
from megatron_epp.plan.serialize import load
from tests.support.mcore.forked import job, launch
from tests.support.mcore.jobs.planners import ITERATIONS
from tests.support.mcore.rows import FIRST_LEARNT, LEARN
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

LENGTHS = (180, 12, 60, 33, 7, 90, 25, 140)
"""Six of them train, so every batch has the same lengths in another order."""


def test_every_iteration_says_how_long_it_was_planned_and_planning_ends_with_training(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(LENGTHS, vocab_size=255))
    finished = job(2, "planners", data=data, folder=tmp_path, timeout_s=400)
    assert finished.returncode == 0, finished.output[-5000:]
    lines = [json.loads(line) for line in (tmp_path / "iterations.jsonl").read_text().splitlines()]
    assert len(lines) == ITERATIONS
    assert all(line["planning_us"] > 0 for line in lines)
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == ["", ""]


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
    assert [(number, batch) for number, _, batch in said] == [(str(RECORDED), str(FIRST_LEARNT))]
    assert float(said[0][1]) > 0
    (one,) = from_state(json.loads((kept / FILE_NAME).read_text()))
    assert one.costs.name == "learnt"
    resumed = train(WARM_UP + RECORDED + 1, "--load", kept, "--epp-trace", WARM_UP + RECORDED + 1)
    assert "costs learnt from" not in resumed
    assert "costs are those that an earlier run of this model has learnt" in resumed
    assert load(tmp_path / "report" / "plan.json").costs == "learnt"
