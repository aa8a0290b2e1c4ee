"""Learnt costs are kept: a resumed run of the same model starts with them, one of another model learns again and says why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_epp import wrap
from megatron_epp.cost.kept import from_state
from megatron_epp.cost.learning import RECORDED, WARM_UP
from megatron_epp.launch.run_folder import LOCK
from megatron_epp.mcore.costs.learnt import FILE_NAME
from megatron_epp.plan import EppError
from tests.support.mcore.forked import job, of_ranks, train

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
