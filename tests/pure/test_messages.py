"""Refusals say what would do: the nearest name, the flags with which a batch fits, the file that is meant."""

import json
import subprocess
import sys

import pytest

from megatron_epp.cli import alternatives, plan
from megatron_epp.cli.doctor import OK, PROBLEM, Finding, text
from megatron_epp.cli.main import MODULES, NAMES
from megatron_epp.cost.library import load_costs
from megatron_epp.plan import EppError
from megatron_epp.plan.layout import Layout
from tests.support.plan.bad_files import error_line, exit_code, written

SMALL = ["plan", "--lengths", "1000", "--model", "llama3-8b", "--cluster", "h100x8", "--stages", "1"]
NEAREST = {
    "command": (["plam"], "'plan'"),
    "flag": (["plan", "--lengths", "5", "--chunk-token", "5", "--stage-s", "2"], "'--stages'"),
    "required flag": (["plan", "--lenghts", "5"], "'--lengths'"),
    "choice": (["plan", "--lengths", "5", "--documents", "spilt"], "'split'"),
    "planner": (["plan", "--lengths", "5", "--planner", "greddy"], "'greedy'"),
    "model": (["plan", "--lengths", "5", "--model", "llama3-8"], "'llama3-8b'"),
    "cluster": (["plan", "--lengths", "5", "--cluster", "h100x"], "'h100x8'"),
    "profile": (["plan", "--lengths", "5", "--costs", "llama3-8b-h10"], "'llama3-8b-h100'"),
    "distribution": (["plan", "--lengths", "wikipdia"], "'wikipedia'"),
    "layout": (["plan", "--lengths", "5", "--layout", "balnced"], "'balanced'"),
    "recipe": (["train", "-c", "recipes/tiny-cp"], "'recipes/tiny-cpu'"),
    "section": (["train", "-c", "recipes/tiny-cpu", "lunch.nodes=2"], "'launch'"),
    "launch key": (["train", "-c", "recipes/tiny-cpu", "launch.node=2"], "'nodes'"),
    "tokens with a unit": (["plan", "--lengths", "8k"], "8192"),
    "context with a unit": (["plan", "--lengths", "5", "--context", "128k"], "131072"),
    "memory with a unit": (["plan", "--lengths", "5", "--memory-gb", "80GB"], "80"),
}


@pytest.mark.parametrize("case", NEAREST)
def test_an_unknown_name_is_refused_with_the_nearest(case, capsys):
    argv, nearest = NEAREST[case]
    assert f"did you mean {nearest}?" in error_line(capsys, argv)


def test_unknown_keys_of_files_are_refused_with_the_nearest(tmp_path, capsys):
    cluster = written(tmp_path / "cluster.yaml", "linear_flop: 1e15\ndevice_memory_gb: 80\n")
    assert "did you mean 'linear_flops'?" in error_line(capsys, ["plan", "--lengths", "5", "--cluster", cluster])
    model = written(tmp_path / "model.yaml", "megatron: {hidden_sise: 64}\n")
    assert "there is 'hidden_sise'" in error_line(capsys, ["plan", "--lengths", "5", "--model", model])
    profile = json.loads(load_costs("llama3-8b-h100").to_json())
    profile["mesage_latency_us"] = profile.pop("message_latency_us")
    path = written(tmp_path / "profile.json", json.dumps(profile))
    assert "did you mean 'message_latency_us'?" in error_line(capsys, ["plan", "--lengths", "5", "--costs", path])
    layout = {"schema": "megatron-epp/layout", "version": 1, "layers_per_stage": [1, 1], "rank_of": [0, 1]}
    with pytest.raises(EppError, match="vocabluary is unknown; did you mean 'vocabulary'"):
        Layout.from_json(json.dumps(layout | {"vocabluary": "sharded"}))


def test_what_weights_do_not_leave_room_for_is_refused_with_flags_that_fit_and_none_that_cannot_help(capsys):
    assert exit_code(SMALL) == 2
    first, second = [line for line in capsys.readouterr().err.splitlines() if ", 2 s" not in line]
    assert first.startswith("megatron-epp: error: no plan fits a memory cap of 72.00 GiB per rank")
    assert "weights, gradients and optimizer alone are 135.60 GiB on rank 0, whatever the batch" in first
    assert second.startswith("A device of 80 GiB has less. Would fit, each by itself: --stages 4 (")
    assert not any(word in second for word in ("--memory", "--chunk-tokens", "--context", "--offload"))
    for flags in (["--stages", "4"], ["--tensor-parallel", "2", "--sequence-parallel"], ["--data-parallel", "4"]):
        assert f"{' '.join(flags)} (" in second
        assert exit_code([*SMALL, *flags]) == 0


def test_even_layers_that_fit_where_balanced_ones_do_not_are_named(capsys):
    argv = [*SMALL, "--stages", "2"]
    assert exit_code(argv) == 2
    assert "--layout even (" in capsys.readouterr().err
    assert exit_code([*argv, "--layout", "even"]) == 0


def test_a_sequence_that_is_too_long_is_refused_with_the_context_that_fits(capsys):
    argv = [*SMALL[:2], "400000", *SMALL[3:-1], "2", "--layers", "8"]
    assert exit_code(argv) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    (context,) = (
        word.strip(".,") for before, word in zip(said.split(), said.split()[1:], strict=False) if before == "--context"
    )
    assert exit_code([*argv, "--context", context]) == 0


def test_a_cap_that_the_device_could_have_may_be_raised(capsys):
    assert exit_code([*SMALL[:5], "--memory-gb", "72", "--stages", "1"]) == 2
    _, raised, *_, would_fit = capsys.readouterr().err.splitlines()
    assert raised == "Raise --memory-cap-gb to 136.52."
    assert would_fit.startswith("Would fit, each by itself: ")


def test_the_parallelism_that_a_models_file_assumes_is_told(capsys):
    argv = ["plan", "--lengths", "1000", "--model", "llama3-70b", "--cluster", "h100x8", "--stages", "8"]
    told = "model llama3-70b: tensor parallelism over 8 ranks, as its file says; --tensor-parallel changes it"
    assert exit_code(argv) == 0
    assert told in capsys.readouterr().err
    assert exit_code([*argv, "--tensor-parallel", "4"]) == 0
    assert "as its file says" not in capsys.readouterr().err


def test_a_missing_profile_is_not_a_machine_that_cannot_train():
    profile = Finding("profile", PROBLEM, "there is no file missing.json", "give another file")
    assert text([Finding("torch", OK, "2.13.0"), profile]).splitlines()[-1].startswith("training can run here, but not with")
    broken = Finding("torch", PROBLEM, "not found")
    assert text([broken, profile]).splitlines()[-1].startswith("training cannot run here: 2 problem(s)")


def test_tokens_given_as_lengths_are_named_as_such(tmp_path, capsys):
    tokens = written(tmp_path / "corpus.bin", b"\xff\xfe" * 50)
    index = tmp_path / "corpus.idx"
    expected = f"--lengths {tokens} holds the tokens of documents, not their lengths: those are in {index}"
    assert f"{expected}; it is not there" in error_line(capsys, ["plan", "--lengths", tokens])
    written(index, b"")
    assert error_line(capsys, ["plan", "--lengths", tokens]).endswith(expected)
    assert f"{index} is empty" in error_line(capsys, ["plan", "--lengths", str(tmp_path / "corpus")])  # the prefix is the index


@pytest.mark.parametrize(
    "argv", [["plan", "--lengths", "5", "--model"], ["plan", "--lengths", "5", "--costs"], ["train", "-c"]]
)
def test_a_folder_where_a_file_should_be_is_named_as_such(argv, tmp_path, capsys):
    assert f"{tmp_path} is a folder, not a file" in error_line(capsys, [*argv, str(tmp_path)])


@pytest.mark.parametrize("argv", [["check"], ["show"], ["plan", "--lengths", "5", "--costs"], ["train", "-c"]])
def test_an_empty_file_is_named_as_such(argv, tmp_path, capsys):
    assert "is empty" in error_line(capsys, [*argv, written(tmp_path / "file.json", b"")])


def test_help_imports_nothing_heavy():
    """All commands run in one process, which names the first that imports such a package."""
    commands = ["", *MODULES, *NAMES]
    program = (
        "import sys; from megatron_epp.cli.main import main\n"
        f"for command in {commands}:\n"
        " try: main([*command.split(), '--help'])\n"
        " except SystemExit:\n"
        "  heavy = {'numba', 'torch', 'matplotlib', 'megatron', 'highspy'} & set(sys.modules)\n"
        "  if heavy: sys.exit(f'{command}: {heavy}')\n"
        "  print('end of help')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *texts, rest = done.stdout.split("end of help\n")
    assert (len(texts), rest) == (len(commands), "")
    assert all(text.startswith("usage: megatron-epp") for text in texts)


def test_only_the_module_of_a_command_is_imported():
    program = "import sys; from megatron_epp.cli.main import main; main(['check', 'nowhere'])"
    program += "; print('megatron_epp.cli.advise' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


OFFLOADED = [*SMALL[:2], "60000,300", *SMALL[3:-1], "8", "--slices", "4", "--offload", "--memory-gb", "28.5"]


def test_a_refusal_comes_before_what_would_fit(capsys, monkeypatch):
    def later(*_):
        assert "error: no plan fits a memory cap of 28.50 GiB" in capsys.readouterr().err
        return "Would fit, each by itself: nothing."

    monkeypatch.setattr(plan, "alternatives", later)
    assert exit_code(OFFLOADED) == 2
    assert capsys.readouterr().err == "Would fit, each by itself: nothing.\n"


def test_what_was_not_tried_within_the_limit_of_work_is_named(capsys, monkeypatch):
    assert exit_code(OFFLOADED) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("Would fit, each by itself: --stages 16 (")
    assert "Not tried" not in said
    monkeypatch.setattr(alternatives, "MOST_WORK", 0)
    assert exit_code(OFFLOADED) == 2
    late = "--stages, --layout, --tensor-parallel, --vocab-parallel, --data-parallel, --context"
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("No change of one of its flags was found to do")
    assert said.endswith(f"Not tried, since plans of this batch take long: {late}.")
