"""`--epp-documents stream`: Megatron's own samples, in Megatron's order, with its masks; trained as without `--epp`."""

import argparse
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.data.documents import build_splits, check_files_of, check_order
from megatron_epp.mcore.data.encoders import identity_of_run
from megatron_epp.plan.errors import EppError
from scripts.random_documents import write_documents
from tests.support.mcore.forked import train
from tests.support.mcore.launch import TINY
from tests.support.mcore.megatron_flags import arguments, data_arguments

LENGTHS = [100, 33, 2, 70, 9, 34, 300, 1, 64, 5, 31, 65, 41, 7, 12, 250]
ITERATIONS = 3
FLAGS = [flag for flag in TINY if flag != "--mock-data"]
FLAGS[FLAGS.index("--micro-batch-size") + 1] = "1"
"""Without mock data, and with one sequence in a microbatch."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("data") / "corpus", LENGTHS, 120)


def run(folder: Path, data: str, *flags: object) -> dict[int, dict[str, float]]:
    given = ["--data-path", data, "--split", "80,20,0", "--pipeline-model-parallel-size", 2, "--calculate-per-token-loss"]
    done = train(folder, 2, *given, "--lr-decay-iters", 100, "--eval-interval", 2, *flags, iterations=ITERATIONS)
    return done.steps | {"output": done.output}


def test_it_trains_as_without_epp_and_goes_on_from_its_checkpoint(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.mcore.forked.TINY", FLAGS)
    stream = ["--epp", "--epp-documents", "stream", "--epp-slices", 3]
    saved = tmp_path / "saved"
    stock = run(tmp_path / "stock", data, "--eod-mask-loss", "--save", saved, "--save-interval", 2)
    ours = run(tmp_path / "ours", data, "--eod-mask-loss", *stream)
    for number in range(1, ITERATIONS + 1):
        assert ours[number] == pytest.approx(stock[number], rel=1e-5)
    stock_losses, our_losses = (validation_losses(one["output"]) for one in (stock, ours))
    assert len(stock_losses) > 0
    np.testing.assert_allclose(our_losses, stock_losses, rtol=1e-5)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run(tmp_path / "resumed", data, "--eod-mask-loss", *stream, "--load", saved)
    assert resumed[3] == pytest.approx(stock[3], rel=1e-5)
    assert 2 not in resumed


def validation_losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"validation loss at .* lm loss value: (\S+)", output)]


@pytest.mark.parametrize("flag", ["reset_position_ids", "reset_attention_mask", "dataloader_inter_document_masking"])
def test_flags_that_part_documents_are_refused(flag: str) -> None:
    named = f"--epp-documents stream .* leave out --{flag.replace('_', '-')}"
    with pytest.raises(ArgumentError, match=named):
        prepare_epp_args(arguments("--epp-documents", "stream", **{flag: True}))
    prepare_epp_args(arguments("--epp-documents", "stream"))


def test_only_flags_that_make_no_samples_are_idle(caplog: pytest.LogCaptureFixture) -> None:
    prepare_epp_args(arguments("--epp-documents", "stream", data_cache_path="cache", num_workers=7, eod_mask_loss=True))
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("--epp makes no use of --num-workers: ")


def test_a_mask_is_refused_by_name(data: str, tmp_path: Path) -> None:
    masked = write_documents(tmp_path / "masked", [3, 4])
    np.ones(9, dtype=np.uint8).tofile(f"{masked}.mask")
    args = data_arguments(data_path=["1", data, "1", masked], epp_documents="stream")
    for check in (check_files_of, lambda args: build_splits(args, (1, 1, 1), identity_of_run(args))):
        with pytest.raises(EppError, match=rf"{masked}\.mask is not used by --epp-documents stream"):
            check(args)


def test_a_checkpoint_goes_on_with_the_same_choice_only(caplog: pytest.LogCaptureFixture) -> None:
    then = argparse.Namespace(epp=True, epp_documents="stream", seed=1, split="1,0,0", seq_length=8, rank=0)
    with pytest.raises(EppError, match=r"--epp-documents was stream .* and is split"):
        check_order(then, argparse.Namespace(**vars(then) | {"epp_documents": "split"}))
    check_order(then, argparse.Namespace(**vars(then) | {"seq_length": 16}))
    assert "--seq-length was 8 and is 16" in caplog.text
