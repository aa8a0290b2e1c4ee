"""Learnt costs are kept: a resumed run of the same model starts with them, one of another model learns again and says why."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_epp import wrap
from megatron_epp.cost.kept import FILE_NAME, RECORDED, WARM_UP, from_state
from megatron_epp.launch.run_folder import LOCK
from megatron_epp.plan import Action, EppError, Op, Plan
from megatron_epp.plan.serialize import load
from tests.support.mcore.changed_training import COLLECTIVES, PASSES, collective_us, pass_us
from tests.support.mcore.forked import CHANGED, job, launch, of_ranks, train
from tests.support.mcore.launch import PLANNED
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

LEARNING = WARM_UP + RECORDED
SCRIPT = ("--pipeline-model-parallel-size", 2, "--epp", "--epp-microbatches", "user")
LONGER = ("--override-opt-param-scheduler",)
WHILE = "while costs are learnt"


def test_a_resumed_script_starts_with_the_costs_of_the_run_before(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    before = train(tmp_path / "before", 2, *SCRIPT, "--save", kept, "--save-interval", LEARNING, iterations=LEARNING)
    assert WHILE in before.output
    text = (kept / FILE_NAME).read_text()
    (one,) = from_state(json.loads(text))
    assert one.costs.name == "learnt"
    assert (kept / LOCK).exists()  # no other run writes there meanwhile
    later = ("--load", kept, "--save", tmp_path / "later", "--save-interval", LEARNING + 2)
    after = train(tmp_path / "after", 2, *SCRIPT, *later, *LONGER, iterations=LEARNING + 2)
    assert (tmp_path / "later" / FILE_NAME).read_text() == text
    assert sorted(after.steps) == [LEARNING + 1, LEARNING + 2]
    assert WHILE not in after.output
    assert "costs are those that an earlier run of this model has learnt" in after.output
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
    other = train(tmp_path / "other", 2, *SCRIPT, "--load", kept, *LONGER, *recompute, iterations=LEARNING + 1)
    assert WHILE in other.output
    said = re.findall(r"costs are learnt again: .* since (.*)", other.output)
    assert len(said) == 1
    assert "--recompute-granularity was None and is full" in said[0]
    assert (kept / FILE_NAME).read_text() == text


def test_a_damaged_file_is_learnt_again(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"half a fi')
    run = train(tmp_path / "run", 2, *SCRIPT, "--load", tmp_path, iterations=1)
    assert WHILE in run.output
    assert re.search(rf"{FILE_NAME}: .*Costs are learnt again", run.output)


@pytest.fixture(scope="module")
def said() -> tuple[dict[str, Any], ...]:
    finished = job(2, "frameworks:learnt")
    ranks = of_ranks(finished)
    assert "the device was another one and is cpu" in finished.output
    assert len(ranks) == 2
    return ranks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_framework_keeps_costs_by_the_state_of_its_schedule(said: tuple[dict[str, Any], ...], rank: int) -> None:
    learning, resumed, elsewhere = said[rank]["schedules"]
    assert [one["learns"] for one in (learning, resumed, elsewhere)] == [False, False, True]
    assert resumed["state"] == learning["state"]
    assert len(elsewhere["state"]["pipelines"]) == 1
    assert "before the first call" in said[rank]["late"]


def test_all_ranks_have_the_same_state(said: tuple[dict[str, Any], ...]) -> None:
    states = [one["state"] for rank in said for one in rank["schedules"][:2]]
    assert len({json.dumps(state, sort_keys=True) for state in states}) == 1


def test_a_framework_may_ask_for_learnt_costs_and_for_no_others() -> None:
    wrap(costs="learn")
    for other in ("measure", "costs.json"):
        with pytest.raises(EppError, match=f"leave out costs={other!r}"):
            wrap(costs=other)


LOOKAHEAD = 1
FIRST = LEARNING + LOOKAHEAD + 1
"""First batch that is planned by learnt costs."""
TRAINING = shlex.split(
    "--pipeline-model-parallel-size 2 --seq-length 64 --max-position-embeddings 64 --untie-embeddings-and-output-weights "
    f"--vocab-size 255 --save-interval {LEARNING} --train-iters {FIRST} "
    f"--epp-vocab-parallel on --epp-costs learn --epp-lookahead {LOOKAHEAD} --epp-trace {FIRST - 1} {FIRST}"
)
TOLERANCE = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a training on two ranks, with its log, plans and checkpoints."""
    place = tmp_path_factory.mktemp("learnt")
    data = write_pair(place / "documents", documents_of(long_tailed_lengths(80, 64), vocab_size=255))
    flags = [*PLANNED, *TRAINING, "--data-path", data, "--save", place / "checkpoints", "--epp-report-dir", place]
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


def test_plans_change_to_the_times_of_shards_that_were_measured(folder: Path) -> None:
    before, after = (load(folder / f"plan-{number}.json") for number in (FIRST - 1, FIRST))
    assert after.costs == "learnt"
    assert ratios(after) == pytest.approx([1.0] * len(ratios(after)), rel=TOLERANCE)
    assert max(ratios(before)) < 0.5  # by formulas


def test_the_log_says_how_far_off_formulas_of_shards_were(folder: Path) -> None:
    said = re.findall(
        r"costs learnt from 3 iterations: .*, vocabulary shards ([\d.]+), their collectives ([\d.]+)\)",
        (folder / "log").read_text(),
    )
    assert len(said) == 1
    assert all(float(ratio) > 2.0 for ratio in said[0])


def test_times_of_shards_are_kept_with_the_checkpoints(folder: Path) -> None:
    (one,) = from_state(json.loads((folder / "checkpoints" / FILE_NAME).read_text()))
    assert one.costs.vocabulary.logits.per_token_us == pytest.approx(PASSES[Op.S].per_token_us, rel=TOLERANCE)
