"""The benchmark of the memory features on one small case: its figures are there and fit together."""

import pytest

from scripts.bench.memory import bench as bench_memory
from scripts.bench.memory.bench import BASE, VARIANTS, markdown, row, summary
from scripts.bench.planner.suite import Case
from tests.support.plan.planner_cases import pipeline, problem

pytestmark = pytest.mark.slow  # a benchmark from end to end; `test_planner_quality.py` has what each feature gains


@pytest.fixture(scope="module")
def found():
    case = Case("equal", 32768, 4, "llama3-8b", 12)
    case.__dict__.update(problem=problem((12288, 4096, 4096), 2), costs=pipeline(2, 2))  # what it would make of its lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_memory, "LONGEST", 1 << 16)
        return row(case)


def test_no_variant_is_slower_than_whole_layers_alone_nor_fits_less(found):
    for figures in found["caps"].values():
        assert figures[BASE] is not None
        for own in figures.values():
            assert own["makespan_us"] <= figures[BASE]["makespan_us"] * 1.01
            assert 0 < own["efficiency"] <= own["busiest"] <= 1
    assert all(found["longest"][name] >= found["longest"][BASE] for name in VARIANTS)
    assert found["longest"][BASE] > 0


def test_the_report_has_a_line_for_every_variant_and_case(found):
    report = {"rows": [found], "summary": summary([found]), "minutes": 1.0}
    lines = markdown(report).splitlines()
    assert all(any(line.startswith(f"| {name} |") for line in lines) for name in (*VARIANTS, found["name"]))
    base = report["summary"]["by_cap"]["0.1"][BASE]
    assert base["faster"] == 1.0
    assert base["efficiency"] == found["caps"]["0.1"][BASE]["efficiency"]
