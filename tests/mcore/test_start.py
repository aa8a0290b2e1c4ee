"""What Megatron would assert about flags and files when it has started is refused before, in a line for each problem."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.training import training

from megatron_epp.mcore import entry
from megatron_epp.mcore.arguments import start
from megatron_epp.mcore.patches import environment, install
from megatron_epp.plan import EppError
from tests.mcore.test_mistakes import megatron_parser, with_documents, words_of
from tests.support.mcore.jobs.frameworks import refusal
from tests.support.mcore.launch import TINY


class Asked:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def args(self, more: str = "") -> Namespace:
        return entry.check(megatron_parser(), words_of(self._folder, f"--epp {more}"))

    def problems(self, more: str = "", *, wants_files: bool = True, world_size: int = 1) -> list[str]:
        return refusal(lambda: entry.check_start(self.args(more), world_size, wants_files=wants_files)).splitlines()


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(with_documents(tmp_path_factory.mktemp("documents")))


def test_a_run_that_would_train_is_not_refused(asked: Asked, tmp_path: Path) -> None:
    assert asked.problems() == []
    assert asked.problems(f"--save {tmp_path / 'a' / 'b'} --load {tmp_path / 'a' / 'b'} --save-interval 5") == []
    user = "--epp-microbatches user --load nowhere --finetune --data-path no/where --eval-interval 0 --lr-warmup-iters 20"
    assert asked.problems(user) == []
    flags = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex"
    assert asked.problems(flags, world_size=2, wants_files=False) == []
    (tmp_path / start.TRACKER).write_text("10")
    assert asked.problems(f"--load {tmp_path}") == []


@pytest.mark.parametrize("more", ["", "--epp-allow-unknown-megatron"])
def test_a_run_without_plans_needs_no_flag_of_ours(more: str) -> None:
    entry.check_run(megatron_parser().parse_args([*TINY, *more.split()]), 1)


def test_a_flag_that_is_missing_is_named(asked: Asked) -> None:
    named = "--max-position-embeddings argument is None"
    for missing, says in (("lr", "--lr is missing: pass a learning rate"), ("max_position_embeddings", named)):
        args = asked.args()
        setattr(args, missing, None)
        with pytest.raises(EppError, match=says):
            entry.check_start(args, 1, wants_files=False)


@pytest.mark.parametrize("door", ["", "--epp-microbatches user --eval-interval 0"])
def test_grouped_experts_without_a_gpu_are_shown_and_not_run(asked: Asked, monkeypatch: pytest.MonkeyPatch, door: str) -> None:
    flags = f"{door} --num-experts 4 --moe-grouped-gemm"
    (problem,) = asked.problems(flags)
    assert problem == "--moe-grouped-gemm needs a GPU, and torch finds none: leave it out"
    assert asked.problems(flags, wants_files=False) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert asked.problems(flags) == []


def test_where_nothing_is_evaluated_there_needs_to_be_no_interval(asked: Asked) -> None:
    """Megatron divides by it all the same, and ends without one."""
    args = asked.args("--eval-iters 0")
    args.eval_interval = None
    entry.check_start(args, 1, wants_files=False)
    assert args.eval_interval == 20


def test_a_run_asks_on_its_first_rank_before_megatron(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args, validated = asked.args(f"--tensorboard-dir {tmp_path / 'file' / 'below'}"), []
    args.rank, args.world_size = 0, 1
    (tmp_path / "file").touch()
    with pytest.raises(EppError, match=f"--tensorboard-dir {tmp_path}/file/below: {tmp_path}/file is a file, not a folder"):
        install._check_flags(validated.append, args)
    assert validated == []
    monkeypatch.setenv("RANK", "1")
    install._check_flags(validated.append, args)
    assert validated == [args]


def test_a_folder_that_cannot_be_written_is_named(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(start.os, "access", lambda path, mode: False)
    said = f"--save {tmp_path / 'run'}: the folder {tmp_path} cannot be written; choose another folder"
    assert asked.problems(f"--save {tmp_path / 'run'} --save-interval 5") == [said]


Saves = Callable[..., Path]


@pytest.fixture
def saves(asked: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Saves:
    """Make a folder with what a checkpoint of a run with flags holds besides tensors, the schedule as Megatron makes it."""

    def save(more: str = "", world_size: int = 1, name: str = "saved") -> Path:
        then, folder = asked.args(more), tmp_path / name
        entry.check_start(then, world_size, wants_files=False)
        then = start.validate(then)
        monkeypatch.setattr(training, "get_args", lambda: then)
        schedule = training.get_optimizer_param_scheduler(torch.optim.SGD([torch.zeros(1)])).state_dict()
        (folder / "iter_0000010").mkdir(parents=True)
        (folder / start.TRACKER).write_text("10")
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / "iter_0000010" / "metadata.json").write_text(json.dumps(about))
        torch.save({"args": then, "opt_param_scheduler": schedule}, folder / "iter_0000010" / "common.pt")
        return folder

    return save


def test_the_flags_of_the_run_that_saved_it_go_on(asked: Asked, saves: Saves) -> None:
    more = "--lr-decay-style cosine --lr-warmup-fraction 0.1 --weight-decay 0.1 --min-lr 1e-5 --lr-decay-iters 15"
    assert asked.problems(f"--load {saves()}") == []
    assert asked.problems(f"--load {saves(more, name='other')} {more}") == []


OTHERS = {
    "--train-iters 30": "value 240 and checkpointvalue 160 for total number of iterations",
    "--lr 3e-4": "value 0.0003 and checkpointvalue 0.001 for learning rate",
    "--global-batch-size 16": "for total number of iterations",
    "--lr-warmup-iters 3": "for warmup iterations",
    "--lr-decay-style cosine": "for learning rate decay style",
    "--weight-decay 0.5": "for start weight decay",
    "--min-lr 1e-5": "for minimum learning rate",
}


@pytest.mark.parametrize("more", OTHERS)
def test_another_schedule_than_that_of_the_checkpoint_is_refused_by_its_flags(asked: Asked, saves: Saves, more: str) -> None:
    folder = saves()
    (problem,) = asked.problems(f"--load {folder} {more}")
    assert problem.startswith(f"the checkpoint in {folder} was saved with another schedule of learning rates")
    assert OTHERS[more] in problem
    assert "add --override-opt-param-scheduler" in problem
    for takes in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler", "--finetune", "--no-load-optim"):
        assert asked.problems(f"--load {folder} {more} {takes}") == []


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_layers_no_bridge_exports_are_refused(asked: Asked, saves: Saves, monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    folder = saves()
    local, engine = (f"{flag} {folder} --transformer-impl {layers}" for layers in ("local", "transformer_engine"))
    assert asked.problems(local) == []
    (config := folder / "iter_0000010" / "run_config.yaml").touch()
    (problem,) = asked.problems(local)
    assert problem.startswith(f"the checkpoint in {folder} is Megatron-Bridge's, which cannot export")
    assert "set --transformer-impl transformer_engine" in problem
    assert problem.endswith(f"remove {config}")
    monkeypatch.setattr(environment, "_missing", frozenset)  # as if the package were there
    assert asked.problems(engine) == []


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("form", ["", "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"])
def test_optimizer_state_of_experts_of_one_or_more_stays(asked: Asked, saves: Saves, before: int, now: int, form: str) -> None:
    more = f"--num-experts 4 --moe-token-dispatcher-type alltoall --expert-model-parallel-size {{}} {form}"
    folder = saves(more.format(before), world_size=2)
    (problem,) = asked.problems(f"--load {folder} {more.format(now)}", world_size=2)
    assert f"the optimizer state in {folder} was saved with --expert-model-parallel-size {before}" in problem
    assert f"resume with {before}, or begin it anew with --no-load-optim" in problem
    assert asked.problems(f"--load {folder} {more.format(before)}", world_size=2) == []
    assert asked.problems(f"--load {folder} {more.format(now)} --no-load-optim", world_size=2) == []


def test_a_checkpoint_of_another_model_is_refused(asked: Asked, saves: Saves) -> None:
    """Layers that follow from a pattern are not compared before Megatron counts them."""
    folder = saves()
    said = f"the checkpoint in {folder} is of another model: this run has --num-layers 8, not 4"
    assert asked.problems(f"--load {folder} --num-layers 8") == [said]
    args = asked.args(f"--load {folder}")
    args.num_layers = None
    assert list(start._unlike(args, folder)) == []


def test_a_run_without_its_checkpoint_says_so(asked: Asked, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asked.problems(f"--load {tmp_path / 'nowhere'}") == []
    (record,) = (record for record in caplog.records if "new weights" in record.getMessage())
    assert record.getMessage() == f"--load: there is no folder {tmp_path / 'nowhere'}: training begins with new weights"
