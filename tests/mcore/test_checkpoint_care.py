"""A damaged checkpoint is named before it is loaded, or set aside for the one before; a training that is over says so."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_epp.mcore.arguments import start
from megatron_epp.mcore.training import checkpoints
from megatron_epp.mcore.training.checkpoints import INDEX, TRACKER, embedding_rows, fault_of, settle_folder
from megatron_epp.plan import EppError
from megatron_epp.runtime.watchdog import EXIT_CODE
from tests.support.failing_disk import swept
from tests.support.mcore.forked import CHANGED, launch, succeeded
from tests.support.mcore.launch import PLANNED, Finished
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair

NEWEST, BEFORE = "iter_0000004", "iter_0000002"
FLAGS = [*PLANNED, "--pipeline-model-parallel-size", 2, "--train-iters", 4, "--lr-decay-iters", 9]
FLAGS += ["--use-distributed-optimizer"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("documents")
    return write_pair(folder / "text", documents_of(long_tailed_lengths(64, longest=33), vocab_size=127))


def trained(data: str, *flags: object) -> Finished:
    return launch(2, "-m", "megatron_epp.mcore.pretrain_gpt", *FLAGS, "--data-path", data, *flags)


@pytest.fixture(scope="module")
def saved(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of four iterations that has saved after the second and the fourth."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    succeeded(trained(data, "--save", folder, "--save-interval", 2))
    return folder


def test_what_a_checkpoint_holds_besides_tensors_is_known_before_a_start(saved: Path) -> None:
    state = start.common_state(saved)
    assert state["iteration"] == 4
    assert {"lr_decay_steps", "max_lr"} <= state["opt_param_scheduler"].keys()


@pytest.mark.parametrize(
    ("beyond", "entries", "tensor_ranks", "refused", "words"),
    [
        (0, 128, 1, False, ""),
        (64, 128, 1, True, "set --padded-vocab-size {rows}, which keeps"),
        (-64, 0, 2, True, "set --padded-vocab-size {rows}, which keeps"),
        (64, 999, 1, False, "since the tokenizer has 999"),
        (64, 128, 7, False, "since --tensor-model-parallel-size 7 does not divide them"),
    ],
    ids=["as many", "more", "fewer", "more entries", "indivisible"],
)
def test_an_embedding_of_other_rows_is_refused_where_the_model_can_have_the_same(
    saved: Path, caplog: pytest.LogCaptureFixture, beyond: int, entries: int, tensor_ranks: int, refused: bool, words: str
) -> None:
    rows = embedding_rows(saved)
    assert rows is not None
    said = ""
    try:
        checkpoints._check_rows([saved.parent / "none yet", saved], rows + beyond, entries, tensor_ranks)
    except EppError as error:
        said = str(error)
    assert bool(said) == refused
    said += caplog.text
    assert words.format(rows=rows) in said
    assert (f"has {rows} rows and this model {rows + beyond}" in said) == bool(beyond)


def test_a_training_with_other_rows_than_its_checkpoint_ends_with_the_flag_to_set(saved: Path, data: str) -> None:
    rows = embedding_rows(saved)
    assert rows is not None
    for folder in ("--load", "--pretrained-checkpoint"):
        larger = trained(data, folder, saved, "--finetune", "--padded-vocab-size", rows + 64)
        assert larger.returncode != 0
        assert f"set --padded-vocab-size {rows}" in larger.output, larger.output[-5000:]


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def tensors(checkpoint: Path) -> Path:
    return max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "tensors cut short": (lambda one: shorten(tensors(one)), "distcp is damaged: "),
    "tensors missing": (lambda one: tensors(one).unlink(), "distcp is damaged: 0 bytes of "),
    "index cut short": (lambda one: shorten(one / INDEX), "cannot be read"),
    "index missing": (lambda one: (one / INDEX).unlink(), "cannot be read"),
    "format cut short": (lambda one: shorten(one / "metadata.json"), "metadata.json cannot be read"),
    "all files missing": (lambda one: [path.unlink() for path in one.iterdir() if path.is_file()], "empty"),
    "folder missing": (shutil.rmtree, "there is no checkpoint"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_taken(name: str, copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fault_of(copy / NEWEST) is None
    damage, says = DAMAGES[name]
    damage(copy / NEWEST)
    with pytest.raises(EppError, match=f"{says}.*--epp-checkpoint-fallback sets it aside and goes on from {BEFORE}"):
        settle_folder(copy, falls_back=False)
    assert (copy / TRACKER).read_text() == "4"
    settle_folder(copy, falls_back=True)
    assert says in caplog.text
    assert (copy / TRACKER).read_text() == "2"
    assert not (copy / NEWEST).exists()
    assert (copy / f"damaged_{NEWEST}").exists() == (name != "folder missing")
    settle_folder(copy, falls_back=False)


@pytest.mark.parametrize("text", ["9" * 5000, "\0\0four", "\u00b2", ""])
def test_an_unreadable_tracker_file_is_replaced_by_the_newest_whole_checkpoint(copy: Path, text: str) -> None:
    (copy / TRACKER).write_text(text)
    with pytest.raises(EppError, match=f"{TRACKER} has .* and no iteration; --epp-checkpoint-fallback sets it aside"):
        settle_folder(copy, falls_back=False)
    settle_folder(copy, falls_back=True)
    assert (copy / TRACKER).read_text() == "4"
    assert (copy / NEWEST).exists()


def test_whichever_step_of_the_disk_fails_the_tracker_file_is_whole(copy: Path) -> None:
    tracker, refused = copy / TRACKER, 0
    tracker.write_text("four")
    for answer in swept(lambda: settle_folder(copy, falls_back=True)):
        if isinstance(answer, EppError):
            refused += 1
            assert str(answer).endswith(f"and it cannot be set aside: {tracker}: No space left on device")
            assert tracker.read_text() == "four"
        else:
            assert tracker.read_text() == "4"
        tracker.write_text("four")
    assert refused >= 4


@pytest.mark.parametrize(("text", "name"), [("release", "release"), ("25\n", "iter_0000025")])
def test_the_newest_checkpoint_is_the_one_that_the_tracker_file_names(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / TRACKER).write_text(text)
    assert start.newest_checkpoint(tmp_path) == tmp_path / name


@pytest.mark.parametrize("content", [b"[" * 200_000, b"\xff", b"{}", b"7", b""])
def test_a_description_that_is_none_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metadata.json").write_bytes(content)
    assert "metadata.json cannot be read" in str(fault_of(tmp_path))


def test_without_another_checkpoint_nothing_is_set_aside(copy: Path) -> None:
    for name in (NEWEST, BEFORE):
        shorten(tensors(copy / name))
    with pytest.raises(EppError, match=r"no other checkpoint in .* is whole"):
        settle_folder(copy, falls_back=True)
    assert (copy / NEWEST).exists()


def test_an_archive_without_its_end_is_damage(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    torch.save({"iteration": 4}, path := tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    assert fault_of(tmp_path) is None
    shorten(path)
    assert f"{path} is damaged: " in str(fault_of(tmp_path))


def test_a_distributed_checkpoint_of_torch_itself_is_whole_without_megatrons_description(copy: Path) -> None:
    (copy / NEWEST / "metadata.json").unlink()
    assert fault_of(copy / NEWEST) is None
    shorten(tensors(copy / NEWEST))
    assert "distcp is damaged: " in str(fault_of(copy / NEWEST))


@pytest.mark.parametrize("microbatches", ["plan", "user"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(data: str, copy: Path, microbatches: str) -> None:
    flags = ["--load", copy, "--epp-microbatches", microbatches, "--epp-save-limit-seconds", 60]
    shorten(tensors(copy / NEWEST))
    refused = trained(data, *flags)
    assert refused.returncode == 1
    assert "--epp-checkpoint-fallback" in refused.output
    finished = succeeded(trained(data, *flags, "--epp-checkpoint-fallback"))
    assert "iteration        3/       4" in finished.output
    assert "the embedding in" not in finished.output, "it has the rows of the model"


@pytest.mark.parametrize("layout", [["--pipeline-model-parallel-size", 1], ["--decoder-first-pipeline-num-layers", 1]])
def test_optimizer_state_of_another_layout_is_refused_with_a_flag(data: str, saved: Path, layout: list[object]) -> None:
    refused = trained(data, "--load", saved, *layout)
    assert refused.returncode == 1
    assert f"the optimizer state in {saved} was saved for another tensor- or pipeline-parallel layout" in refused.output
    assert "--dist-ckpt-optim-fully-reshardable" in refused.output


def test_a_training_whose_checkpoint_has_all_iterations_ends_with_an_exit_code_of_its_own(data: str, saved: Path) -> None:
    finished = trained(data, "--load", saved)
    assert finished.returncode == 3
    assert "nothing was trained: the checkpoint in" in finished.output
    assert "has 4 iterations, and --train-iters is 4; raise it to go on" in finished.output


def test_a_rank_that_stands_still_in_a_save_ends_the_run(data: str, tmp_path: Path) -> None:
    flags = ["--save", tmp_path / "checkpoints", "--save-interval", 2, "--epp-save-limit-seconds", 2]
    finished = launch(2, CHANGED, "standing_still_in_save", *FLAGS, "--data-path", data, *flags)
    assert finished.returncode == EXIT_CODE
    assert f"has not saved a checkpoint to {tmp_path / 'checkpoints'} in 2 s (--epp-save-limit-seconds)" in finished.output
