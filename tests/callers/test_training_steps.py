"""The training steps of ms-swift and of Megatron-Bridge, from their wheels, train by plans as by Megatron's own schedule."""

import re

import pytest

from scripts.demo_rl.engine import command, is_installed
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.bridge_inputs import LENGTHS
from tests.support.mcore.jobs.training_steps import BATCHES, MICROBATCHES

pytestmark = pytest.mark.callers
TOLERANCE = 1e-5
LEARNING = 4
"""First batches of a training, which run in the caller's order."""
UNDER_A_CAP = "memory_cap_gb=0.0015"
"""Settings of plans with which layers recompute."""
LAYOUTS = [pytest.param(2, 1, id="PP 2"), pytest.param(4, 1, id="PP 2 x DP 2"), pytest.param(4, 2, id="PP 2 x EP 2")]


def if_installed(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not is_installed(framework), reason=f"{framework} is not there: `{command(framework)}` installs it"
    )


@pytest.mark.parametrize("framework", [pytest.param(name, marks=if_installed(name)) for name in ("swift", "bridge")])
@pytest.mark.parametrize(("processes", "expert_parallel"), LAYOUTS)
def test_a_training_step_has_the_gradients_and_losses_of_megatrons_schedule(
    framework: str, processes: int, expert_parallel: int
) -> None:
    assert_equal_training(framework, processes, expert_parallel=expert_parallel)


@pytest.mark.parametrize("framework", [pytest.param(name, marks=if_installed(name)) for name in ("swift", "bridge")])
@pytest.mark.parametrize(("processes", "settings"), [(2, UNDER_A_CAP), (4, "1")], ids=["PP 2, capped", "PP 2 x DP 2"])
def test_adapters_as_the_framework_adds_them_have_the_gradients_of_megatrons_schedule(
    framework: str, processes: int, settings: str
) -> None:
    output = assert_equal_training(framework, processes, settings, has_adapters=True)
    assert (settings != "1") == any(float(share) > 0 for share in re.findall(r"([\d.]+)% of layers recompute", output))


@if_installed("swift")
def test_sequences_of_swifts_microbatches_share_the_prompts_of_their_groups() -> None:
    output = assert_equal_training("swift", 2, group=8)
    assert output.count("tokens shared") >= BATCHES - LEARNING - 1  # the last line may not be written yet


@if_installed("swift")
@pytest.mark.parametrize("processes", [pytest.param(2, id="PP 2"), pytest.param(4, id="PP 2 x DP 2")])
def test_a_step_of_swifts_dpo_sends_hidden_states_of_two_models_by_plans_and_has_the_same_gradients_and_losses(
    processes: int,
) -> None:
    assert_equal_training("swift", processes, has_preferences=True)


def assert_equal_training(framework: str, processes: int, settings: str = "1", **given: object) -> str:
    """Check on all ranks that batches have equal gradients and losses, in other orders of microbatches once costs are learnt.

    Args:
        framework: a job of `training_steps`.

    Returns:
        what the ranks wrote.
    """
    finished = job(processes, f"training_steps:{framework}", env={"MEGATRON_EPP": settings}, stages=2, **given)
    ranks = of_ranks(finished)
    assert len(ranks) == processes
    assert all(rank["installed"] for rank in ranks)
    assert " ms, bubble " in finished.output
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
    return finished.output


@if_installed("bridge")
@pytest.mark.parametrize("model", ["pictures", "deepstack"], ids=["Qwen2.5-VL", "Qwen3-VL"])
def test_slices_have_the_gradients_and_weights_of_the_class_with_its_own_merge_of_embeddings(model):
    ranks = of_ranks(job(2, f"bridge_inputs:{model}"))
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["worst"] <= TOLERANCE
        assert rank["weights"] <= TOLERANCE
        assert rank["chunks"] > len(LENGTHS)
    assert ranks[0]["losses"] == pytest.approx(next(rank["expected"] for rank in ranks if any(rank["expected"])), rel=TOLERANCE)
    assert sum(rank["trained encoder"] for rank in ranks) > 0
