"""Examples of the documentation: schedules run as they stand and are sound on any batch; the plan is read as it is."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.formulas import H100, analytic_costs
from megatron_epp.formulas.library import load_flags, shape_of
from megatron_epp.plan import Action, Op, check, load, report
from megatron_epp.plan.plan import KVOffload
from megatron_epp.plan.serialize import to_json
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.report.text import summary

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLES = DOCS / "examples"
PAGE = (DOCS / "reading-a-plan.md").read_text()
FILE = EXAMPLES / "plan.json"
NAME = "my_schedule:gpipe"
COSTS = analytic_costs(shape_of(load_flags("llama3-8b")), H100, [16, 16])
BATCH = Problem(lengths=(9000, 1, 700, 4096), placement=(0, 1), cap_bytes=(UNLIMITED_BYTES,) * 2)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("name", ["my_schedule", "my_zero_bubble"])
def test_an_example_is_shown_as_it_is_and_prints_what_the_text_shows(name, tmp_path):
    file, text = EXAMPLES / f"{name}.py", (DOCS / "your-own-schedule.md").read_text()
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"```python\n{file.read_text()}```\n" in text
    assert f"```text\n{done.stdout}```\n" in text
    if name == "my_schedule":
        made = load(tmp_path / "gpipe.json")
        assert made.planner == "my_gpipe"
        assert not check(made)
        assert (tmp_path / "gpipe.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("problem", [BATCH, replace(BATCH, forward_only=True), replace(BATCH, token_multiple=8)])
def test_all_forwards_run_before_all_backwards(problem):
    made = plan(problem, COSTS, Options(planner=NAME))
    for rank in range(made.num_ranks):
        ops = [action.op for action in made.actions(rank)]
        assert ops == [Op.F] * len(made.chunks) + [Op.B] * (0 if problem.forward_only else len(made.chunks))


@pytest.mark.usefixtures("example")
def test_the_process_that_plans_for_training_finds_it():
    background = BackgroundPlanner(COSTS, Options(planner=NAME))
    try:
        (packed,) = background.plan(BATCH)
    finally:
        background.process.close()
    assert packed.plan() == plan(BATCH, COSTS, Options(planner=NAME))


# ---- the plan that the documentation reads ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown():
    return load(FILE)


def test_it_is_sound_and_prints_as_shown(shown):
    assert not check(shown)
    assert f"```text\n{summary(shown)}\n```\n" in PAGE, f"the page shows another text: megatron-epp show {FILE}"


def test_every_field_that_a_file_may_have_is_explained(shown):
    """The example's, and those that are written only where a plan has KV offload or links that ranks share,
    where messages in flight are counted, where chunks share a loss, and where layers are cut.
    """
    ranks = range(shown.num_ranks)
    more = replace(shown, kv_offload=(KVOffload(0, 0, 1, 1),), host_cap_bytes=tuple(ranks), host_links=tuple(ranks))
    more = replace(more, message_bytes=tuple(ranks), loss_groups=((0, 1),), half_layers=tuple(ranks))
    table = PAGE.partition("| field |")[2]
    explained = {name for cells in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cells)}
    assert explained == set(json.loads(to_json(more)))
    assert set(json.loads(FILE.read_text())) < explained


def test_a_fault_is_reported_as_shown(shown):
    steps = list(shown.ranks[0])
    at = {step.action: position for position, step in enumerate(steps)}
    one, other = (at[Action.parse(text)] for text in ("0B1", "0B0"))
    steps[one], steps[other] = steps[other], steps[one]
    broken = replace(shown, ranks=(tuple(steps), *shown.ranks[1:]))
    assert f"```text\nswapped.json: {report(broken, check(broken))}```\n" in PAGE
