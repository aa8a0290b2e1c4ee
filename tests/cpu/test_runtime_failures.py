"""No rank is left hanging: what fails or hangs on one ends all, and says where."""

import threading
from queue import Queue

import pytest
from torch.distributed import HashStore

from megatron_epp.plan.grid import to_grid
from megatron_epp.runtime import failures
from megatron_epp.runtime.failures import FailureBoard
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.watchdog import EXIT_CODE, Watchdog
from tests.support.runtime.plain_stage import PlainStage, stages_of
from tests.support.runtime.rank_processes import run_until_exit
from tests.support.runtime.runtime_plans import SLICED_THEN_WHOLE, by_hand, planned, two_ranks


class FaultyStage(PlainStage):
    """Fails or hangs in one action, given as ``F1`` or ``B0``."""

    def __init__(self, part, batch, action, fault):
        super().__init__(part, batch)
        self.action, self.fault = action, fault

    def forward(self, context, hidden):
        self._maybe(f"F{context.chunk}")
        return super().forward(context, hidden)

    def backward(self, context, output, grad):
        self._maybe(f"B{context.chunk}")
        super().backward(context, output, grad)

    def _maybe(self, action):
        if action == self.action:
            self.fault()


def fail():
    raise ArithmeticError("the loss is not a number")


def hang():
    threading.Event().wait()


def run_with_fault(rank, links, plan, faulty_rank, action, fault, limit_s=None):
    """Run a plan with one stage per rank; the fault is in `action` of `faulty_rank`, which nothing watches."""
    stages = stages_of(plan, rank, FaultyStage, action=action if rank == faulty_rank else None, fault=fault)
    watchdog = Watchdog(limit_s) if limit_s is not None and rank != faulty_rank else None
    executor_of(plan, rank, stages, links, watchdog=watchdog).run()


LIMIT_S = 4


@pytest.mark.parametrize(("ranks", "faulty_rank", "action"), [(2, 0, "F1"), (2, 1, "B1"), (4, 3, "F0")])
def test_an_error_on_one_rank_ends_all_with_the_action_the_rank_and_the_grid(tmp_path, ranks, faulty_rank, action):
    plan = two_ranks() if ranks == 2 else planned((41, 22, 3, 1, 6), (1,) * ranks, slices=3)
    ended = run_until_exit(ranks, tmp_path, run_with_fault, plan, faulty_rank, action, fail)
    failed = ended[faulty_rank].stderr
    assert f"action {faulty_rank}{action} failed: ArithmeticError: the loss is not a number\n{to_grid(plan)}" in failed
    for rank, end in enumerate(ended):
        assert end.exit_code == 1
        assert f"RunError: pipeline rank {rank}, step" in end.stderr
        assert to_grid(plan) in end.stderr
        assert rank == faulty_rank or "failed: RuntimeError" in end.stderr  # the connection closed, wherever it had got to


def test_a_rank_that_has_all_it_needs_is_not_disturbed_by_another_ranks_error(tmp_path):
    assert [rank.exit_code for rank in run_until_exit(2, tmp_path, run_with_fault, two_ranks(), 0, "B2", fail)] == [1, 0]


def test_a_rank_that_waits_too_long_says_for_what_and_ends(tmp_path):
    plan = two_ranks()
    waits, hangs = run_until_exit(2, tmp_path, run_with_fault, plan, 1, "B1", hang, LIMIT_S, wait_for=[0])
    assert (waits.exit_code, hangs.exit_code) == (EXIT_CODE, None)
    assert "pipeline rank 0, step" in waits.stderr
    assert "action 0B1 has not finished after 4 s (wait_limit_seconds), waiting for 1B1 of rank 1" in waits.stderr
    assert to_grid(plan) in waits.stderr
    assert "executor.py" in waits.stderr  # where the threads stand


def test_a_rank_whose_messages_nobody_takes_says_so_and_ends(tmp_path):
    plan = by_hand(["0F0 0F1 0F2", "1F0 1F1 1F2"], SLICED_THEN_WHOLE, forward_only=True)
    ended = run_until_exit(2, tmp_path, run_with_fault, plan, 1, "F0", hang, LIMIT_S, wait_for=[0])
    assert ended[0].exit_code == EXIT_CODE
    assert "pipeline rank 0, step 6, the end of the plan has not finished after 4 s" in ended[0].stderr
    assert "waiting for other ranks to take its messages" in ended[0].stderr


@pytest.fixture
def boards() -> list[FailureBoard]:
    store = HashStore()
    return [FailureBoard(store, rank, 3) for rank in range(3)]


def test_the_first_failure_is_told_to_all_others_and_to_them_alone(boards: list[FailureBoard], monkeypatch) -> None:
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
    said = Queue[str]()
    with Watchdog(0.1, said.put, boards[2]).watch(lambda: "waiting", progress=lambda: None):
        boards[0]._store.compare_set("failed", "", "rank 0 failed: no image")
        assert said.get(timeout=10) == "rank 2 ends, since rank 0 failed: no image"
    assert said.empty()


def test_a_large_job_asks_its_store_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    board, now_s, asked = FailureBoard(HashStore(), 0, 10_000), [100.0], []
    monkeypatch.setattr(board, "cause", lambda: asked.append(now_s[0]) or "")
    monkeypatch.setattr(failures.time, "monotonic", lambda: now_s[0])
    for _ in range(20):
        board.poll()
        now_s[0] += 1.0
    assert asked == [100.0, 105.0, 110.0, 115.0]
