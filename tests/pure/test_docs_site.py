"""The documentation as a site: its navigation and links, lists of what the code has, and examples that run as they stand."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.plan import Action, Op
from megatron_epp.plan.chunk import NOTHING_BORROWED
from megatron_epp.plan.plan import KVOffload
from megatron_epp.plan.proof import check, report
from megatron_epp.plan.serialize import load, to_json
from megatron_epp.planner import PLANNERS, UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.tools.cli.main import MODULES
from megatron_epp.tools.formulas import H100, analytic_costs
from megatron_epp.tools.formulas.library import load_flags, shape_of
from megatron_epp.tools.report.text import summary
from scripts import write_api
from tests.support import ROOT

README = (ROOT / "README.md").read_text()
SPEED = (ROOT / "docs" / "memory-and-speed.md").read_text()


def test_every_figure_of_the_readmes_table_names_its_command():
    rows = README[README.index("| what | figure | command |") :].partition("\n\n")[0].splitlines()[2:]
    table = [line.strip("|").split("|") for line in rows]
    assert len(table) > 4
    for what, figure, command in table:
        assert re.search(r"\d", figure) or (what.strip().startswith("GPUs: ") and not figure.strip()), what
        program, name = re.search(r"`(python -m|pytest|megatron-epp) ([\w./-]+)", command).groups()
        found = {
            "python -m": importlib.util.find_spec,
            "pytest": lambda path: (ROOT / path).is_file(),
            "megatron-epp": MODULES.get,
        }
        assert found[program](name), what


def test_one_page_says_what_has_run_on_a_gpu_and_all_others_link_it():
    there = "first-hour.md#what-has-run-on-a-gpu"
    assert f"**Nothing was measured on several GPUs**: [what has run on a GPU, and what has not](docs/{there})" in README
    pages = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}
    linking = {name for name, text in pages.items() if f"hat has run on a GPU, and what has not]({there})" in text}
    assert {"supported.md", "your-loop.md"} <= linking
    for text in (README, *(text for name, text in pages.items() if name != "first-hour.md")):
        assert not re.search(r"on (a GPU|GPUs|them) yet|has run on CPU only", text)


def test_installing_brings_what_planning_needs_and_quickstart_no_tools_of_tests(monkeypatch):
    given = {}
    setuptools = pytest.importorskip("setuptools", reason="needs setuptools: pip install 'megatron-epp[dev]'")
    monkeypatch.setattr(setuptools, "setup", lambda **settings: given.update(settings))
    runpy.run_path(str(ROOT / "setup.py"))

    def names(requirements):
        return {re.match(r"[\w-]+", one)[0] for one in requirements}

    assert names(given["install_requires"]) == {"numpy", "packaging", "pyyaml"}
    (extras,) = re.findall(r"EPP_EXTRAS:-([\w,]+)", (ROOT / "scripts" / "common.sh").read_text())
    assert "EPP_EXTRAS" not in (ROOT / "scripts" / "quickstart.sh").read_text()
    quickstart = set().union(*(names(given["extras_require"][extra]) for extra in extras.split(",")))
    assert quickstart == {"torch", "megatron-core", "numba", "matplotlib"}
    assert quickstart | {"selenium", "mkdocs-material", "ruff", "pytest"} <= names(given["extras_require"]["dev"])


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- .+: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(["index.md", *(page.name for page in (ROOT / "docs").glob("*.md"))])


FOLDERS = ("megatron_epp", "tests", "docs", "patches")
PAGES = {page: page.read_text() for page in (*ROOT.glob("*.md"), *(page for f in FOLDERS for page in (ROOT / f).rglob("*.md")))}


def test_every_file_that_a_page_names_is_there():
    named = {
        (page, path)
        for page, text in PAGES.items()
        if page.name != "CHANGELOG.md"  # which tells of files that have gone
        for path in re.findall(r"`((?:megatron_epp|tests|scripts|docs|configs|patches)/[\w./-]+)`", text)
    }
    assert len(named) > 100
    assert not [entry for entry in sorted(named) if not (ROOT / entry[1]).exists() and entry[1] != "megatron_epp/patches/"]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install '.[docs]'")
def test_the_site_builds_and_every_link_leads_to_a_page_and_a_heading(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()


def test_the_page_lists_the_metrics_that_training_writes():
    source = (ROOT / "megatron_epp" / "mcore" / "iteration" / "loggers.py").read_text()
    written = [re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(name)) for name in re.findall(r'f?"(epp/[^"]+)"', source)]
    section = SPEED[SPEED.index("### Metrics") : SPEED.index("**Prometheus**")]
    listed = re.findall(r"`(epp/[^`]+)`", section)
    assert len(written) > 10
    assert [name for name in written if not any(re.fullmatch(name, one) for one in listed)] == []
    assert [one for one in listed if not any(re.fullmatch(name, one) for name in written)] == []


def test_the_page_names_fields_that_a_report_has():
    source = (ROOT / "megatron_epp" / "mcore" / "iteration" / "report.py").read_text()
    fields = re.findall(r"\\\(\.([\w.]+)\)", next(line for line in SPEED.splitlines() if "jq -r" in line))
    assert "makespan_us.measured" in fields
    for field in fields:
        assert all(f'"{part}"' in source for part in field.split(".")), field


def test_the_page_of_the_api_is_current():
    assert write_api.TARGET.read_text() == write_api.document(), "run: python scripts/write_api.py"


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
    monkeypatch.setitem(PLANNERS, "my_gpipe", None)  # which importing it adds, for all tests behind


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
    with closing(background.process):
        (packed,) = background.plan(BATCH)
    assert packed.plan() == plan(BATCH, COSTS, Options(planner=NAME))


@pytest.fixture(scope="module")
def shown():
    return load(FILE)


def test_it_is_sound_and_prints_as_shown(shown):
    assert not check(shown)
    assert f"```text\n{summary(shown)}\n```\n" in PAGE, f"the page shows another text: megatron-epp show {FILE}"


def test_every_field_that_a_file_may_have_is_explained(shown):
    """The example's, and those that are written only where a plan has KV offload or links that ranks share,
    where messages in flight are counted, where chunks share a loss, and where sequences share prefixes.
    """
    ranks = range(shown.num_ranks)
    more = replace(shown, kv_offload=(KVOffload(0, 0, 1, 1),), host_cap_bytes=tuple(ranks), host_links=tuple(ranks))
    more = replace(more, message_bytes=tuple(ranks), loss_groups=((0, 1),), borrowed=(NOTHING_BORROWED,))
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
