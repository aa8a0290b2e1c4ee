"""The command line, called in-process."""

import argparse
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_epp.cli import main as cli
from megatron_epp.cli.compare import sizes_of
from megatron_epp.cli.layout_flag import chosen_layout
from megatron_epp.cli.main import MODULES, NAMES, main
from megatron_epp.cli.planning_flags import add_problem, costs_of
from megatron_epp.cli.schedules import usual
from megatron_epp.plan.check import check
from megatron_epp.plan.grid import from_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.serialize import digest, load, save
from megatron_epp.planner import PLANNERS
from tests.support.plan.report_plans import measured_run

MODEL = shlex.split(
    "--stages 2 --layers 4 --hidden 128 --ffn 512 --heads 4 --kv-heads 2 --vocab 512 --bytes-per-value 4 --rates cpu"
)
BATCH = ["--lengths", "4096,300,200,100", *MODEL, "--slices", "4"]


def written_costs(argv):
    """Costs of the pipeline that flags name."""
    parser = argparse.ArgumentParser()
    add_problem(parser)
    args = parser.parse_args(argv)
    return costs_of(args, [4096], chosen_layout(args, [(4096,)], ["greedy"]).layout)


@pytest.fixture
def plan_file(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", *BATCH, "-o", str(path)]) == 0
    capsys.readouterr()
    return path


def error_of(capsys, *argv):
    """Run a command that must fail: its message, without the prefix."""
    try:
        code = main(list(argv))
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    out, err = capsys.readouterr()
    assert out == ""
    _, prefix, message = err.rpartition(": error: ")  # on a slow machine lines of progress come before it
    assert prefix
    assert message.count("\n") <= 3  # the refusal, and what would fit
    assert "Traceback" not in err
    return message


def test_plan_prints_a_summary_and_writes_a_sound_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", *BATCH, "-o", str(path)]) == 0
    made = load(path)
    assert check(made) == []
    assert made.lengths == (4096, 300, 200, 100)
    assert made.num_stages == 2
    out = capsys.readouterr().out
    assert digest(made)[:12] in out
    assert "rank 1 | 1F" in out


def test_lengths_come_from_a_file_or_from_stdin(tmp_path, capsys, monkeypatch):
    (tmp_path / "lengths.txt").write_text("4096\n300, 200\n100\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("4096 300 200 100"))
    outputs = []
    for source in (
        ["--lengths", "4096,300,200,100"],
        ["--lengths-file", str(tmp_path / "lengths.txt")],
        ["--lengths-file", "-"],
    ):
        assert main(["plan", *source, *MODEL]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]


def test_flags_go_by_megatrons_names_too(capsys):
    ours = ["--stages", "4", "--layers", "8", "--kv-heads", "2", "--chunk-tokens", "512"]
    megatrons = [
        "--pipeline-model-parallel-size",
        "4",
        "--num-layers",
        "8",
        "--num-query-groups",
        "2",
        "--epp-chunk-tokens",
        "512",
    ]
    assert main(["plan", "--lengths", "4096,88", *ours]) == 0
    first = capsys.readouterr().out
    assert main(["plan", "--lengths", "4096,88", *megatrons]) == 0
    assert capsys.readouterr().out == first


def test_a_cost_profile_replaces_the_formulas(tmp_path, capsys):
    (tmp_path / "costs.json").write_text(written_costs(BATCH).to_json())
    assert main(["plan", *BATCH]) == 0
    first = capsys.readouterr().out
    alone = ["--lengths", "4096,300,200,100", "--stages", "2", "--slices", "4", "--costs", str(tmp_path / "costs.json")]
    assert main(["plan", *alone]) == 0
    assert capsys.readouterr().out == first.partition("\nlayout: ")[0]


def test_costs_of_a_whole_pipeline_settle_its_layers(tmp_path, capsys):
    lopsided = [*BATCH, "--layers", "8", "--layout", "7,1"]
    (tmp_path / "costs.json").write_text(written_costs(lopsided).to_json())
    assert main(["plan", *lopsided]) == 0
    assert "--layout balanced would make it" in capsys.readouterr().out
    alone = ["plan", "--lengths", "4096,300,200,100", "--stages", "2", "--costs", str(tmp_path / "costs.json")]
    assert main(alone) == 0
    assert "the busiest takes" not in capsys.readouterr().out
    assert main([*alone, "--layout", "balanced"]) != 0
    assert "the stages have layers of their own" in capsys.readouterr().err


def test_check_of_a_sound_plan_exits_with_0(plan_file, capsys):
    assert main(["check", str(plan_file)]) == 0
    assert capsys.readouterr().out.startswith(f"{plan_file}: sound: ")


def test_a_plan_with_predictions_of_the_wrong_number_of_ranks_is_refused_not_shown(plan_file, capsys):
    made = load(plan_file)
    save(replace(made, predicted=replace(made.predicted, peak_bytes=made.predicted.peak_bytes[1:])), plan_file)
    assert main(["check", str(plan_file)]) == 1
    assert "predicted.peak_bytes has 1 entries for 2 ranks" in capsys.readouterr().out
    assert main(["show", str(plan_file)]) == 2
    assert "predicted.peak_bytes has 1 entries for 2 ranks" in capsys.readouterr().err


def test_check_of_a_broken_plan_shows_the_fault_and_exits_with_1(plan_file, capsys):
    made = load(plan_file)
    first, *rest = made.ranks[1]
    save(replace(made, ranks=(made.ranks[0], (*rest, first))), plan_file)
    assert main(["check", str(plan_file)]) == 1
    out = capsys.readouterr().out
    assert "^" in out
    assert "1F0" in out


def test_check_of_several_plans_says_where_they_do_not_match(plan_file, tmp_path, capsys):
    made = load(plan_file)
    assert main(["check", str(plan_file), str(plan_file)]) == 0
    assert capsys.readouterr().out.count("sound") == 2
    other = tmp_path / "other.json"
    save(replace(made, num_layers=tuple(count + 1 for count in made.num_layers)), other)
    assert main(["check", str(plan_file), str(other)]) == 1
    assert "replica 1 has num_layers" in capsys.readouterr().out


def test_simulate_prints_the_plans_own_prediction(plan_file, capsys):
    made = load(plan_file)
    assert main(["simulate", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert f"bubble {made.predicted.bubble_fraction:.1%}" in out
    assert f"{made.predicted.peak_bytes[1] / 2**20:.2f} MiB" in out


def test_a_plan_above_its_cap_is_shown_with_a_warning(plan_file, capsys):
    made = load(plan_file)
    save(replace(made, cap_bytes=tuple(peak - 1 for peak in made.predicted.peak_bytes)), plan_file)
    assert main(["simulate", str(plan_file)]) == 0
    assert "2 violation(s)" in capsys.readouterr().err


def test_compare_without_solvers_has_a_row_that_says_so_for_each_planner_that_needs_it(capsys, monkeypatch):
    for module in ("scipy", "ortools", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["compare", *BATCH, *(word for name in ("milp", *usual()) for word in ("--planner", name))]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1 : 2 + len(usual())]}
    assert set(rows) == {"milp", *usual()}
    assert rows["milp"][:2] == ["no", "plan"]
    assert rows["greedy"][:2] != ["no", "plan"]
    assert "milp: no plan. this planner needs OR-tools" in out


def test_all_planners_are_ranked_with_the_placements_that_they_need(capsys):
    assert main(["compare", *BATCH, "--planner", "all", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["planner"] for row in rows} == set(PLANNERS)
    times = [row["makespan_us"] for row in rows if "makespan_us" in row]
    assert times == sorted(times)
    assert all("refusal" in row for row in rows[len(times) :])
    assert {"greedy", "interleaved", "v-min", "gpipe"} <= {row["planner"] for row in rows[: len(times)]}


def test_every_planner_is_listed_with_its_source(capsys):
    assert main(["schedules"]) == 0
    rows = capsys.readouterr().out.split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in rows if not line.startswith(" ")] == list(PLANNERS.entries())
    assert "`megatron-epp schedules` lists" in help_of(capsys, "plan", "--help")


def test_planners_whose_plans_training_cannot_run_are_listed_as_such_and_plan(tmp_path, capsys):
    assert main(["schedules"]) == 0
    listed = capsys.readouterr().out
    for name, flags in (("helixpipe", []), ("flexsp", ["--context-parallel-size", "4", "--model", "llama3-8b"])):
        assert f"{name} is planned, not run: training lacks {PLANNERS.entries()[name].lacks}." in listed
        path = str(tmp_path / f"{name}.json")
        assert main(["plan", "--lengths", "9000,900,800,700", "--stages", "2", "--planner", name, "-o", path, *flags]) == 0
        assert main(["check", path]) == 0
        assert "sound" in capsys.readouterr().out
        assert name not in usual()


def test_compare_prints_one_line_per_planner(capsys):
    assert main(["compare", *BATCH, "--planner", "greedy", "--planner", "1f1b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["plan", "greedy", "1f1b"]
    assert (
        lines[3] == "size: most tokens of a chunk or row, the fastest of those tried; own: the planner chooses, or has no limit"
    )


COMPARED = ["--lengths", "4096,3000,2000,300,200,100", *MODEL, "--json"]


def compared(*flags, capsys):
    """Rows of the planners by their names."""
    assert main(["compare", *COMPARED, *flags]) == 0
    return {row["planner"]: row for row in json.loads(capsys.readouterr().out)}


def test_every_planner_gets_its_best_packing_size_with_the_same_layers_under_the_same_caps(capsys):
    names = ["1f1b-packed", "zb-v", "seq1f1b", "greedy", "milp"]
    flags = [word for name in names for word in ("--planner", name)]
    best = compared(*flags, "--context", "16384", capsys=capsys)
    fixed = compared(*flags, "--context", "16384", "--slices", "4", capsys=capsys)  # with which no size is tried
    assert {row["layers"] for row in best.values()} == {"balanced"}
    assert best["1f1b-packed"]["makespan_us"] < fixed["1f1b-packed"]["makespan_us"]
    assert best["1f1b-packed"]["size"] == 4096, "rows are no longer than the longest sequence"
    assert best["greedy"]["makespan_us"] <= fixed["greedy"]["makespan_us"]
    assert best["seq1f1b"]["size"] is None, "it tries sizes itself"
    assert best["milp"]["size"] == best["greedy"]["size"]
    assert len({tuple(row["cap_bytes"]) for row in best.values()}) == 1


def test_sizes_keep_sequences_whole_where_they_are_not_cut_and_are_few(capsys):
    args = argparse.Namespace(token_multiple=2, chunk_tokens=None, slices=None, context=None)
    lengths = (9001, 500, 30)
    assert sizes_of(args, lengths, 4, "1f1b-packed") == [9002]
    args.context = 1 << 20
    assert sizes_of(args, lengths, 4, "1f1b-padded") == [9002, 16384, 32768, 65536, 131072]
    assert sizes_of(args, lengths, 4, "zb-v") == [256, 512, 1024, 2048, 4096]
    assert sizes_of(args, (9001,) * 4096, 64, "greedy") == [], "the work is limited"
    assert sizes_of(args, (9001,) * 1024, 8, "greedy") == [4096], "to the coarsest"
    assert sizes_of(args, lengths, 4, "seq1f1b") == sizes_of(args, lengths, 4, "module:function") == []
    for setting in ("chunk_tokens", "slices"):
        given = argparse.Namespace(**vars(args) | {setting: 4})
        assert sizes_of(given, lengths, 4, "greedy") == sizes_of(given, lengths, 4, "1f1b-packed") == []


def test_the_table_of_planners_says_the_size_of_each(capsys):
    assert main(["compare", *COMPARED[:-1], "--planner", "1f1b-packed", "--planner", "greedy"]) == 0
    header, packed, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-1] == "size"
    assert packed.split()[-1] == "4,096"


def test_show_prints_text_and_sets_a_run_beside_it(plan_file, tmp_path, capsys):
    made = load(plan_file)
    measured_run(made, slowdown=2.0).save(tmp_path / "run.json")
    assert main(["show", str(plan_file), "--measured", str(tmp_path / "run.json"), "--all"]) == 0
    out = capsys.readouterr().out
    assert digest(made)[:12] in out
    rows = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines() if line}
    assert rows["all F"] == rows["all B"] == "2.000"


def test_show_prints_what_each_rank_issues(plan_file, capsys):
    assert main(["show", str(plan_file), "--lowered"]) == 0
    assert from_grid(capsys.readouterr().out) == lower(load(plan_file))


def test_show_writes_what_the_suffix_says(plan_file, tmp_path):
    for suffix in ("png", "svg", "json", "txt"):
        assert main(["show", str(plan_file), "-o", str(tmp_path / f"out.{suffix}")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out.svg").read_text()
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert "rank 0 | 0F0" in (tmp_path / "out.txt").read_text()


def test_errors_name_what_to_change(plan_file, tmp_path, capsys):
    assert "'x' is not a number of tokens" in error_of(capsys, "plan", "--lengths", "12,x", *MODEL)
    assert "'0' is not a number of tokens" in error_of(capsys, "plan", "--lengths", "12,0", *MODEL)
    assert "no lengths" in error_of(capsys, "plan", "--lengths", ",", *MODEL)
    assert "--layers or --stages" in error_of(capsys, "plan", "--lengths", "12", "--layers", "4", "--stages", "5")
    assert "'some' is not auto or a number of layers, up to" in error_of(capsys, "plan", *BATCH, "--recompute", "some")
    assert "absent.txt" in error_of(capsys, "plan", "--lengths-file", str(tmp_path / "absent.txt"))
    assert "memory-cap-gb" in error_of(capsys, "plan", *BATCH, "--memory-cap-gb", "0.001")
    assert "nodir" in error_of(capsys, "show", str(plan_file), "-o", str(tmp_path / "nodir" / "plan.png"))
    assert "'.gif'" in error_of(capsys, "show", str(plan_file), "-o", str(tmp_path / "plan.gif"))
    assert "absent.json" in error_of(capsys, "show", str(tmp_path / "absent.json"))
    assert "absent.json" in error_of(capsys, "show", str(plan_file), "--measured", str(tmp_path / "absent.json"))


def test_a_plan_that_does_not_fit_is_not_written(tmp_path, capsys):
    error_of(capsys, "plan", *BATCH, "--memory-cap-gb", "0.001", "-o", str(tmp_path / "plan.json"))
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_plan_is_refused(plan_file, tmp_path, capsys):
    assert main(["plan", *BATCH, "--recompute", "1", "-o", str(tmp_path / "other.json")]) == 0
    capsys.readouterr()
    measured_run(load(tmp_path / "other.json")).save(tmp_path / "run.json")
    message = error_of(capsys, "show", str(plan_file), "--measured", str(tmp_path / "run.json"))
    assert digest(load(plan_file))[:12] in message


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": "megatron-epp/plan", "version": 9}', "\xff"])
@pytest.mark.parametrize("command", ["check", "simulate", "show"])
def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path, capsys, command, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("latin-1"))
    assert "plan.json" in error_of(capsys, command, str(path))


@pytest.mark.parametrize("argv", [[], ["dance"], ["plan"], ["plan", "--lengths", "1", "--stages", "0"], ["check"]])
def test_a_wrong_command_line_exits_with_2_and_one_line(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("megatron-epp")
    assert message.count("\n") == 1
    assert "--help" in message


def test_a_misspelt_flag_is_told_with_the_one_that_was_probably_meant(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--lengths", "12", "--stagess", "4"])
    assert "knows no --stagess; did you mean '--stages'?; see megatron-epp plan --help" in capsys.readouterr().err


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 0
    return capsys.readouterr().out


def flags_in(text):
    return re.findall(r"^  (-.+?)(?:  |$)", text, re.MULTILINE)


@pytest.mark.parametrize("command", [*MODULES, *NAMES])
def test_every_command_explains_itself_and_all_its_flags(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(capsys, command, "--help")
    assert text == help_of(capsys, command, "--help-all")
    assert text.startswith(f"usage: megatron-epp {command} [options]")
    assert text.count("\n") <= 160
    commands = next(action for action in cli._parser([command])._actions if hasattr(action, "choices") and action.choices)
    named = {name for flags in flags_in(text) for name in re.findall(r"--[\w-]+", flags)}
    shown = [action for action in commands.choices[command]._actions if action.help != argparse.SUPPRESS]
    assert [action.dest for action in shown if action.option_strings and named.isdisjoint(action.option_strings)] == []
    assert "example: " in text or command in ("schedules", *NAMES)


def test_the_list_has_at_most_ten_commands_and_names_the_others_below(capsys):
    above, _, below = help_of(capsys, "--help").partition("\nalso:\n")
    listed = re.findall(r"^  ([\w-]+) +\w", above.partition("\ncommands:\n")[2].partition("\noptions:\n")[0], re.MULTILINE)
    assert len(listed) <= 10
    assert all(re.search(rf"\b{name}\b", below) for name in {*MODULES, *NAMES} - set(listed))


@pytest.mark.parametrize(("name", "command"), [("check", ["show", "--proof"]), ("simulate", ["show", "--times"])])
def test_a_short_name_prints_what_its_command_does(name, command, plan_file, capsys):
    assert main([name, str(plan_file)]) == 0
    first = capsys.readouterr().out
    assert main([*command, str(plan_file)]) == 0
    assert capsys.readouterr().out == first


def test_proof_and_times_are_printed_and_neither_drawn_nor_mixed(plan_file, tmp_path, capsys):
    picture = str(tmp_path / "plan.png")
    assert "--proof prints and draws nothing" in error_of(capsys, "show", str(plan_file), "--proof", "-o", picture)
    assert "not allowed with argument" in error_of(capsys, "show", str(plan_file), "--proof", "--times")
    assert "several plans" in error_of(capsys, "simulate", str(plan_file), str(plan_file))


def test_a_profile_by_formula_is_written_by_both_of_its_names(tmp_path, capsys):
    for number, command in enumerate((["profile"], ["doctor", "--profile"])):
        assert main([*command, "--model", "tiny-gpt", "--by-formula", "this-machine", "-o", str(tmp_path / f"{number}")]) == 0
    assert (tmp_path / "0").read_text() == (tmp_path / "1").read_text()
    capsys.readouterr()
    assert "required: -o/--output" in error_of(capsys, "profile", "--model", "tiny-gpt")
    assert "add --profile" in error_of(capsys, "doctor", "-o", str(tmp_path / "2"))


def test_the_command_line_loads_neither_torch_nor_megatron_nor_matplotlib():
    code = "import sys, megatron_epp.cli.main; print([m for m in ('torch', 'megatron', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_reader_that_stops_early_is_no_error(plan_file):
    command = f"{sys.executable} -m megatron_epp.cli.main show {plan_file} --all | true"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=buffered, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--chunk-tokens", "300"], "the plan has more than 16 chunks"),
        (["--forward-only"], "it does not know evaluations"),
    ],
)
def test_plan_and_compare_say_why_the_exact_planner_leaves_a_plan_as_it_is(flags, why, capsys):
    batch = ["--lengths", "2000,1500,1000,800", "--stages", "2", *flags]
    assert main(["plan", *batch, "--planner", "milp"]) == 0
    said = capsys.readouterr().err
    assert "the plan is greedy's, the exact planner looks for no better one: " in said
    assert why in said
    assert main(["compare", *batch, "--planner", "milp", "--planner", "greedy"]) == 0
    assert [why in line for line in capsys.readouterr().out.splitlines() if line.startswith("milp: ")] == [True]
    assert main(["compare", *batch, "--planner", "milp", "--planner", "greedy", "--json"]) == 0
    assert [why in row.get("note", "") for row in json.loads(capsys.readouterr().out)] == [True, False]


def test_plan_and_compare_print_how_far_the_exact_planner_is_above_its_bound(capsys):
    pytest.importorskip("ortools", reason="the exact planner needs OR-tools: pip install 'megatron-epp[milp]'")
    batch = ["--lengths", "2000,1500", "--stages", "2", "--slices", "2", "--planner", "milp", "--plan-limit-seconds", "0.5"]
    assert main(["plan", *batch]) == 0
    assert "above the bound" in capsys.readouterr().err
    assert main(["compare", *batch]) == 0
    assert "above the bound" in capsys.readouterr().out
