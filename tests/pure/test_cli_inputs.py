"""The command line's batches, models, clusters and costs, and what it prints while it works."""

import json
import struct

import numpy as np
import pytest

from megatron_epp.cli import terminal as cli_progress
from megatron_epp.cli.main import main
from megatron_epp.cost import H100_NODE, analytic_profile, on_device, work_of
from megatron_epp.cost.library import load_cluster, load_flags, shape_of
from megatron_epp.plan import Op
from megatron_epp.plan.serialize import load
from megatron_epp.planner import UNLIMITED_BYTES

SMALL = ["--model", "tiny-gpt", "--cluster", "this-machine", "--pipeline-size", "2"]


def planned(tmp_path, *argv):
    """The plan that `plan` writes."""
    path = tmp_path / "plan.json"
    assert main(["plan", *argv, "-o", str(path)]) == 0
    return load(path)


def error_of(capsys, *argv):
    assert main(list(argv)) == 2
    return capsys.readouterr().err


def write_index(path, documents):
    """A Megatron index: documents as lists of sentences' token counts."""
    sizes = np.array([n for sentences in documents for n in sentences], np.int32)
    boundaries = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sizes), len(boundaries))
    path.write_bytes(header + sizes.tobytes() + np.zeros(len(sizes), np.int64).tobytes() + boundaries.tobytes())
    return str(path)


def test_a_shipped_model_and_cluster_set_costs_layers_and_cap(tmp_path):
    argv = ["--lengths", "9000,300", "--model", "llama3-8b", "--cluster", "h200x8", "--stages", "8", "--seed", "3"]
    made = planned(tmp_path, *argv, "--layout", "even")
    assert made.num_layers == (4,) * 8
    assert made.cap_bytes == (int(0.9 * 141 * 2**30),) * 8
    assert made.costs == "analytic:h200x8"
    assert made.seed == 3
    shape = shape_of(load_flags("llama3-8b") | {"seq_length": 9000})
    profile = analytic_profile(shape, load_cluster("h200x8").rates)
    costs = on_device(profile.costs([4] * 8), buffers=profile.gradient_buffers(8))
    room = [sum(row.max() for row in costs.pass_items(s, work_of(made.chunks, made.lengths)).values()) for s in range(8)]
    assert made.static_bytes == tuple(costs.static_bytes(stage) + room[stage] + made.message_bytes[stage] for stage in range(8))
    assert made.messages.num_bytes == tuple(costs.message_bytes(work_of(made.chunks, made.lengths)))


def test_flags_given_beside_a_model_win(tmp_path):
    made = planned(tmp_path, "--lengths", "300", "--model", "llama3-8b", "--layers", "6", "--stages", "4", "--memory-gb", "900")
    assert made.num_layers == (1, 2, 2, 1)
    assert made.cap_bytes[0] == 900 * 2**30


def test_without_a_cluster_there_is_no_cap(tmp_path):
    assert planned(tmp_path, "--lengths", "300", "--stages", "2").cap_bytes == (UNLIMITED_BYTES,) * 2


def test_layers_per_stage_are_even_balanced_or_as_given(tmp_path, capsys):
    argv = ["--lengths", "300", "--stages", "4"]
    assert planned(tmp_path, *argv, "--layout", "9,8,8,7").num_layers == (9, 8, 8, 7)
    balanced = planned(tmp_path, *argv, "--layout", "balanced").num_layers
    assert sum(balanced) == 32
    assert balanced[-1] < 8
    for wrong in ("9,8,8", "9,8,8,8", "some"):
        assert "add up to 32" in error_of(capsys, "plan", *argv, "--layout", wrong)


def test_replicas_share_the_optimizers_state(tmp_path):
    alone, shared = (
        planned(tmp_path, "--lengths", "300", "--stages", "2", "--layout", "16,16", "--data-parallel", n) for n in ("1", "4")
    )
    shape = shape_of(load_flags("llama3-8b"))
    parameters = 16 * shape.layer_parameters + shape.vocabulary_parameters
    assert alone.static_bytes[0] - shared.static_bytes[0] == pytest.approx(parameters * (12 - 12 / 4), rel=1e-6)


def test_lengths_come_from_a_file_with_one_per_line(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("4000\n300\n200\n100\n")
    assert planned(tmp_path, "--lengths", str(path), *SMALL).lengths == (4000, 300, 200, 100)
    argv = ["--lengths", str(path), "--batch-size", "5", "--context", "1500", *SMALL]
    assert planned(tmp_path, *argv).lengths == (1500, 1500, 1000, 300, 200)
    assert planned(tmp_path, *argv, "--documents", "truncate").lengths == (1500, 300, 200, 100)


def test_lengths_come_from_a_megatron_index(tmp_path, capsys):
    index = write_index(tmp_path / "documents.idx", [[100], [30, 20], [1], [7]])
    assert planned(tmp_path, "--lengths", index, *SMALL).lengths == (99, 49, 6)
    raw = (tmp_path / "documents.idx").read_bytes()
    (tmp_path / "short.idx").write_bytes(raw[:-9])
    (tmp_path / "other.idx").write_bytes(b"something else")
    (tmp_path / "future.idx").write_bytes(raw[:9] + struct.pack("<Q", 2) + raw[17:])
    (tmp_path / "beyond.idx").write_bytes(raw[:-8] + struct.pack("<q", 99))
    assert "short.idx is truncated: " in error_of(capsys, "plan", "--lengths", str(tmp_path / "short.idx"))
    assert "future.idx has index version 2" in error_of(capsys, "plan", "--lengths", str(tmp_path / "future.idx"))
    beyond = "beyond.idx contradicts itself: document 3 ends before sequence 99, and there are 5 sequences"
    assert beyond in error_of(capsys, "plan", "--lengths", str(tmp_path / "beyond.idx"))
    huge = write_index(tmp_path / "huge.idx", [[5], [2**31 - 1, 2**31 - 1]])
    assert "huge.idx: sequence 1 has 4,294,967,293 tokens" in error_of(capsys, "plan", "--lengths", huge)
    assert "not a Megatron index" in error_of(capsys, "plan", "--lengths", str(tmp_path / "other.idx"))


def test_a_file_that_is_not_there_is_named(capsys):
    assert "no such file, and 'absent.txt' is not a number" in error_of(capsys, "plan", "--lengths", "absent.txt")


def test_a_profile_stands_in_for_the_model_with_any_number_of_stages(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(analytic_profile(shape_of(load_flags("llama3-8b") | {"seq_length": 9000}), H100_NODE).to_json())
    for stages in ("2", "5"):
        by_file = planned(tmp_path, "--lengths", "9000,300", "--costs", str(path), "--stages", stages)
        by_flags = planned(tmp_path, "--lengths", "9000,300", "--model", "llama3-8b", "--stages", stages)
        assert by_file == by_flags
    assert planned(tmp_path, "--lengths", "300", "--costs", "llama3-70b-h100", "--stages", "8").num_layers == (10,) * 8


def test_weight_gradients_are_split_and_activations_offloaded_where_asked(tmp_path):
    argv = ["--lengths", "60000,9000", "--stages", "4", "--data-parallel", "8", "--memory-gb", "54"]
    choices = [], ["--split-weight"], ["--offload", "--recompute-modes", "full"], ["--split-weight", "--offload"]
    plain, split, copied, both = (planned(tmp_path, *argv, *flags) for flags in choices)
    assert not any(step.action.op is Op.W for steps in plain.ranks for step in steps)
    assert any(step.action.op is Op.W for steps in split.ranks for step in steps)
    assert any(copied.copies)
    makespans = [made.predicted.makespan_us for made in (plain, split, copied)]
    assert both.predicted.makespan_us <= min(makespans) < max(makespans[1:]) < makespans[0]


def test_a_cluster_and_rates_together_are_refused(capsys):
    assert "give one of them" in error_of(capsys, "plan", "--lengths", "3", "--cluster", "h100x8", "--rates", "cpu")


def test_profile_writes_formulas_where_asked_and_says_so(tmp_path, capsys):
    path = tmp_path / "profile.json"
    assert main(["profile", "--model", "tiny-gpt", "--by-formula", "this-machine", "-o", str(path)]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert planned(tmp_path, "--lengths", "300,20", "--costs", str(path), "--stages", "2") == planned(
        tmp_path, "--lengths", "300,20", *SMALL
    )


def test_compare_sets_planners_side_by_side_over_several_batches(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text(" ".join(["900", "50", "60"] * 4))
    argv = [
        "compare",
        "--lengths",
        str(path),
        "--batch-size",
        "6",
        "--batches",
        "3",
        "--planner",
        "greedy",
        "--planner",
        "1f1b",
    ]
    assert main([*argv, *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.count("6 sequences of up to 900 tokens") == 2  # a third batch would be empty
    assert text.count("\n1f1b") == 2
    assert main([*argv, "--json", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["planner"] for row in rows] == ["greedy", "1f1b"] * 2
    assert all(row["makespan_us"] >= row["lower_bound_us"] > 0 for row in rows)
    for pair in (rows[:2], rows[2:]):
        assert min(row["makespan_over_best"] for row in pair) == 1.0


def test_compare_shows_a_planner_without_a_plan_as_such(capsys):
    cap = ["--memory-gb", "0.0001", "--layout", "even", "--slices", "1"]
    argv = ["compare", "--lengths", "900,50", "--lengths", "70", "--planner", "greedy", *SMALL, *cap]
    assert main(argv) == 0
    assert capsys.readouterr().out.count("greedy: no plan. no plan fits a memory cap") == 2
    assert main([*argv, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2
    assert all("no plan fits" in row["refusal"] and "makespan_us" not in row for row in rows)


def test_show_writes_picture_and_trace_by_flags_of_their_own(tmp_path):
    path = tmp_path / "plan.json"
    assert main(["plan", "--lengths", "900,50", *SMALL, "-o", str(path)]) == 0
    picture, trace = tmp_path / "picture", tmp_path / "trace"  # whatever the suffix
    assert main(["show", str(path), "--png", f"{picture}.png", "--trace", str(trace)]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_line_says_what_takes_long_and_nothing_what_does_not(monkeypatch, capsys):
    with cli_progress.progress("thinking"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(cli_progress, "PATIENCE_S", 0.01)
    monkeypatch.setattr(cli_progress, "_LOG_EVERY_S", 0.01)
    lines = iter(range(100))
    seen = cli_progress.threading.Event()

    def detail():
        count = next(lines)
        if count == 2:
            seen.set()
        return f"{count} done"

    with cli_progress.progress("thinking", detail):
        assert seen.wait(60)
    assert capsys.readouterr().err.splitlines()[0] == "thinking, 0 s, 0 done"


def test_progress_lets_errors_through():
    with pytest.raises(KeyError), cli_progress.progress("thinking"):
        raise KeyError
