"""Plans are the same whether the inner loops are compiled or run as they stand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp import COMPILED_VARIABLE
from megatron_epp.planner.kernels import compiled
from megatron_epp.planner.kernels.compiled import is_compiled

NEEDS_NUMBA = pytest.mark.skipif(not is_compiled(), reason="needs numba: pip install 'megatron-epp[fast]'")

PLANNING = """
from dataclasses import replace
from tests.support.plan.campaign_cases import case_of, planned
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths
from megatron_epp.planner import Options, plan
from megatron_epp.plan import digest
from megatron_epp.planner.kernels.compiled import is_compiled

print(is_compiled())
for lengths, stages, options in [
    ((9000, 4000, 700), 2, Options(slices=3, steps=60)),
    (web_lengths(4, seed=1, longest=30000), 3, Options(steps=30)),
    (web_lengths(3, seed=2, longest=30000), 2, Options(split_weight=True, offload=True, steps=30)),
]:
    for turns in (1, 2):
        costs = replace(pipeline(stages), host_turns=turns)
        print(digest(plan(problem(lengths, stages, 30 * GIB), costs, options)))
for options in (Options(slices=4), Options(slices=2, split_weight=True)):
    twice = replace(problem((9000, 4000, 700), 4, 30 * GIB), placement=(0, 1, 0, 1), cap_bytes=(30 * GIB,) * 2)
    print(digest(plan(twice, pipeline(4), options)))
print(digest(planned(case_of(47))))  # with the vocabulary in shards
"""


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {COMPILED_VARIABLE: "1", "PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)


@NEEDS_NUMBA
def test_plans_are_equal_with_and_without_the_compiler():
    fast, plain = (run(PLANNING, **{COMPILED_VARIABLE: value}).stdout.split() for value in ("1", "0"))
    assert (fast[0], plain[0]) == ("True", "False")
    assert fast[1:] == plain[1:]


UNKEPT = """
from megatron_epp.planner.kernels.compiled import compiled

def doubled(number):
    return 2 * number

def halved(number):
    return number // 2

print(compiled(doubled)(21), compiled(halved)(42))
"""


@NEEDS_NUMBA
def test_where_no_folder_can_keep_compiled_loops_they_are_compiled_again_and_a_line_says_so():
    done = run(UNKEPT, NUMBA_CACHE_LOCATOR_CLASSES="IPythonCacheLocator")  # which keeps only what is written in IPython
    assert done.stdout == "42 21\n"
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


KEEPING = """
import numpy as np
from megatron_epp.planner.kernels.timing import mark_split
mark_split(np.array([1, 2]), np.array([0]))
"""


@NEEDS_NUMBA
def test_loops_are_compiled_once_and_kept_by_the_name_of_all_their_sources(tmp_path: Path):
    """numba looks at a function's own file alone, and a loop that is inlined, or its columns, may be in another one."""
    said = [run(KEEPING, NUMBA_CACHE_DIR=str(tmp_path)).stderr for _ in range(2)]
    assert said == ["megatron-epp compiles the planner's loops, once for this machine: 10 to 25 s of a core\n", ""]
    (kept,) = tmp_path.rglob("*.nbi")
    assert compiled._sources() in kept.name
    folder = tmp_path / "kernels"
    shutil.copytree(Path(compiled.__file__).parent, folder)
    assert compiled._sources(folder) == compiled._sources()
    with (folder / "table_columns.py").open("a") as file:
        file.write("# another line")
    compiled._sources.cache_clear()
    assert compiled._sources(folder) != compiled._sources()
