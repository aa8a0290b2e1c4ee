"""What commands print, whole, with the plans of small batches and with damaged ones; and what they write of plans.

After a change that is meant, write them anew with ``MEGATRON_EPP_WRITE_GOLDEN=1 pytest tests/pure/test_cli_transcripts.py`` and
read the difference.
"""

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from queue import Queue

import pytest

from megatron_epp.plan.serialize import load, save, to_json
from megatron_epp.planner import PLANNERS
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli import terminal
from megatron_epp.tools.cli.compare import sizes_of
from megatron_epp.tools.cli.main import MODULES, NAMES, main
from megatron_epp.tools.cli.schedules import usual
from tests.support.golden import assert_as_written
from tests.support.plan.bad_files import PLAN, SOUND, exit_code, signed
from tests.support.plan.report_plans import measured_run

MODEL = "--stages 2 --layers 4 --hidden 128 --ffn 512 --heads 4 --kv-heads 2 --vocab 512 --rates cpu"
BATCH = f"--lengths 4096,300,200,100 {MODEL} --slices 4"
TINY = "--model tiny-gpt --cluster this-machine --stages 2"
LLAMA = "plan --lengths 1000 --model llama3-8b"
TRANSCRIPTS = {
    "plan": [
        f"plan {BATCH} -o made.json",
        "show made.json --proof",
        "show made.json --times",
        "show made.json --lowered",
        "plan --lengths 300 --layout 10,12,10",
    ],
    "faults": [
        "check plan.json plan.json",
        "check order.json",
        "check plan.json other.json",
        "check peaks.json",
        "simulate capped.json",
        "check escapes.json",
        "simulate escapes.json",
        "show escapes.json",
    ],
    "compare": [
        f"compare {BATCH} --planner milp --planner greedy --planner 1f1b --planner 1f1b-packed",
        f"compare {BATCH} --planner sppo --planner pipeoffload --planner greedy --memory-gb 0.04",
        f"compare --lengths lengths.txt --batch-size 6 --batches 3 --planner greedy --planner 1f1b {TINY}",
        f"compare --lengths 900,50 --planner greedy {TINY} --memory-gb 0.0001 --layout even --slices 1",
    ],
    "memory": [f"plan --memory --why {BATCH} --memory-gb 0.02 -o absent.json"],
    "room": [f"{LLAMA} --cluster h100x8 --stages 1", f"{LLAMA} --memory-gb 72 --stages 1"],
    "advise": [
        "advise --layers 8 --hidden 512 --ffn 1024 --heads 8 --kv-heads 2 --vocab 4096 --devices 2 --lengths 900,300,4000 "
        "--global-batch-size 8 --pipeline-parallel 2 --context-parallel 1"
    ],
}
ESCAPES = {"planner": "\x1b[31mred", "costs": "\x1b]0;title\x07", "notes": ["two\nlines", "half \ud800", "back\u202ewards"]}
"""Text that would move a terminal's cursor."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a plan and what is wrong with it; no solver is installed, and no line tells of progress."""
    first, *rest = PLAN.ranks[1]
    peaks = PLAN.predicted.peak_bytes
    plans = {
        "plan": PLAN,
        "order": replace(PLAN, ranks=(PLAN.ranks[0], (*rest, first))),
        "other": replace(PLAN, num_layers=tuple(count + 1 for count in PLAN.num_layers)),
        "peaks": replace(PLAN, predicted=replace(PLAN.predicted, peak_bytes=peaks[1:])),
        "capped": replace(PLAN, cap_bytes=tuple(peak - 1 for peak in peaks)),
    }
    for name, plan in plans.items():
        (tmp_path / f"{name}.json").write_text(to_json(plan))
    (tmp_path / "escapes.json").write_text(signed(SOUND["plan"] | ESCAPES))
    (tmp_path / "lengths.txt").write_text("900 50 60\n" * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "PATIENCE_S", 1e6)
    for module in ("scipy", "ortools", "ortools.sat.python"):
        monkeypatch.setitem(sys.modules, module, None)
    return tmp_path


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_commands_print_what_is_written(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ""
    for command in TRANSCRIPTS[name]:
        code = exit_code(shlex.split(command))
        out, err = capsys.readouterr()
        text += f"$ {command}\n{out}{err}" + (f"exit code {code}\n" if code else "")
    assert all(line.isprintable() for line in text.split("\n"))
    assert_as_written(f"cli_{name}", text)
    assert not (folder / "absent.json").exists()  # the plan that does not fit


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return what a command prints that succeeds, in a folder with `plan.json`."""
    save(PLAN, tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)

    def printed(command: str) -> str:
        assert main(shlex.split(command)) == 0
        return capsys.readouterr().out

    return printed


OLDER = {"check": "show --proof", "simulate": "show --times", "memory": "plan --memory"}


@pytest.mark.parametrize("name", OLDER)
def test_a_short_or_older_name_prints_what_its_command_does(name, run):
    words = BATCH if name == "memory" else "plan.json"
    assert run(f"{name} {words}") == run(f"{OLDER[name]} {words}")


def test_show_writes_what_the_suffixes_say(run):
    run("show plan.json -o out.svg -o out.json -o out.txt -o out.png")
    assert "<svg" in Path("out.svg").read_text()
    assert json.loads(Path("out.json").read_text())["traceEvents"]
    assert "rank 0 | 0F0" in Path("out.txt").read_text()
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


def test_show_sets_a_run_beside_its_plan(run):
    measured_run(PLAN, slowdown=2.0).save(Path("run.json"))
    rows = {line.split("  ")[0]: line.split()[-1] for line in run("show plan.json --measured run.json").splitlines() if line}
    assert rows["all F"] == rows["all B"] == "2.000"
    assert float(rows["makespan"]) == pytest.approx(2.0, rel=2e-3)  # transfers take as planned


def test_all_planners_are_ranked_with_the_placements_that_they_need(run):
    rows = json.loads(run(f"compare {BATCH} --planner all --json"))
    assert {row["planner"] for row in rows} == set(PLANNERS)
    ranked = [row for row in rows if "makespan_us" in row]
    times = [row["makespan_us"] for row in ranked]
    assert times == sorted(times)
    assert all(row["makespan_us"] >= row["lower_bound_us"] > 0 for row in ranked)
    assert [row["makespan_over_best"] for row in ranked] == [time / times[0] for time in times]
    assert all("refusal" in row for row in rows[len(times) :])
    assert {"greedy", "interleaved", "v-min", "gpipe"} <= {row["planner"] for row in ranked}


def test_every_planner_is_listed_and_those_with_costs_of_their_own_plan(run):
    listed = run("schedules")
    rows = listed.split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in rows if not line.startswith(" ")] == list(PLANNERS.entries())
    for name, flags in (("helixpipe", ""), ("flexsp", "--context-parallel-size 4 --model llama3-8b")):
        run(f"plan --lengths 9000,900,800,700 --stages 2 --planner {name} -o {name}.json {flags}")
        assert "sound" in run(f"check {name}.json")
        assert name not in usual()


def test_every_planner_gets_its_best_packing_size_with_the_same_layers_under_the_same_caps(run):
    names = " ".join(f"--planner {name}" for name in ("1f1b-packed", "zb-v", "seq1f1b", "greedy", "milp"))
    command = f"compare --lengths 4096,3000,2000,300,200,100 {MODEL} --json {names} --context 16384"
    best, fixed = ({row["planner"]: row for row in json.loads(run(command + more))} for more in ("", " --slices 4"))
    assert {row["layers"] for row in best.values()} == {"balanced"}
    assert best["1f1b-packed"]["makespan_us"] < fixed["1f1b-packed"]["makespan_us"]
    assert best["1f1b-packed"]["size"] == 4096, "rows are no longer than the longest sequence"
    assert all(best[name]["size"] is None for name in ("seq1f1b", "greedy", "milp")), "they try sizes themselves"
    assert len({tuple(row["cap_bytes"]) for row in best.values()}) == 1


def test_sizes_that_are_tried_go_from_the_longest_sequence_to_the_context_and_are_few():
    args = argparse.Namespace(token_multiple=2, chunk_tokens=None, slices=None, context=1 << 20)
    assert sizes_of(args, (9001, 500, 30), 4, "1f1b-padded") == [9002, 16384, 32768, 65536, 131072]
    assert sizes_of(args, (9001, 500, 30), 4, "zb-v") == [256, 512, 1024, 2048, 4096]
    assert sizes_of(args, (9001,) * 1024, 8, "zb-v") == [4096], "the work is limited, to the coarsest"
    assert sizes_of(args, (9001,) * 4096, 64, "zb-v") == []
    for setting in ("chunk_tokens", "slices"):
        assert sizes_of(argparse.Namespace(**vars(args) | {setting: 4}), (9001, 500, 30), 4, "zb-v") == []


@pytest.mark.parametrize(
    ("flags", "why"), [("--chunk-tokens 300", "more than 16 chunks"), ("--forward-only", "it does not know evaluations")]
)
def test_plan_and_compare_say_why_the_exact_planner_leaves_a_plan_as_it_is(flags, why, capsys):
    batch = ["--lengths", "2000,1500,1000,800", "--stages", "2", "--layout", "even", *flags.split(), "--planner", "milp"]
    assert main(["plan", *batch]) == 0
    assert why in capsys.readouterr().err
    assert main(["compare", *batch, "--planner", "greedy", "--json"]) == 0
    assert [why in row.get("note", "") for row in json.loads(capsys.readouterr().out)] == [True, False]


def test_plan_and_compare_print_how_far_the_exact_planner_is_above_its_bound(capsys):
    pytest.importorskip("ortools", reason="the exact planner needs OR-tools: pip install 'megatron-epp[milp]'")
    batch = shlex.split(f"--lengths 2000,1500 {MODEL} --layout even --slices 2 --planner milp --plan-limit-seconds 0.5")
    for command in ("plan", "compare"):
        assert main([command, *batch]) == 0
        assert "above the bound" in "".join(capsys.readouterr())


SHAPE = "--layers 4 --hidden 256 --ffn 1024 --heads 4 --kv-heads 2 --vocab 512"
HELD = f"--lengths 8192,700,300 --stages 2 {SHAPE} --slices 3 --layout even"


def row_of(text: str, name: str) -> list[float]:
    """Return the figures in the columns behind a name."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name}  "))
    return [float(figure) for figure in re.findall(r"[\d.]+", line.removeprefix(name))]


WIDE = "--stages 1 --layout 32 --lengths"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (f"{BATCH} --batch-size 4", ""),
        (f"{BATCH} --batch-size 5", "--lengths '4096,300,200,100' has 4 sequences, and 5 are asked for"),
        (f"{BATCH} --batch-size 9999999", "9,999,999 are asked for"),
        (f"{WIDE} 512", ""),
        (f"{WIDE} 131072", "more than an H200 has, and plans have no cap: give --cluster or --memory-cap-gb"),
        (f"{WIDE} 131072 --memory-cap-gb 1000", ""),
    ],
)
def test_a_batch_larger_than_its_source_and_a_plan_that_no_device_holds_are_told(flags, told, capsys):
    assert main(shlex.split(f"plan {flags}")) == 0
    error = capsys.readouterr().err
    assert told in error
    assert sum(words in error for words in ("are asked for", "more than an H200 has")) == bool(told)


def test_the_figures_of_memory_are_those_of_the_same_plan_and_add_up(run):
    text = run(f"plan --memory {HELD} --memory-gb 0.2 --memory-out memory.png -o made.json")
    made = load("made.json")
    peaks, static = made.predicted.peak_bytes, made.static_bytes
    assert row_of(text, "peak") == [round(peak / 2**20, 2) for peak in peaks]
    assert row_of(text, "static, in all") == [round(held / 2**20, 2) for held in static]
    assert Path("memory.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(run(f"plan --memory {HELD} --memory-gb 0.2 --json"))
    assert (told["refusal"], [rank["rank"] for rank in told["ranks"]]) == ("", [0, 1])
    for rank, peak in zip(told["ranks"], peaks, strict=True):
        assert sum(rank["static"].values()) == rank["static_bytes"] == static[rank["rank"]]
        assert sum(rank["peak"].values()) == rank["peak_bytes"] == rank["cap_bytes"] - rank["headroom_bytes"] == peak
        assert max(num_bytes for _, num_bytes in rank["live_bytes"]) == peak
        assert rank["peak_action"] in {str(action) for action in made.actions(rank["rank"])}
        assert (0 <= rank["peak_us"] <= made.predicted.makespan_us, rank["host_peak_bytes"]) == (True, 0)
    assert 0 < told["smallest_cap"]["cap_bytes"] <= max(peaks)
    assert told["smallest_cap"]["makespan_us"] > 0


def test_a_divided_vocabulary_is_compared_with_planners_that_search_no_layout(run):
    text = run(f"compare {HELD} --vocab-parallel on --layout even --planner greedy --planner 1f1b")
    assert text.count("the vocabulary over all ranks") == 1


def help_of(capsys, *argv):
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*MODULES, *NAMES])
def test_every_command_explains_itself_and_all_its_flags(capsys, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = help_of(capsys, command, "--help")
    assert text == help_of(capsys, command, "--help-all")
    assert text.startswith(f"usage: megatron-epp {command} [options]")
    assert text.count("\n") <= 160
    commands = next(action for action in cli._parser([command])._actions if hasattr(action, "choices") and action.choices)
    named = {name for flags in re.findall(r"^  (-.+?)(?:  |$)", text, re.MULTILINE) for name in re.findall(r"--[\w-]+", flags)}
    shown = [action for action in commands.choices[command]._actions if action.help != argparse.SUPPRESS]
    assert [action.dest for action in shown if action.option_strings and named.isdisjoint(action.option_strings)] == []
    assert "example: " in text or command in ("schedules", *NAMES)


def test_the_list_has_at_most_ten_commands_and_names_the_others_below(capsys):
    above, _, below = help_of(capsys, "--help").partition("\nalso:\n")
    listed = re.findall(r"^  ([\w-]+) +\w", above.partition("\ncommands:\n")[2].partition("\noptions:\n")[0], re.MULTILINE)
    assert len(listed) <= 10
    assert all(re.search(rf"\b{name}\b", below) for name in {*MODULES, *NAMES} - set(listed))


def test_a_line_says_what_takes_long_and_nothing_what_does_not(monkeypatch, capsys):
    with terminal.progress("thinking"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.01)
    monkeypatch.setattr(terminal, "_LOG_EVERY_S", 0.01)
    lines, seen = iter(range(100)), Queue()

    def detail():
        seen.put(count := next(lines))
        return f"{count} done"

    with terminal.progress("thinking", detail):
        assert [seen.get(timeout=60) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError), terminal.progress("failing"):
        raise KeyError
    assert capsys.readouterr().err.splitlines()[0] == "thinking, 0 s, 0 done"
