"""Ranks that would wait for one that failed learn why, and end."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from megatron_epp.runtime import failures
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.watchdog import Watchdog


@pytest.fixture
def boards() -> list[FailureBoard]:
    store = HashStore()
    return [FailureBoard(store, rank, 3) for rank in range(3)]


def test_the_first_failure_is_told_to_all_others_and_to_them_alone(
    boards: list[FailureBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "PATIENCE_S", 0.0)
    assert [board.cause() for board in boards] == ["", "", ""]
    boards[1].tell("no image")
    boards[2].tell("connection closed")  # which follows from the first
    told = [board.cause() for board in boards]
    assert told == ["rank 0 ends, since rank 1 failed: no image", "", "rank 2 ends, since rank 1 failed: no image"]


def test_a_rank_that_fails_waits_until_all_others_have_logged_why(boards: list[FailureBoard]) -> None:
    telling = threading.Thread(target=boards[0].tell, args=("no image",))
    telling.start()
    while not boards[1].cause():
        pass
    for _ in range(2):  # of one rank once counts
        boards[1].acknowledge()
    assert telling.is_alive()  # the third has not logged it
    boards[2].acknowledge()
    telling.join(failures.PATIENCE_S)
    assert not telling.is_alive()


def test_a_job_of_one_rank_or_without_a_store_tells_nobody() -> None:
    for board in (FailureBoard(HashStore(), 0, 1), FailureBoard(None, 0, 2)):
        board.tell("no image")
        assert board.cause() == ""


def test_a_watchdog_ends_its_process_once_another_rank_has_failed(boards: list[FailureBoard]) -> None:
    ended, said = threading.Event(), []

    def end(text: str) -> None:
        said.append(text)
        ended.set()

    with Watchdog(0.1, end, boards[2]).watch(lambda: "waiting", progress=lambda: None):
        boards[0]._store.compare_set("failed", "", "rank 0 failed: no image")
        assert ended.wait(10)
    assert said == ["rank 2 ends, since rank 0 failed: no image"]


def test_a_large_job_asks_its_store_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    board, now_s, asked = FailureBoard(HashStore(), 0, 10_000), [100.0], []
    monkeypatch.setattr(board, "cause", lambda: asked.append(now_s[0]) or "")
    monkeypatch.setattr(failures.time, "monotonic", lambda: now_s[0])
    for _ in range(20):
        board.poll()
        now_s[0] += 1.0
    assert asked == [100.0, 105.0, 110.0, 115.0]
