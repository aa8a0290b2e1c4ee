"""With `--epp-costs learn` times of vocabulary shards and of their collectives are learnt from a run's own iterations."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_epp.cost.kept import from_state
from megatron_epp.cost.learning import RECORDED, WARM_UP
from megatron_epp.mcore.costs.learnt import FILE_NAME
from megatron_epp.plan import Action, Op, Plan
from megatron_epp.plan.serialize import load
from tests.support.mcore.changed_training import COLLECTIVES, PASSES, collective_us, pass_us
from tests.support.mcore.forked import CHANGED, launch
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

LOOKAHEAD = 1
FIRST = WARM_UP + RECORDED + LOOKAHEAD + 1
"""First batch that is planned by learnt costs."""
TRAINING = shlex.split(
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--transformer-impl local --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --untie-embeddings-and-output-weights "
    "--tokenizer-type NullTokenizer --vocab-size 255 --split 100,0,0 --eval-iters 0 --eval-interval 100 --log-interval 1 "
    f"--calculate-per-token-loss --ckpt-format torch_dist --save-interval {WARM_UP + RECORDED} --train-iters {FIRST} "
    f"--epp --epp-vocab-parallel on --epp-costs learn --epp-lookahead {LOOKAHEAD} --epp-trace {FIRST - 1} {FIRST}"
)
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a training on two ranks, with its log, plans and checkpoints."""
    place = tmp_path_factory.mktemp("learnt")
    data = write_pair(place / "documents", documents_of(long_tailed_lengths(80, 64), vocab_size=255))
    flags = [*TRAINING, "--data-path", data, "--save", place / "checkpoints", "--epp-report-dir", place]
    finished = launch(2, CHANGED, "given_times", *flags)
    assert finished.returncode == 0, finished.output[-5000:]
    (place / "log").write_text(finished.output)
    return place


def ratios(plan: Plan) -> list[float]:
    """Planned over given times of all passes and collectives of shards."""
    passes = [step for row in plan.ranks for step in row if step.action.op in PASSES]
    found = [step.time_us / pass_us(plan, step.action) for step in passes]
    for op in COLLECTIVES:
        for chunk, time_us in enumerate(plan.messages.collective_times(op)):
            found.append(time_us / collective_us(plan, Action(op, 0, chunk)))
    assert len(found) == (2 * plan.num_ranks + 2) * len(plan.chunks)
    return found


def test_plans_change_to_the_times_that_were_measured(folder: Path) -> None:
    before, after = (load(folder / f"plan-{number}.json") for number in (FIRST - 1, FIRST))
    assert after.costs == "learnt"
    assert ratios(after) == pytest.approx([1.0] * len(ratios(after)), rel=TOLERANCE)
    assert max(ratios(before)) < 0.5  # by formulas


def test_the_log_says_how_far_off_formulas_were(folder: Path) -> None:
    said = re.findall(
        r"costs learnt from 3 iterations: .*, vocabulary shards ([\d.]+), their collectives ([\d.]+)\)",
        (folder / "log").read_text(),
    )
    assert len(said) == 1
    assert all(float(ratio) > 2.0 for ratio in said[0])


def test_they_are_kept_with_the_checkpoints(folder: Path) -> None:
    (one,) = from_state(json.loads((folder / "checkpoints" / FILE_NAME).read_text()))
    assert one.costs.vocabulary is not None
    assert one.costs.vocabulary.logits.per_token_us == pytest.approx(PASSES[Op.S].per_token_us, rel=TOLERANCE)
