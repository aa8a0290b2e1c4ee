"""Short runs that fail say why, as far as their logs do."""

import pytest

from megatron_epp.launch import runs
from megatron_epp.launch.runs import reason_in


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("megatron_epp, rank 1: there is no --data-path", "megatron_epp, rank 1: there is no --data-path"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "torch.OutOfMemoryError: CUDA out of memory."),
        ("[rank0]: RuntimeError: boom", "RuntimeError: boom"),
        ("an Error inside of a line", None),
    ],
)
def test_the_reason_is_the_line_that_names_it(line, reason):
    assert reason_in(f"iteration 1/2\n{line}\nlast\n") == reason


def test_on_gpus_ranks_start_under_torchrun_and_figures_are_read(tmp_path, monkeypatch):
    def stand_in(command, log, limit_s):
        assert command[1:5] == ["-m", "megatron_epp.launch.torchrun", "--nproc-per-node", "2"]
        assert command[-4:] == ["--num-layers", "4", "--epp-report-dir", str(tmp_path)]
        (tmp_path / "iterations.jsonl").write_text('{"iteration": 1, "tokens": 50, "loss": 2.5}\n')
        with log.open("a") as output:
            output.write(" iteration        1/       1 | elapsed time per iteration (ms): 10.0 |\n")
        return 0

    monkeypatch.setattr(runs, "count_gpus", lambda: 2)
    monkeypatch.setattr(runs, "_exit_code", stand_in)
    run = runs.train(tmp_path, 2, {"epp": True, "num_layers": 4})
    assert run.losses == [2.5]
    assert run.tokens_per_second() == 5000


@pytest.mark.parametrize(
    ("script", "limit_s", "code"), [("echo why >&2; exit 3", 60, 3), ("echo why; exec sleep 60", 0.5, None)]
)
def test_what_a_command_says_is_in_the_log_however_it_ends(tmp_path, script, limit_s, code):
    log = tmp_path / "log"
    log.write_text("first\n")
    assert runs._exit_code(["sh", "-c", script], log, limit_s) == code
    assert log.read_text() == "first\nwhy\n"
