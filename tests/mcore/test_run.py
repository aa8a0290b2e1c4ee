"""What a training on documents and one on a script's own microbatches have in common: folders, watches and failures."""

import threading
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatron_epp.data.iterator import DisagreementError
from megatron_epp.launch.run_folder import LOCK
from megatron_epp.mcore.iteration import base_run
from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.loggers import Reports
from megatron_epp.plan import EppError
from megatron_epp.runtime import failures
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.watchdog import Watchdog


@pytest.fixture
def ours() -> Run:
    made: Run = object.__new__(Run)
    made.rank, made.failures = 3, FailureBoard(HashStore(), 0, 2)
    return made


def test_a_run_holds_the_folders_that_it_writes_to(tmp_path: Path) -> None:
    checkpoints, reports = tmp_path / "checkpoints", tmp_path / "reports"
    name = base_run._hold_folders(Namespace(save=str(checkpoints), epp_report_dir=str(reports)))
    for folder in (checkpoints, reports):
        assert name in (folder / LOCK).read_text()
    assert base_run._hold_folders(Namespace(epp_report_dir=None)) != name  # a framework that saves by itself


def test_a_finalisation_of_gradients_that_stands_still_ends_the_run(ours: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = threading.Event(), list[str]()
    ours.watchdog = Watchdog(0.1, lambda message: (said.append(message), ended.set()))  # type: ignore[func-returns-value, arg-type]

    def hang(models: Any, num_tokens: torch.Tensor | None, pg_collection: Any, force_all_reduce: bool) -> None:
        assert num_tokens is None
        assert pg_collection == "groups"
        assert ended.wait(60)

    config = SimpleNamespace(finalize_model_grads_func=hang, calculate_per_token_loss=False)
    monkeypatch.setattr(base_run, "get_model_config", lambda model: config)
    ours.finish_gradients([torch.nn.Module()], torch.ones(()), "groups", False)
    assert said == ["rank 3 waits for gradient finalisation (wait_limit_seconds)"]
    config.finalize_model_grads_func = None
    ours.finish_gradients([torch.nn.Module()], torch.ones(()), None, False)


def test_a_rank_that_fails_tells_why_unless_all_fail_alike(ours: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "PATIENCE_S", 0.0)
    other = FailureBoard(ours.failures._store, 1, 2)
    with pytest.raises(EppError, match="no plan fits"), ours.telling_others(unless=EppError):
        raise EppError("no plan fits")
    assert other.cause() == ""
    with pytest.raises(OSError, match="no such file"), ours.telling_others(unless=EppError):
        raise OSError("no such file")
    assert other.cause() == "rank 1 ends, since rank 0 failed: OSError: no such file"


def test_ranks_are_told_of_a_disagreement_that_only_some_have_seen(ours: Run) -> None:
    with pytest.raises(DisagreementError), ours.telling_others(unless=EppError):
        raise DisagreementError("replicas divide a batch differently")
    assert "replicas divide a batch differently" in FailureBoard(ours.failures._store, 1, 2).cause()


def test_the_last_lines_of_every_run_are_written_before_writers_close(ours: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    written, other = list[str](), object.__new__(Run)
    for number, one in enumerate((ours, other)):
        one.reports = Reports()
        one.reports.begin(lambda number=number: partial(written.append, f"line of {number}"))  # type: ignore[misc]
    monkeypatch.setattr(base_run, "_runs", {ours, other})
    base_run.complete_reports()
    assert sorted(written) == ["line of 0", "line of 1"]


def test_an_error_that_follows_from_anothers_gives_that_one(ours: Run) -> None:
    FailureBoard(ours.failures._store, 1, 2)._store.set("failed", "rank 1 failed: no image")
    with pytest.raises(EppError, match="rank 0 ends, since rank 1 failed: no image"), ours.telling_others():
        raise RuntimeError("connection closed")
