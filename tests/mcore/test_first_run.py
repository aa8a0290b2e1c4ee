"""`megatron-epp first-run`: its reduced form passes here, step by step, and its last lines are what a user has to change."""

import json
import re
import shlex

import pytest

from megatron_epp.cli.first_run import STEPS
from megatron_epp.cli.first_run.launch import read_launch
from megatron_epp.cli.main import main
from megatron_epp.launch import runs
from megatron_epp.plan import EppError
from tests.support import ROOT
from tests.support.mcore import forked

MODEL = [
    *shlex.split("--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 4096 --max-position-embeddings 4096"),
    *shlex.split("--vocab-size 1024 --tokenizer-type NullTokenizer --position-embedding-type rope"),
]
NAMES = [step.name for step in STEPS]


@pytest.fixture
def ran(tmp_path, capsys):
    """Runs the command; returns its exit code, its report, and what it printed."""

    def run(*arguments):
        code = main(["first-run", "-o", str(tmp_path), *map(str, arguments)])
        return code, json.loads((tmp_path / "report.json").read_text()), capsys.readouterr().out

    return run


def test_every_step_passes_in_the_reduced_form_and_the_report_has_all_of_them(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_forks", forked._forks)  # trains in ranks of the process that other tests fork from
    code, report, printed = ran("--lengths", "3000,900,40,7")
    assert [(step["name"], step["outcome"]["status"]) for step in report["steps"]] == [(name, "passed") for name in NAMES]
    assert code == 0
    assert report["is_reduced"]
    assert {"torch", "megatron-core"} <= set(report["versions"])
    figures = {step["name"]: step["outcome"]["figures"] for step in report["steps"]}
    assert all(plan["num_wrong"] == 0 for plan in figures["links"]["plans"])
    assert 0 < figures["parity"]["losses"]["stock"][0] == pytest.approx(figures["parity"]["losses"]["elastic"][0], rel=1e-5)
    assert figures["plan"]["speedup"] > 0
    text = (tmp_path / "report.txt").read_text()
    for step in STEPS:
        assert f"{step.name}: {step.purpose}" in text
        assert step.expect in printed
    assert (tmp_path / "profile.json").exists()


def test_a_step_that_fails_says_what_to_do_and_the_others_run(ran, monkeypatch):
    def stuck(*_):
        raise EppError("1 of 2 ranks have not ended after 30 s")

    monkeypatch.setattr("megatron_epp.runtime.links.processes.measure_link", stuck)
    code, report, printed = ran("--steps", "links,kernels")
    assert code == 1
    assert [step["outcome"]["status"] for step in report["steps"]] == ["failed", "passed"]
    assert "1 of 2 ranks have not ended after 30 s" in printed
    assert f"-> {STEPS[1].on_failure}" in printed
    assert "1 passed, 1 failed (links)" in printed


def test_the_lines_to_change_are_those_of_the_readme():
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    lines = [(line[0], line[1:].replace("...", "").rstrip("\\ ")) for line in diff.splitlines()]
    before = [word for kind, text in lines if kind in "- " for word in shlex.split(text)]
    found = [(line[0], shlex.split(line[1:].rstrip("\\ "))) for line in read_launch([*before, *MODEL]).changes()]
    assert found == [(kind, shlex.split(text)) for kind, text in lines if kind in "-+"]


def test_megatrons_own_dropout_of_attention_is_switched_off():
    launch = read_launch(["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *MODEL])
    assert launch.changes()[2:] == ["+    --attention-dropout 0 \\"]
    assert launch.elastic_argv()[-3:] == ["--epp", "--attention-dropout", "0"]


@pytest.mark.parametrize(
    ("launcher", "sizes", "devices"),
    [
        ("torchrun --nproc-per-node 8", "--pipeline-model-parallel-size 4", 8),
        ("torchrun --nnodes=4 --nproc_per_node=8", "--pipeline-model-parallel-size 4", 32),
        ("python", "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", 8),
        ("srun -n 8", "", 1),
    ],
)
def test_devices_are_what_the_launcher_starts_or_one_replica(launcher, sizes, devices):
    assert read_launch(shlex.split(f"{launcher} pretrain_gpt.py {sizes}") + MODEL).devices == devices


def test_a_users_own_launch_is_planned_and_flags_that_a_plan_cannot_honour_are_listed(ran):
    launch = shlex.split(
        "torchrun --nproc-per-node 2 train.py --my-flag 7 --pipeline-model-parallel-size 2 --global-batch-size 4"
    )
    code, report, printed = ran(
        "--steps", "plan", "--lengths", "4000,900,40,7", "--", *launch, *MODEL, "--recompute-granularity", "full", "--sft"
    )
    assert code == 0
    assert report["launch"][:3] == ["torchrun", "--nproc-per-node", "2"]
    assert "TP 1 CP 1 PP 2 DP 1; costs by formula for h100x8" in printed
    assert "--recompute-granularity: use --epp-recompute" in printed
    assert "--sft: leave it out" in printed
    assert "-torchrun --nproc-per-node 2 train.py" in printed


def test_what_training_would_refuse_besides_is_said(ran):
    launch = [
        "torchrun",
        "--nproc-per-node",
        "2",
        "pretrain_gpt.py",
        *MODEL,
        "--delay-wgrad-compute",
        "--global-batch-size",
        "2",
    ]
    _, _, printed = ran("--steps", "plan", "--lengths", "40,7", "--", *launch)
    assert "--epp-split-weight-gradient: leave out --delay-wgrad-compute" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "sbatch", "job.sh"], "names no script: give it as in `-- torchrun"),
        (["--", "python", "pretrain_gpt.py", "--num-layers", "2"], "lacks --hidden-size, --num-attention-heads, --seq-length"),
        (["--cluster", "b200x8"], "there is no file b200x8, and there is no such name among the shipped clusters"),
    ],
)
def test_a_mistake_is_told_in_a_line_before_anything_starts(capsys, tmp_path, arguments, says):
    assert main(["first-run", "-o", str(tmp_path / "out"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_misspelt_step_is_named_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["first-run", "--steps", "doctor,limks"])
    assert "there is no step limks; did you mean 'links'?" in capsys.readouterr().err


def test_the_page_explains_every_step_in_order_with_its_time():
    page = (ROOT / "docs" / "first-hour.md").read_text()
    titles = re.findall(r"^## (\d)\. (\S+), about (\d+) min", page, re.MULTILINE)
    assert titles == [(str(number), step.name, str(step.gpu_minutes)) for number, step in enumerate(STEPS, start=1)]
