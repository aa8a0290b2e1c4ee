"""A rank that becomes slow after costs were learnt is named once, with its host, stage and what it costs, in both loops."""

import logging
import re
import shlex
import socket
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_epp.features.slow_stages import stage_watch
from megatron_epp.features.slow_stages.stage_watch import ITERATIONS, SLOWER, StageWatch
from megatron_epp.plan import Action, Plan
from tests.support.mcore.forked import CHANGED, job, launch
from tests.support.mcore.launch import PLANNED
from tests.support.mcore.synthetic_documents import documents_of, long_tailed_lengths, write_pair
from tests.support.plan.small_plans import one_f_one_b

NAMED = re.compile(
    r"rank 1 on (\S+) takes ([\d.]+) of the time of its costs for stage 1 "
    r"\(([\d.]+) ms an iteration by the plan, ([\d.]+) ms without\)"
)


def check_named(output: str) -> None:
    (named,) = NAMED.findall(output)
    host, ratio, slow_ms, quick_ms = named
    assert host == socket.gethostname()
    assert float(ratio) > SLOWER
    assert float(slow_ms) > float(quick_ms)
    assert re.search(rf"WARNING:.*slower than costs for {ITERATIONS} iterations: ", output)


@pytest.mark.slow  # the other loop with the same watch
def test_a_slow_rank_of_a_frameworks_own_loop_is_named() -> None:
    finished = job(2, "frameworks:slow")
    assert finished.returncode == 0, finished.output[-5000:]
    check_named(finished.output)


def test_a_slow_rank_of_a_training_on_documents_is_named(tmp_path: Path) -> None:
    data = write_pair(tmp_path / "documents", documents_of(long_tailed_lengths(200, 64), vocab_size=127))
    flags = shlex.split(
        "--pipeline-model-parallel-size 2 --global-batch-size 4 --seq-length 64 --max-position-embeddings 64 "
        f"--epp-costs learn --epp-lookahead 1 --train-iters {6 + 2 * ITERATIONS}"
    )
    finished = launch(2, CHANGED, "slow", *PLANNED, *flags, "--data-path", data)
    assert finished.returncode == 0, finished.output[-5000:]
    check_named(finished.output)


PLAN = one_f_one_b()


class Times:
    """Recorder of a rank's iteration that took `factor` of its planned time."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def took_us(self) -> Iterator[tuple[Action, float]]:
        yield from ((step.action, self.factor * step.time_us) for step in PLAN.ranks[0])


class FirstOfTwo:
    """Group whose other rank is never slow; `found` are the items of this one that the other has received."""

    is_first = True

    def __init__(self) -> None:
        self.found: list[object] = []

    def from_each(self, mine: object) -> list[object]:
        self.found.append(mine)
        return [mine, (1, "b", {})]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FirstOfTwo:
    monkeypatch.setattr(stage_watch, "dist", Namespace(get_rank=lambda: 0))
    return FirstOfTwo()


def run(group: FirstOfTwo, factors: list[float], plan: Plan = PLAN) -> None:
    watch = StageWatch(0, group)  # type: ignore[arg-type]
    for factor in factors:
        watch.after(plan, Times(factor), dict)  # type: ignore[arg-type]
    watch.complete()


def test_ranks_meet_once_in_some_iterations(group: FirstOfTwo) -> None:
    run(group, [2.0] * (3 * ITERATIONS - 1))
    assert len(group.found) == 2


def test_a_stage_is_named_again_only_after_it_was_quick(group: FirstOfTwo, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    slow, quick = [2.0] * ITERATIONS, [1.0] * ITERATIONS
    run(group, [*slow * 4, *quick * 2, *slow * 2])
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2
    assert all("takes 2.00 of the time of its costs for stage 0" in line for line in named)
