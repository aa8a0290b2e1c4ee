"""What commands plan: batches, models, clusters, costs and layers as flags give them, called in-process."""

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megatron_epp.plan import Op, Plan
from megatron_epp.plan.layout import Layout, staged_pattern
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.serialize import load
from megatron_epp.planner import UNLIMITED_BYTES
from megatron_epp.tools.advice import configuration_search
from megatron_epp.tools.cli.main import _parser, main
from megatron_epp.tools.formulas import H100_NODE, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of
from tests.pure.test_cli_refusals import INDEX

SMALL = "--model tiny-gpt --cluster this-machine --pipeline-size 2 --layout even"
BATCH = "--lengths 9000,4000,4000,2000,1000,700"
MOONLIGHT = "--lengths 65536,9000,2000,500 --model moonlight-16b-a3b --cluster h100x8 --stages 4 --layers 8 --data-parallel 8"
Planned = Callable[[str], Plan]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Planned:
    """Return the plan that `plan` writes for flags, and work in a folder with files of lengths, costs and a layout."""
    (tmp_path / "lengths.txt").write_text("4000\n300, 200\n100\n")
    (tmp_path / "documents.idx").write_bytes(INDEX)
    (tmp_path / "v.json").write_text(Layout((7, 8, 9, 8), Placement("v", 2, 2)).to_json())
    llama = analytic_profile(shape_of(load_flags("llama3-8b") | {"seq_length": 9000}), H100_NODE)
    (tmp_path / "llama.json").write_text(llama.to_json())
    (tmp_path / "lopsided.json").write_text(llama.costs([20, 12]).to_json())
    monkeypatch.chdir(tmp_path)

    def plan(flags: str) -> Plan:
        monkeypatch.setattr(sys, "stdin", io.StringIO("4000 300 200 100"))
        assert main(["plan", *shlex.split(flags), "-o", "plan.json"]) == 0
        return load("plan.json")

    return plan


@pytest.mark.parametrize(
    "flags",
    [
        [f"{source} {SMALL}" for source in ("--lengths 4000,300,200,100", "--lengths lengths.txt", "--lengths-file -")],
        [
            f"--lengths 4096,88 --layout even {names}"
            for names in (
                "--stages 4 --layers 8 --kv-heads 2 --chunk-tokens 512",
                "--pipeline-model-parallel-size 4 --num-layers 8 --num-query-groups 2 --epp-chunk-tokens 512",
            )
        ],
        *(
            [f"--lengths 9000,300 --stages {stages} {of}" for of in ("--costs llama.json", "--model llama3-8b")]
            for stages in ("2", "5 --layout even")
        ),
        [f"{BATCH} --layout v.json", f"{BATCH} --layout v.json --stages 2"],
    ],
    ids=["lengths", "Megatron's names", "costs of 2", "costs of 5", "a layout's ranks"],
)
def test_flags_that_mean_the_same_make_the_same_plan(flags: list[str], planned: Planned) -> None:
    first, *others = map(planned, flags)
    assert others == [first] * len(others)


def test_a_choice_that_plans_make_is_told_and_one_that_is_given_is_not(planned: Planned, capsys: Capture) -> None:
    for cap_gb, faster in ((80, "off"), (18, "on")):
        made = planned(f"{MOONLIGHT} --layout even --memory-cap-gb {cap_gb}")
        assert f"--latents {faster}" in capsys.readouterr().err
    assert planned(f"{MOONLIGHT} --layout even --memory-cap-gb {cap_gb} --latents {faster}") == made
    assert "--latents" not in capsys.readouterr().err
    for flags, is_told in (("", True), (" --tensor-parallel 4", False)):
        planned(f"--lengths 1000 --model llama3-70b --cluster h100x8 --stages 8 --layout even{flags}")
        assert ("tensor parallelism over 8 ranks" in capsys.readouterr().err) == is_told


@pytest.mark.parametrize(
    ("flags", "lengths"),
    [
        ("--lengths lengths.txt --batch-size 5 --context 1500", (1500, 1500, 1000, 300, 200)),
        ("--lengths lengths.txt --batch-size 5 --context 1500 --documents truncate", (1500, 300, 200, 100)),
        ("--lengths documents.idx", (99, 49, 6)),
    ],
)
def test_documents_become_sequences_as_in_training(flags: str, lengths: tuple[int, ...], planned: Planned) -> None:
    assert planned(f"{flags} {SMALL}").lengths == lengths


def test_a_shipped_model_and_cluster_set_costs_layers_and_cap(planned: Planned) -> None:
    made = planned("--lengths 9000,300 --model llama3-8b --cluster h200x8 --stages 8 --seed 3 --layout even")
    assert (made.num_layers, made.cap_bytes) == ((4,) * 8, (int(0.9 * 141 * 2**30),) * 8)
    assert (made.costs, made.seed) == ("analytic:h200x8", 3)


def test_flags_given_beside_a_model_win_and_without_a_cluster_there_is_no_cap(planned: Planned) -> None:
    made = planned("--lengths 300 --model llama3-8b --layers 6 --stages 4 --memory-gb 900 --layout 1,2,2,1")
    assert (made.num_layers, made.cap_bytes) == ((1, 2, 2, 1), (900 * 2**30,) * 4)
    assert planned("--lengths 300 --stages 2 --layout even").cap_bytes == (UNLIMITED_BYTES,) * 2
    assert planned("--lengths 300 --costs llama3-70b-h100 --stages 8 --layout even").num_layers == (10,) * 8


def test_weight_gradients_are_split_and_activations_offloaded_where_asked(planned: Planned) -> None:
    batch = "--lengths 60000,9000 --stages 4 --data-parallel 8 --memory-gb 54 --layout balanced"
    choices = "", "--split-weight", "--offload --recompute-modes full", "--split-weight --offload"
    plain, split, copied, both = (planned(f"{batch} {flags}") for flags in choices)
    assert not any(step.action.op is Op.W for steps in plain.ranks for step in steps)
    assert any(step.action.op is Op.W for steps in split.ranks for step in steps)
    assert any(copied.copies)
    makespans = [made.predicted.makespan_us for made in (plain, split, copied)]
    assert min(makespans) < max(makespans[1:]) < makespans[0]
    assert {Op.W, Op.O} <= {step.action.op for row in (*both.ranks, *both.copies) for step in row}


def test_a_profile_by_formula_is_written_by_both_of_its_names_and_plans_as_its_model(planned: Planned, capsys: Capture) -> None:
    for number, command in enumerate((["profile"], ["doctor", "--profile"])):
        assert main([*command, "--model", "tiny-gpt", "--by-formula", "this-machine", "-o", f"{number}.json"]) == 0
        assert "nothing was measured" in capsys.readouterr().out
    assert Path("0.json").read_text() == Path("1.json").read_text()
    assert planned("--lengths 300,20 --costs 0.json --stages 2 --layout even") == planned(f"--lengths 300,20 {SMALL}")


@pytest.mark.parametrize(
    ("flags", "layers", "placement"),
    [
        ("--layout 10,12,10", (10, 12, 10), (0, 1, 2)),
        ("--layout 9,8,8,7 --stages 4", (9, 8, 8, 7), (0, 1, 2, 3)),
        ("--layout v.json", (7, 8, 9, 8), (0, 1, 1, 0)),
        ("--layers 8 --stages 3 --layout v:1,1,1,1,2,2", (1, 1, 1, 1, 2, 2), (0, 1, 2, 2, 1, 0)),
        ("--layers 8 --stages 2 --layout looped:2,2,2,2", (2, 2, 2, 2), (0, 1, 0, 1)),
        ("--layers 8 --stages 2 --layout looped:4,4", (4, 4), (0, 1)),
    ],
)
def test_layers_and_ranks_of_stages_are_as_given(flags: str, layers: tuple, placement: tuple, planned: Planned) -> None:
    made = planned(f"--lengths 900,300 {flags}")
    assert (made.num_layers, made.placement) == (layers, placement)


@pytest.mark.parametrize(
    ("flags", "multiple"),
    [
        ("", 1),
        ("--tensor-parallel 2", 1),
        ("--tensor-parallel 2 --sequence-parallel --context-parallel 4", 8),
        ("--tensor-parallel 2 --sequence-parallel --fp8-format hybrid --fp8-recipe blockwise", 256),
        ("--tensor-parallel 2 --sequence-parallel --token-multiple 16", 16),
    ],
)
def test_chunks_are_padded_as_a_training_pads_them_unless_said_otherwise(flags: str, multiple: int, planned: Planned) -> None:
    assert planned(f"--lengths 900,300 --stages 2 --model llama3-8b --layout even {flags}").token_multiple == multiple


def test_commands_search_the_same_layout_where_none_is_given_and_say_so(planned: Planned, capsys: Capture) -> None:
    batch = f"{BATCH} --stages 4 --slices 2 --layers 16"
    made, auto = (planned(f"{batch}{layout}") for layout in ("", " --layout auto"))
    for command in ("memory", "compare --planner greedy"):
        assert main([*command.split(), *batch.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("layout: ")]
    assert (len(lines), len(set(lines))) == (4, 1)
    assert lines[0].startswith("layout: stages of ")
    given = [f"{batch} --layout {kind} --vocab-parallel off" for kind in ("balanced", "even")]
    balanced, even = map(planned, given)
    whole_us = [planned(f"{flags} --split-weight off").predicted.makespan_us for flags in given]
    assert made == auto
    assert balanced.num_layers[-1] < even.num_layers[-1]
    assert whole_us[0] < whole_us[1]
    for each, without_us in zip((balanced, even), whole_us, strict=True):
        assert made.predicted.makespan_us < each.predicted.makespan_us < without_us, "weight gradients are chosen for all"


def test_a_schedule_that_needs_a_v_is_planned_and_compared_in_one_and_its_layout_is_told(planned, capsys) -> None:
    flags = f"{BATCH} --stages 4 --layout balanced --planner zb-v --split-weight --slices 4"
    made = planned(f"{flags} --layout-out layout.json")
    assert made.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert Layout.from_json(Path("layout.json").read_text()).placement == Placement("v", 4, 2)
    assert "2 per rank, v" in capsys.readouterr().out
    assert main(["compare", *flags.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["makespan_us"] == made.predicted.makespan_us


def test_auto_plans_with_a_searched_layout_and_writes_it(planned: Planned, capsys: Capture) -> None:
    batch = f"{BATCH} --layers 16 --slices 2"
    made = planned(f"{batch} --layout auto --layout-out chosen.json")
    told = capsys.readouterr().out
    layout = Layout.from_json(Path("chosen.json").read_text())
    assert made.num_layers == layout.layers
    assert made.placement == layout.placement.rank_of
    assert layout.to_megatron() is None or layout.to_megatron() in told
    assert made.predicted.makespan_us < planned(f"{batch} --layout balanced").predicted.makespan_us
    assert planned(f"{batch} --layout chosen.json --split-weight --loss-block-tokens 0") == made
    assert planned(f"{batch} --layout auto --planner seq1f1b").placement == (0, 1, 2, 3), "it knows one stage per rank alone"


@pytest.mark.parametrize("command", ["compare --planner greedy", "memory", "memory --planner zb-v"])
def test_other_commands_take_the_layout_of_a_file_and_the_placement_of_a_planner(command, planned, capsys) -> None:
    layout = ["--stages", "4"] if "zb-v" in command else ["--layout", "v.json"]
    assert main([*command.split(), *BATCH.split(), *layout]) == 0
    told = capsys.readouterr().out
    assert "2 per rank, v" in told
    assert "zb-v" in command or "stages of 7, 8, 9, 8 layers" in told


def test_stages_of_a_hybrid_model_are_its_pattern(planned: Planned, capsys: Capture) -> None:
    planned("--model nemotron-3-nano --lengths 3000,200 --layout 27,25")
    pattern = load_flags("nemotron-3-nano")["hybrid_layer_pattern"]
    assert f"--hybrid-layer-pattern '{pattern[:27]}|{pattern[27:]}'" in capsys.readouterr().out
    assert staged_pattern("M*-E/*E/*E", [3, 1]) == "M*-|E/*E/*E"


def test_costs_of_a_whole_pipeline_settle_its_layers(planned: Planned, capsys: Capture) -> None:
    assert planned("--lengths 9000,300 --stages 2 --costs lopsided.json").num_layers == (20, 12)
    assert "the busiest takes" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "memory", "compare", "advise"])
def test_the_number_of_stages_has_one_name_in_every_command_and_older_ones_work(command: str, capsys: Capture) -> None:
    parser = _parser([command])
    with pytest.raises(SystemExit):
        parser.parse([command, "--help"])
    told = capsys.readouterr().out
    assert "--stages" in told
    for name in ("--stages", "--pipeline-size", "--pipeline-parallel", "--pipeline-model-parallel-size"):
        assert name == "--stages" or f"{name} " not in told
        args = parser.parse([command, "--lengths", "9,5", name, "3", *(["--devices", "8"] if command == "advise" else [])])
        assert (args.pipeline_parallel if command == "advise" else args.stages) == 3


def test_planners_and_advice_are_compared_with_the_latents_that_plan_faster(tmp_path: Path, capsys, monkeypatch) -> None:
    planners = "--layout balanced --memory-cap-gb 18 --planner greedy --planner 1f1b --json"
    assert main(["compare", *MOONLIGHT.split(), *planners.split()]) == 0
    printed = capsys.readouterr()
    assert all(row["latents"] for row in json.loads(printed.out))
    assert "--latents on" in printed.err
    for name in ("SEARCHED", "PLANNED"):
        monkeypatch.setattr(configuration_search, name, 1)
    recipe = tmp_path / "recipe.yaml"
    argv = ["advise", *MOONLIGHT.split()[:4], "--layers", "8", "--cluster", "h100x8", "--devices", "8"]
    argv += ["--expert-parallel", "1"]  # the best has replicas that share experts, which no other command plans
    argv += ["--pipeline-parallel", "4", "--context-parallel", "1"]  # fewer to choose from
    assert main([*argv, "--global-batch-size", "8", "-o", str(recipe)]) == 0
    told = capsys.readouterr().out
    latents = yaml.safe_load(recipe.read_text())["epp"]["latents"]
    assert latents in ("on", "off")
    assert f"--epp-latents {latents}" in " ".join(told.split())
    assert f"--latents {latents}" in told.rpartition("again:")[2]
