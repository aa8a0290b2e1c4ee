"""What commands print, whole, with the plans of small batches and with damaged ones.

After a change that is meant, write them anew with ``MEGATRON_EPP_WRITE_GOLDEN=1 pytest tests/pure/test_cli_transcripts.py`` and
read the difference.
"""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.plan.serialize import to_json
from megatron_epp.tools.cli import terminal
from tests.support.golden import assert_as_written
from tests.support.plan.bad_files import PLAN, SOUND, exit_code, signed

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
