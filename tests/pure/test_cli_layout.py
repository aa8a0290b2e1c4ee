"""``--layout``: given, balanced, searched, from a file; and what is refused."""

import json

import pytest

from megatron_epp.cli.main import _parser, main
from megatron_epp.cost.library import load_flags
from megatron_epp.plan.layout import Layout, staged_pattern
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.serialize import load
from tests.support.seeds import some_by_default

BATCH = ["--lengths", "9000,4000,4000,2000,1000,700"]
V = Layout.of_layers((7, 8, 9, 8), Placement("v", 2, 2))


def planned(tmp_path, *argv):
    path = tmp_path / "plan.json"
    assert main(["plan", *BATCH, *argv, "-o", str(path)]) == 0
    return load(path)


def error_of(capsys, *argv):
    assert main(["plan", *BATCH, *argv]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.fixture
def layout_file(tmp_path):
    path = tmp_path / "layout.json"
    path.write_text(V.to_json())
    return path


def test_a_list_says_how_many_stages_there_are(tmp_path, capsys):
    assert planned(tmp_path, "--layout", "10,12,10").num_layers == (10, 12, 10)
    assert "--pipeline-model-parallel-layout 'Et*10|t*12|t*10L'" in capsys.readouterr().out
    planned(tmp_path, "--layout", "even")
    assert "in training:" not in capsys.readouterr().out


@some_by_default("stages", [4, 6], 1)
def test_commands_agree_on_balanced_layers_where_none_are_given_and_say_so(tmp_path, capsys, stages):
    batch = [*BATCH, "--stages", str(stages)]
    lines, layers = [], []
    for command in (["plan"], ["memory"], ["compare", "--planner", "greedy"]):
        assert main([*command, *batch]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("layout: "))
        lines.append(line)
    assert len(set(lines)) == 1
    assert lines[0].startswith("layout: balanced, stages of ")
    makespans = []
    for more in ([], ["--layout", "balanced"]):
        made = planned(tmp_path, "--stages", str(stages), *more)
        layers.append(made.num_layers)
        makespans.append(made.predicted.makespan_us)
    assert layers[0] == layers[1] != planned(tmp_path, "--stages", str(stages), "--layout", "even").num_layers
    capsys.readouterr()
    assert main(["compare", "--planner", "greedy", "--json", *batch, "--slices", "4"]) == 0
    first = json.loads(capsys.readouterr().out)[0]["makespan_us"]
    assert planned(tmp_path, "--stages", str(stages), "--slices", "4").predicted.makespan_us == first


def test_planners_of_other_placements_have_balanced_layers_in_every_command(tmp_path, capsys):
    batch = [*BATCH, "--stages", "4"]
    made = planned(tmp_path, "--stages", "4", "--planner", "zb-v", "--slices", "4", "--split-weight")
    capsys.readouterr()
    assert main(["compare", "--planner", "zb-v", "--json", *batch, "--slices", "4", "--split-weight"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["makespan_us"] == made.predicted.makespan_us


@pytest.mark.parametrize("name", ["--stages", "--pipeline-size", "--pipeline-parallel", "--pipeline-model-parallel-size"])
def test_the_number_of_stages_has_one_name_in_every_command_and_older_ones_work(capsys, name):
    for command in ("plan", "memory", "compare", "advise"):
        parser = _parser([command])
        with pytest.raises(SystemExit):
            parser.parse([command, "--help"])
        helped = capsys.readouterr().out
        assert "--stages" in helped
        assert name == "--stages" or f"{name} " not in helped
        args = parser.parse([command, "--lengths", "9,5", name, "3", *(["--devices", "8"] if command == "advise" else [])])
        assert (args.pipeline_parallel if command == "advise" else args.stages) == 3


def test_a_file_says_the_ranks_too(tmp_path, layout_file):
    made = planned(tmp_path, "--layout", str(layout_file))
    assert made.placement == (0, 1, 1, 0)
    assert made.num_layers == (7, 8, 9, 8)
    assert planned(tmp_path, "--layout", str(layout_file), "--stages", "2") == made


def test_a_schedule_that_needs_a_v_is_planned_in_one_and_its_layout_is_the_one_that_is_told(tmp_path, capsys):
    path = tmp_path / "layout.json"
    made = planned(tmp_path, "--stages", "4", "--layout", "balanced", "--planner", "zb-v", "--layout-out", str(path))
    assert made.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert Layout.from_json(path.read_text()).placement == Placement("v", 4, 2)
    assert "2 per rank, v" in capsys.readouterr().out
    assert main(["memory", *BATCH, "--stages", "4", "--planner", "zb-v"]) == 0
    assert "2 per rank, v" in capsys.readouterr().out


def test_auto_plans_with_a_searched_layout_and_writes_it(tmp_path, capsys):
    path = tmp_path / "chosen.json"
    made = planned(tmp_path, "--layout", "auto", "--layout-out", str(path))
    said = capsys.readouterr().out
    layout = Layout.from_json(path.read_text())
    assert made.num_layers == tuple(count // 2 for count in layout.halves)
    assert made.placement == layout.placement.rank_of
    assert "saved)" in said
    assert layout.to_megatron() is None or layout.to_megatron() in said
    assert made.predicted.makespan_us < planned(tmp_path).predicted.makespan_us
    assert planned(tmp_path, "--layout", str(path)) == made


def test_auto_keeps_to_one_stage_per_rank_for_planners_that_know_no_other(tmp_path):
    assert planned(tmp_path, "--layout", "auto", "--planner", "seq1f1b").placement == (0, 1, 2, 3)


@pytest.mark.parametrize("command", ["compare", "memory"])
def test_other_commands_take_the_layout_of_a_file(command, layout_file, capsys):
    more = {"compare": ["--planner", "greedy"], "memory": []}[command]
    assert main([command, *BATCH, "--layout", str(layout_file), *more]) == 0
    assert "stages of 7, 8, 9, 8 layers, 2 per rank, v" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--layout", "9,8,8", "--stages", "4"], "has 3 stages and 25 layers: give auto, even, balanced, a layout file, or 4"),
        (["--layout", "9,8,8,8", "--stages", "4"], "has 4 stages and 33 layers"),
        (["--layout", "9,8,8,6"], "has 4 stages and 31 layers"),
        (["--layout", "8,8.25,8,7.75"], "4 multiples of 0.5 (one for each of --stages) that add up to 32 (--layers)"),
        (["--layout", "absent.json"], "a layout file, or 4 multiples of 0.5"),
        (["--layout", "FILE", "--stages", "4"], "a layout for 2 pipeline ranks, and --stages is 4: leave --stages out"),
        (["--layout", "FILE", "--layers", "40"], "7, 8, 9, 8 layers has 32 in all, and the model has 40"),
        (["--layout", "EXTRA"], "rank_of of a layout is [0, 1, 1, 5]"),
        (["--layout", "BROKEN"], "is not JSON"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_in_one_line(argv, message, layout_file, tmp_path, capsys):
    (tmp_path / "extra.json").write_text(json.dumps(json.loads(V.to_json()) | {"rank_of": [0, 1, 1, 5]}))
    (tmp_path / "broken.json").write_text("{")
    files = {"FILE": str(layout_file), "EXTRA": str(tmp_path / "extra.json"), "BROKEN": str(tmp_path / "broken.json")}
    said = error_of(capsys, *(files.get(word, word) for word in argv))
    assert "--layout" in said
    assert message in said


def test_stages_of_a_hybrid_model_are_its_pattern_and_have_whole_layers(capsys):
    assert staged_pattern("M*-E/*E/*E", [3, 1]) == "M*-|E/*E/*E"
    command = ["plan", "--model", "nemotron-3-nano", "--lengths", "3000,200", "--layout"]
    assert main([*command, "27,25"]) == 0
    pattern = load_flags("nemotron-3-nano")["hybrid_layer_pattern"]
    assert f"--hybrid-layer-pattern '{pattern[:27]}|{pattern[27:]}'" in capsys.readouterr().out
    assert main([*command, "26.5,25.5"]) == 2
    assert "cuts layers, and those of a hybrid model have one part: give whole layers" in capsys.readouterr().err
