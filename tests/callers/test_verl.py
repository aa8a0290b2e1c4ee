"""verl's own engine, from its wheel, trains by plans as by Megatron's own schedule, switched on by one environment variable."""

import json
import sys
from pathlib import Path

import pytest

from tests.callers.test_training_steps import LAYOUTS, if_installed
from tests.mcore.test_samples import TOLERANCE
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.verl_engine import SAMPLES
from tests.support.mcore.launch import REPOSITORY, run

pytestmark = [pytest.mark.callers, if_installed("verl")]


def test_groups_of_responses_share_their_prompts_with_all_microbatches_of_verls_engine() -> None:
    finished = job(2, "verl_engine:trained", env={"MEGATRON_EPP": "1"}, stages=2, group=4)
    ranks = of_ranks(finished)
    assert finished.output.count("tokens shared") >= 3
    for rank in ranks:
        for batch in rank["batches"]:
            assert max(batch["gradients"], batch["logprobs"], batch["old"]) < TOLERANCE
            planned, stock = batch["losses"]
            assert planned == pytest.approx(stock, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize(("processes", "expert_parallel"), LAYOUTS)
def test_verls_training_step_has_the_gradients_losses_and_log_probabilities_of_megatrons_schedule(
    processes: int, expert_parallel: int
) -> None:
    finished = job(processes, "verl_engine:trained", env={"MEGATRON_EPP": "1"}, stages=2, expert_parallel=expert_parallel)
    ranks = of_ranks(finished)
    assert len(ranks) == processes
    assert all(rank["installed"] for rank in ranks)
    batches = [batch for rank in ranks for batch in rank["batches"]]
    assert [batch for batch in batches if batch["gradients"] > TOLERANCE] == []
    assert max(max(batch["logprobs"], batch["old"]) for batch in batches) < TOLERANCE
    assert {batch["samples"] for batch in batches} == {0, SAMPLES}  # of the first stages and the last
    for planned, stock in (batch["losses"] for batch in batches):
        assert planned == pytest.approx(stock, rel=TOLERANCE, abs=TOLERANCE)
    assert any(batch["losses"][0] for batch in batches)
    for batch in batches:
        for planned, stock in (batch["order"], batch["forward order"]):
            assert sorted(planned) == sorted(stock)
    assert any(planned != stock for planned, stock in (batch["order"] for batch in batches))
    assert " ms, bubble " in finished.output


def test_verls_update_with_a_sample_above_its_token_budget_is_trained_in_slices_under_its_memory_with_full_recompute() -> None:
    ranks = of_ranks(job(2, "rl_slices:updated"))
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["gradients"] < TOLERANCE
        whole, in_slices = rank["losses"]
        assert in_slices == pytest.approx(whole, rel=TOLERANCE)
        every, fewer, none = rank["held_bytes"].values()
        assert rank["sliced_bytes"] <= rank["cap_bytes"]
        assert every <= rank["cap_bytes"] < fewer < none
        assert "max_token_len" in rank["refusal"]


def test_steps_of_grpo_have_equal_rewards_losses_and_weights_by_plans(tmp_path: Path) -> None:
    demo = [sys.executable, "-W", "ignore", "-m", "scripts.demo_rl", "--reduced", "-o", tmp_path]
    finished = run(demo, {"PYTHONPATH": f"{REPOSITORY}"}, timeout_s=300)
    assert finished.returncode == 0, finished.output[-5000:]
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["plans"] > 0
    assert max(row["largest_relative_differences"].values()) < TOLERANCE
