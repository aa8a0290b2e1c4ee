"""`plan --why`: how the search came to a plan, and what keeps each setting where it is."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_epp.plan import UNLIMITED_BYTES, PlanError
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.why import changes, explain
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.cli.plan import why
from tests.support.plan.planner_cases import pipeline

README = (Path(__file__).parents[2] / "megatron_epp/planner/README.md").read_text(encoding="utf-8")
LENGTHS = (40961, 30000, 12000, 9000, 1200, 800, 700, 88)
V = Placement("v", 4, 2).rank_of


def asked(cap_bytes: int = UNLIMITED_BYTES, placement: tuple[int, ...] = (0, 1, 2, 3)) -> Problem:
    return Problem(LENGTHS, placement, (cap_bytes,) * (max(placement) + 1))


def tight(placement: tuple[int, ...] = (0, 1, 2, 3), share: float = 0.6) -> Problem:
    free = plan(asked(placement=placement), pipeline(len(placement)))
    static = max(free.static_bytes)
    return asked(static + int(share * (max(free.predicted.peak_bytes) - static)), placement)


def begun(tokens: int) -> Problem:
    """Return a batch whose second sequence begins with so many tokens of the first."""
    return replace(asked(), borrowed=(NOTHING_BORROWED, Borrowed(0, tokens), *[NOTHING_BORROWED] * 6))


CASES = {"no cap": asked(), "a tight cap": tight(), "a V under a tight cap": tight(V)}
CASES |= {"sequences begin alike": begun(29000), "too little to share": begun(90)}


@pytest.mark.parametrize("batch", CASES.values(), ids=CASES)
def test_the_plan_is_the_planners_and_every_step_of_a_walk_is_told(batch: Problem):
    costs = pipeline(batch.num_stages)
    explanation = explain(batch, costs, Options())
    assert explanation.plan == plan(batch, costs)
    for walk in explanation.walks:
        assert all(changes(before.recipe, after.recipe) for before, after in pairwise(walk.candidates))
        assert walk.candidates[-1].key == min(candidate.key for candidate in walk.candidates)
    free, under = explanation.walks
    assert under.candidates[0].recipe == free.candidates[-1].recipe  # it goes on where the walk without caps ended


def test_no_other_value_alone_is_clearly_faster_and_each_says_what_it_gives():
    explanation = explain(tight(share=0.15), pipeline(4), Options())
    best = explanation.walks[-1].candidates[-1]
    assert {other.setting for other in explanation.others} >= {"grain", "reach", "lead", "start"}
    for other in explanation.others:
        assert other.value != getattr(best.recipe, other.setting)
        assert other.candidate is None or other.candidate.key > (0, best.makespan_us * 0.999)
    assert any(other.candidate is not None and not other.candidate.fits for other in explanation.others)


def test_a_step_that_no_walk_took_has_a_word():
    batch, costs = replace(tight(share=0.4), host_cap_bytes=1 << 40), pipeline(4)
    walk = explain(batch, costs, Options(offload=True)).walks[-1]
    words = {
        word
        for (before, after), word in zip(pairwise(walk.candidates), walk.words[1:], strict=True)
        if before.recipe.copies != after.recipe.copies
    }
    assert walk.candidates[-1].recipe.copies != "none"
    assert words == {"opening: "}


def test_local_search_is_told_where_it_made_the_plan_faster():
    explanation = explain(Problem((632, 4763), (0, 1, 2, 3), (9 * 10**9,) * 4), pipeline(4), Options())
    assert explanation.plan.predicted.makespan_us < explanation.walks[-1].candidates[-1].makespan_us
    assert any("local search" in line for line in why(explanation))


def test_only_the_search_can_be_explained():
    with pytest.raises(PlanError, match="only the search of the planner greedy"):
        explain(asked(), pipeline(4), Options(planner="1f1b"))


def test_the_planners_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]):
    (command,) = re.findall(r"^    megatron-epp (plan .*)$", README, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert main(command.split()) == 0
    assert shown.strip() in capsys.readouterr().out
