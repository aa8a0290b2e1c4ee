"""The training steps of ms-swift and of Megatron-Bridge, from their wheels, train by plans as by Megatron's own schedule.

Plans are switched on by one environment variable and the plugin, as the frameworks import it.
"""

from __future__ import annotations

import pytest

from scripts.bench.rl.engine import command, is_installed
from tests.support.mcore.demo_rl import TOLERANCE
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.training_steps import BATCHES, MICROBATCHES

pytestmark = pytest.mark.callers
LEARNING = 4
"""First batches of a training, which run in the caller's order."""


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason=f"not installed: `{command(name)}` does"))
        for name in ("swift", "bridge")
    ],
)
@pytest.mark.parametrize(
    ("processes", "expert_parallel"),
    [pytest.param(2, 1, id="PP 2"), pytest.param(4, 1, id="PP 2 x DP 2"), pytest.param(4, 2, id="PP 2 x EP 2")],
)
def test_a_training_step_has_the_gradients_and_losses_of_megatrons_schedule(
    framework: str, processes: int, expert_parallel: int
) -> None:
    finished = job(
        processes, f"training_steps:{framework}", env={"MEGATRON_EPP": "1"}, stages=2, expert_parallel=expert_parallel
    )
    ranks = of_ranks(finished)
    assert len(ranks) == processes
    assert all(rank["installed"] for rank in ranks)
    assert finished.output.count("planned ") >= BATCHES - LEARNING
    for rank in ranks:
        assert len(rank["batches"]) == BATCHES
        assert [batch for batch in rank["batches"] if batch["gradients"] > TOLERANCE] == []
        for batch in rank["batches"]:
            planned, stock = batch["losses"]
            assert bool(planned) == rank["reports"]
            assert planned == pytest.approx(stock, rel=TOLERANCE)
            planned, stock = batch["order"]
            assert len(planned) == MICROBATCHES
            assert sorted(planned) == sorted(stock)
        orders = [batch["order"] for batch in rank["batches"]]
        assert all(planned == stock for planned, stock in orders[:LEARNING])
        assert any(planned != stock for planned, stock in orders[LEARNING:])
