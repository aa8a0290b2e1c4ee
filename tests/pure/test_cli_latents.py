"""``--latents`` of the commands: settled by plans where it is not given, refused where there are no latents."""

import json
from pathlib import Path

import pytest
import yaml

from megatron_epp.advice import configuration_search
from megatron_epp.cli.main import main
from megatron_epp.plan import digest
from megatron_epp.plan.serialize import load

MODEL = ["--model", "moonlight-16b-a3b", "--cluster", "h100x8", "--stages", "4", "--layers", "8", "--data-parallel", "8"]
LENGTHS = ["--lengths", "65536,9000,2000,500"]


def planned(tmp_path: Path, *flags: str) -> str:
    """Return the digest of the plan that `plan` makes."""
    path = tmp_path / "plan.json"
    assert main(["plan", *LENGTHS, *MODEL, *flags, "-o", str(path)]) == 0
    return digest(load(path))


@pytest.mark.parametrize(("cap_gb", "faster"), [("80", "off"), ("18", "on")])
def test_what_plans_faster_is_told_and_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cap_gb: str, faster: str
) -> None:
    cap = ["--memory-cap-gb", cap_gb]
    made = planned(tmp_path, *cap)
    assert f"megatron-epp: --latents {faster}: slices hand on" in capsys.readouterr().err
    assert planned(tmp_path, *cap, "--latents", faster) == made
    assert "--latents" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "memory", "compare"])
def test_a_model_without_latents_has_none_to_hand_on(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--lengths", "900,300", "--model", "tiny-gpt", "--latents", "on"]) == 2
    said = capsys.readouterr().err
    assert "--latents on is for a model with latent attention: give one with --model, or leave it out" in said
    assert "Traceback" not in said


def test_costs_of_a_pipeline_know_what_slices_hand_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.pure.test_cost_latents import costs

    (path := tmp_path / "costs.json").write_text(costs(True).to_json())
    assert main(["plan", "--lengths", "9000,300", "--model", "moonlight-16b-a3b", "--costs", str(path), "--latents", "on"]) == 2
    assert "has costs of a pipeline, which know what slices hand on: leave --latents out" in capsys.readouterr().err


def test_planners_are_compared_with_what_plans_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", *LENGTHS, *MODEL, "--memory-cap-gb", "18", "--planner", "greedy", "--planner", "1f1b", "--json"]
    makespans_us = []
    for choice in ([], ["--latents", "on"]):
        assert main([*words, *choice]) == 0
        printed = capsys.readouterr()
        rows = json.loads(printed.out)
        assert all(row["latents"] for row in rows)
        assert ("--latents on: slices hand on" in printed.err) == (not choice)
        makespans_us.append([row.get("makespan_us") for row in rows])
    assert makespans_us[0] == makespans_us[1]


def test_advice_says_what_slices_hand_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SEARCHED", "PLANNED"):
        monkeypatch.setattr(configuration_search, name, 1)
    recipe = tmp_path / "recipe.yaml"
    words = ["advise", *LENGTHS, "--model", "moonlight-16b-a3b", "--layers", "8", "--cluster", "h100x8", "--devices", "8"]
    words += ["--expert-parallel", "1"]  # the best has replicas that share experts, which no other command plans
    assert main([*words, "--global-batch-size", "8", "-o", str(recipe)]) == 0
    said = capsys.readouterr().out
    latents = yaml.safe_load(recipe.read_text())["epp"]["latents"]
    assert latents in ("on", "off")
    assert f"--epp-latents {latents}" in " ".join(said.split())
    assert f"--latents {latents}" in said.rpartition("again:")[2]
