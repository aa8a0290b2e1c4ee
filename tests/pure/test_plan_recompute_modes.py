"""Recompute modes are rows of one table: counts by column and by name, and a mode that is added."""

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan import NO_RECOMPUTE, EppError, Recompute
from megatron_epp.plan.recompute import MODES
from megatron_epp.tools.formulas import H100, ModelShape, Profile, analytic_costs, analytic_profile

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_epp"
SHAPE = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)


def test_counts_are_given_by_column_or_by_name_and_read_by_name():
    counts = Recompute(4, 0, 1)
    assert counts == Recompute(full=4, mlp=1) == (4, 0, 1)
    assert (counts.full, counts.selective, counts.mlp) == (4, 0, 1)
    assert (counts.num_layers, counts.attention_layers) == (5, 4)
    assert [counts.mode(layer) for layer in range(6)] == ["full"] * 4 + ["mlp", ""]
    assert (str(counts), str(NO_RECOMPUTE), json.dumps(counts)) == ("4 full + 1 mlp", "none", "[4, 0, 1]")
    assert all(
        type(same) is Recompute and same == counts for same in (copy.deepcopy(counts), pickle.loads(pickle.dumps(counts)))
    )


@pytest.mark.parametrize("wrong", [lambda: Recompute(1, 2, 3, 4), lambda: Recompute(half=1)])
def test_counts_of_modes_that_are_unknown_are_refused(wrong):
    with pytest.raises(TypeError):
        wrong()
    with pytest.raises(AttributeError):
        _ = NO_RECOMPUTE.half


def test_every_mode_has_a_column_of_its_own_and_those_that_repeat_attention_come_first():
    assert sorted(mode.column for mode in MODES.values()) == list(range(len(MODES)))
    repeats = [mode.repeats_attention for mode in MODES.values()]
    assert repeats == sorted(repeats, reverse=True)


@pytest.mark.parametrize("name", ["half", "whole", "linear"])
def test_costs_of_modes_that_are_unknown_are_refused(name: str):
    costs, profile = (json.loads(made.to_json()) for made in (analytic_costs(SHAPE, H100, [8]), analytic_profile(SHAPE, H100)))
    layers = next(block for block in costs["stages"][0]["blocks"] if block["kind"] == "layer")
    for of, read, body in ((layers, PipelineCosts, costs), (profile["layer"], Profile, profile)):
        of["recompute"][name] = of["recompute"]["mlp"]
        with pytest.raises(
            EppError, match=rf"recompute\.{name} is unknown; modes are full, selective, mlp.*megatron-epp profile"
        ):
            read.from_json(json.dumps(body))


ROW = """        RecomputeMode(name="attention", column=3, runs_again=frozenset({NORMS, PROJECTIONS, CORE_ATTENTION})),
"""
COSTS = """            "attention": ModeCosts(attention_forward, hidden + shape.mlp_bytes_per_token + 2 * hidden),
"""
ADDED = {  # file, line before which it is added, and what
    "plan/recompute.py": ('        RecomputeMode(\n            name="selective",\n', ROW),
    "tools/formulas/analytic.py": ('            "mlp": ModeCosts(', COSTS),
}
USE = """
import sys
from megatron_epp.tools.formulas import H100, ModelShape, analytic_costs
from megatron_epp.plan import check, to_grid
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.tools.report.text import peak_table

shape = ModelShape(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, vocab_size=1000)
costs = analytic_costs(shape, H100, [4, 4], state_bytes_per_parameter=0.0)
assert costs.recompute_modes == ("full", "attention", "selective", "mlp")
given = (9000, 3000, 500), (0, 1)
free = plan(Problem(*given, (1 << 60,) * 2), costs, Options(slices=4, steps=20_000))
made = plan(Problem(*given, (int(0.7 * max(free.predicted.peak_bytes)),) * 2), costs, Options(slices=4, steps=20_000))
counts = [again for row in made.recompute for again in row]
assert any(again.attention for again in counts)
assert all(again.attention_layers == again.full + again.attention for again in counts)
assert all(len(again) == 4 for again in counts)
assert check(made) == [] and from_json(to_json(made)) == made
assert any("attention" in str(again) for again in counts)
assert "recompute (attention)" in "\\n".join(peak_table(memory_breakdown(made, costs)))
"""


def test_a_mode_is_added_by_a_row_and_its_costs(tmp_path: Path):
    """Planning, memory, proof, JSON and reports take it from there, in a copy of this package."""
    shutil.copytree(PACKAGE, tmp_path / "megatron_epp")  # with its compiled inner loops, which stay as they are
    for file, (before, added) in ADDED.items():
        path = tmp_path / "megatron_epp" / file
        text = path.read_text(encoding="utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, added + before), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
