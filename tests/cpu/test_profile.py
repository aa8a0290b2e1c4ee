"""Profiling this machine: what is measured and that it makes a profile to plan with. No time is judged."""

from dataclasses import replace

import pytest
import torch

from megatron_epp.plan.serialize import load
from megatron_epp.runtime.links.processes import measure_link
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.cli.measure_profile import fit_profile
from megatron_epp.tools.formulas import CPU, ModelShape, Profile
from megatron_epp.tools.machine.profiling import Grid, measure

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=128,
    bytes_per_value=4,
)
GRID = Grid(tokens=(16, 64), prefixes=(0, 32), copy_bytes=(1 << 10, 1 << 14))
KINDS = {
    *(f"{kind} {way}" for kind in ("linear", "attention", "loss", "embedding") for way in ("forward", "backward")),
    *("linear weight", "loss weight", "host copy"),
}


@pytest.mark.parametrize(("gated", "rotates"), [(True, False), (False, True)])
def test_every_part_is_measured_at_every_point(gated, rotates):
    shape = replace(SHAPE, gated_mlp=gated, rotates=rotates)
    seen = []
    points = measure(shape, torch.device("cpu"), GRID, seen.append)
    assert (set(points), seen) == (KINDS, [*("linear", "attention", "loss", "embedding") * 3, "host copy"])
    assert all(point.time_us > 0 for some in points.values() for point in some)
    assert [p.tokens for p in points["linear forward"]] == [16, 64]
    expected = [(n, n * prefix + n * (n + 1) / 2) for n in GRID.tokens for prefix in GRID.prefixes]
    assert [(p.tokens, p.pairs) for p in points["attention backward"]] == expected
    profile = fit_profile(points, shape, CPU, "here", {})
    assert profile.layer.forward.time_us(64, 2080) > 0
    assert profile.layer.backward.time_us(64, 2080) > profile.layer.weight.time_us(64, 0) > 0
    assert 0 < profile.attention.forward.time_us(64, 2080) < profile.layer.forward.time_us(64, 2080)


def test_the_link_between_two_ranks_is_measured_by_size():
    points = measure_link(gpus=False)
    assert [p.tokens for p in points] == sorted({p.tokens for p in points})
    assert all(p.time_us > 0 for p in points)


def test_the_command_writes_a_profile_that_plans(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "profile.json"
    argv = ["profile", "--model", "tiny-gpt", "--tokens", "16,64", "--prefixes", "0,32"]
    assert main([*argv, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert "attention forward" in out
    assert "message" in out
    origin = Profile.from_json(path.read_text()).origin
    assert origin["source"] == "measured"
    assert {"machine", "date", "versions", "shape", "residuals", "points"} <= set(origin)
    assert torch.__version__.startswith(origin["versions"]["torch"])
    assert origin["by_formula"] == ["memory"]
    asked = ["--lengths", "500,40", "--stages", "2", "--layout", "even", "--vocab-parallel", "off"]
    assert main(["plan", *asked, "--costs", str(path), "-o", str(tmp_path / "plan.json")]) == 0
    made = load(tmp_path / "plan.json")
    assert made.num_layers == (2, 2)
    assert made.costs == "measured:cpu"
