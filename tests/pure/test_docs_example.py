"""The schedule that the documentation writes: it runs as it stands, is sound on any batch, and can be named from elsewhere."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.cost import H100, analytic_costs
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.plan import Op, PlanError, check, load
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.service.background import BackgroundPlanner

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "my_schedule.py"
NAME = "my_schedule:gpipe"
COSTS = analytic_costs(shape_of(load_flags("llama3-8b")), H100, [16, 16])
BATCH = Problem(lengths=(9000, 1, 700, 4096), placement=(0, 1), cap_bytes=(UNLIMITED_BYTES,) * 2)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))


def test_the_text_shows_the_file_as_it_is():
    assert f"```python\n{EXAMPLE.read_text()}```\n" in (DOCS / "your-own-schedule.md").read_text()


def test_the_second_example_runs_as_it_stands_and_prints_what_the_text_shows(tmp_path):
    second = DOCS / "examples" / "my_zero_bubble.py"
    text = (DOCS / "your-own-schedule.md").read_text()
    done = subprocess.run([sys.executable, second], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"```python\n{second.read_text()}```\n" in text
    assert f"```text\n{done.stdout}```\n" in text


def test_it_runs_as_it_stands_and_prints_what_the_text_shows(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"```text\n{done.stdout}```\n" in (DOCS / "your-own-schedule.md").read_text()
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
        background.close()
    assert packed.plan() == plan(BATCH, COSTS, Options(planner=NAME))


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("name", ["no_such_module:gpipe", "my_schedule:other", ":gpipe", "my_schedule:"])
def test_a_name_that_leads_nowhere_is_refused(name):
    with pytest.raises(PlanError, match=f"planner {name}: .*give module:function"):
        plan(BATCH, COSTS, Options(planner=name))


def test_the_command_line_takes_it():
    paths = os.pathsep.join([str(EXAMPLE.parent), *filter(None, sys.path)])
    command = [sys.executable, "-m", "megatron_epp.cli.main", "plan", "--lengths", "9000,700", "--planner", NAME]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert f"planner {NAME}" in done.stdout
