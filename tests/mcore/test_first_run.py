"""`megatron-epp first-run`: its reduced form passes here, step by step, and its last lines are what a user has to change."""

import json
import re
import shlex
import sys
from types import SimpleNamespace

import pytest

from megatron_epp.launch.machine import free_port
from megatron_epp.mcore import pretrain_gpt
from megatron_epp.plan import EppError
from megatron_epp.plan.flags import flag_words
from megatron_epp.tools.cli.first_run import STEPS
from megatron_epp.tools.cli.first_run.launch import read_launch
from megatron_epp.tools.cli.first_run.training import race, tiny_training
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.launch import runs
from tests.support import ROOT
from tests.support.mcore import forked

MODEL = [
    *shlex.split("--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 4096 --max-position-embeddings 4096"),
    *shlex.split("--vocab-size 1024 --tokenizer-type NullTokenizer --position-embedding-type rope"),
]
NAMES = [step.name for step in STEPS if not step.is_asked_for]


@pytest.fixture
def ran(tmp_path, capsys):
    def run(*arguments):
        code = main(["first-run", "-o", str(tmp_path), *map(str, arguments)])
        return code, json.loads((tmp_path / "report.json").read_text()), capsys.readouterr().out

    return run


def test_every_step_passes_in_the_reduced_form_and_the_report_has_all_of_them(ran, monkeypatch):
    forked.fork_runs(monkeypatch)
    code, report, printed = ran("--lengths", "3000,900,40,7")
    assert [(step["name"], step["outcome"]["status"]) for step in report["steps"]] == [(name, "passed") for name in NAMES]
    assert code == 0
    assert report["is_reduced"]
    assert {"torch", "megatron-core"} <= set(report["versions"])
    figures = {step["name"]: step["outcome"]["figures"] for step in report["steps"]}
    assert all(plan["num_wrong"] == 0 for plan in figures["links"]["plans"])
    assert 0 < figures["parity"]["losses"]["stock"][0] == pytest.approx(figures["parity"]["losses"]["elastic"][0], rel=1e-5)
    assert figures["plan"]["speedup"] > 0
    assert all(step.expect in printed for step in STEPS if not step.is_asked_for)


def test_a_race_measures_every_schedule_on_the_same_documents(ran, monkeypatch):
    forked.fork_runs(monkeypatch)
    code, report, printed = ran("--steps", "race")
    assert code == 0
    (step,) = report["steps"]
    schedules = step["outcome"]["figures"]["schedules"]
    assert list(schedules) == ["stock", "packed", "elastic"]
    assert all(one["tokens_per_second"] > 0 and len(one["losses"]) == 7 for one in schedules.values())
    assert schedules["elastic"]["losses"] == pytest.approx(schedules["stock"]["losses"], rel=1e-5)
    elastic = schedules["elastic"]
    assert elastic["planned_us"] > 0
    assert elastic["measured_us"] > 0
    assert elastic["planned_peak_bytes"] > 0
    assert re.search(r"plans are \d+\.\d\dx as fast as packed; its losses differ by", printed)


def test_a_schedule_that_ends_badly_leaves_the_others_comparable(ran, monkeypatch):
    def trained(folder, ranks, settings, timeout_s):
        if settings["epp_schedule"] == "stock":
            raise runs.TrainingError("training ended with exit code 1: out of memory")
        line = {"iteration": 1, "tokens": 10, "loss": 1.0, "device_peak_bytes": [(5, 6), (7, 8)], "alloc_retries": [0, 3]}
        return runs.RecordedRun((line,) * 7, (10.0 if settings["epp_schedule"] == "packed" else 5.0,) * 7)

    monkeypatch.setattr(sys.modules[race.__module__], "train", trained)
    code, report, printed = ran("--steps", "race")
    assert code == 0
    assert "plans are 2.00x as fast as packed; its losses differ by 0.0e+00 at most" in printed
    assert "stock did not end well: training ended with exit code 1: out of memory" in printed
    found = report["steps"][0]["outcome"]["figures"]["schedules"]["elastic"]
    assert (found["device_peak_bytes"], found["alloc_retries"], found["tokens_per_second"]) == (7, 3, 2000.0)


def test_a_race_takes_the_users_command_without_what_it_keeps_and_loads(tmp_path):
    lasting = "--save runs --save-interval=5 --load runs --wandb-project mine --exit-interval 7"
    given = shlex.split(f"{lasting} --lr-warmup-iters 3 --micro-batch-size 4")
    launch = read_launch(["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *MODEL, *given])
    words = launch.raced("packed", tmp_path, 10)
    assert words[:6] == ["torchrun", "--nproc-per-node", "4", "-m", "megatron_epp.run", "pretrain_gpt.py"]
    kept = "--lr-warmup-iters 3 --micro-batch-size 1 --epp --attention-dropout 0 --epp-schedule packed"
    added = f"--epp-report-dir {tmp_path} --exit-interval 10 --log-interval 1 --eval-iters 0"
    assert words[6:] == [*MODEL, *shlex.split(f"{kept} {added}")]


def test_a_race_without_a_launch_command_is_skipped_with_what_to_give(monkeypatch, tmp_path):
    outcome = race(SimpleNamespace(is_reduced=False, has_launch=False))
    assert (outcome.status, outcome.todo) == ("skipped", "give yours behind --, with its data")


@pytest.mark.slow  # three trainings that start their ranks by themselves: 60 s on two cores
def test_a_users_own_command_is_raced(tmp_path):
    settings = tiny_training(tmp_path, 2, 10, is_reduced=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words = [*torchrun, pretrain_gpt.__file__]
    launch = read_launch([*words, *flag_words({name: value for name, value in settings.items() if "epp" not in name})])
    outcome = race(SimpleNamespace(is_reduced=False, has_launch=True, launch=launch, folder=tmp_path))
    assert outcome.status == "passed", outcome.found
    assert [len(one["losses"]) for one in outcome.figures["schedules"].values()] == [10] * 3
    assert outcome.figures["failures"] == {}


def test_a_step_that_fails_says_what_to_do_and_the_others_run(ran, monkeypatch):
    def stuck(*_):
        raise EppError("1 of 2 ranks have not ended after 30 s")

    monkeypatch.setattr("megatron_epp.runtime.links.processes.measure_link", stuck)
    code, report, printed = ran("--steps", "links,doctor")
    assert code == 1
    assert [step["outcome"]["status"] for step in report["steps"]] == ["passed", "failed"]
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
    own = "--my-flag 7 --pipeline-model-parallel-size 2 --global-batch-size 4"
    launch = shlex.split(f"torchrun --nproc-per-node 2 train.py {own}")
    refused = "--recompute-granularity", "full", "--sft"
    code, report, printed = ran("--steps", "plan", "--lengths", "4000,900,40,7", "--", *launch, *MODEL, *refused)
    assert code == 0
    assert report["launch"][:3] == ["torchrun", "--nproc-per-node", "2"]
    assert "TP 1 CP 1 PP 2 DP 1; costs by formula for h100x8" in printed
    assert "--recompute-granularity: leave it out: plans choose what is recomputed" in printed
    assert "--sft: leave it out" in printed
    assert "-torchrun --nproc-per-node 2 train.py" in printed


def test_lengths_with_parents_run_once_what_is_in_common_unless_the_model_has_dropout(ran):
    asked = "--steps plan --cluster this-machine --lengths 4000,3900@0:3000,3900@0:3000,3800@0:3000,90 -- torchrun train.py"
    asked += " --pipeline-model-parallel-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout"
    (code, report, printed), (_, of_dropout, told) = (ran(*asked.split(), dropout, *MODEL) for dropout in ("0", "0.1"))
    assert code == 0
    assert "15,600 tokens (9,000 of them in common with others)" in printed
    assert "15,600 tokens, the longest" in told
    assert "parents are left out, as the model has dropout, which is another for every sample" in told
    speedups = [each["steps"][0]["outcome"]["figures"]["speedup"] for each in (report, of_dropout)]
    assert speedups[0] > 1.5 * speedups[1]


def test_what_training_would_refuse_besides_is_said(ran):
    launch = shlex.split("torchrun --nproc-per-node 2 pretrain_gpt.py --delay-wgrad-compute --global-batch-size 2")
    _, _, printed = ran("--steps", "plan", "--lengths", "40,7", "--", *launch, *MODEL)
    assert "--delay-wgrad-compute True is set by --epp-split-weight-gradient: leave it out" in printed


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


def test_the_page_explains_every_step_in_order():
    page = (ROOT / "docs" / "first-hour.md").read_text()
    table = page[page.index("| step | what it does |") :]
    steps = re.findall(r"^\| (\w+)(?: \(`--race`\))? \|", table.partition("\n\n")[0], re.MULTILINE)
    assert steps[1:] == [step.name for step in STEPS]
