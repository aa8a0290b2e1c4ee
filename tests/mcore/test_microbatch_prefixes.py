"""A program's own packed microbatches share what their sequences begin with: gradients and results are those of stock."""

from typing import Any

import pytest

from tests.support.mcore.forked import job, of_ranks, succeeded

TOLERANCE = 1e-5
OWN_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CAP = {"memory_cap_gb": 0.0011}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"stages": 1}),
    "under a cap": (2, {"stages": 2, "settings": CAP}),
    "copies to the host": (2, {"stages": 2, "settings": CAP | {"offload": "on"}, "host_link": [1.0, 1e-6]}),
    "recompute of the model's own": (2, {"stages": 2, **OWN_RECOMPUTE}),
    "stages per rank": (2, {"stages": 4}),
    "pipeline of tensor-parallel ranks": (4, {"stages": 2, "tensor_parallel": 2, "sequence_parallel": True, "groups": 3}),
    "losses of responses": (2, {"stages": 2, "size": 8, "of_responses": True}),
    "losses of responses, tensor parallel": (
        2,
        {"stages": 1, "tensor_parallel": 2, "sequence_parallel": True, "of_responses": True},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prefix_runs_once_for_all_microbatches_and_gradients_and_losses_stay(layout: str) -> None:
    processes, given = LAYOUTS[layout]
    finished = job(processes, "prefixed:compared", **given)
    ranks = of_ranks(finished)
    assert len(ranks) == processes
    assert "tokens shared" in finished.output
    for rank in ranks:
        runs = [run["results"] for run in rank["runs"]]
        for results, expected in [(own, rank["stock"]) for own in runs] + [rank["evaluated"]]:
            assert [result["tokens"] for result in results] == [result["tokens"] for result in expected]
            losses = [[result["loss"] for result in each] for each in (results, expected)]
            assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=TOLERANCE)
        assert max(run["worst"] for run in rank["runs"]) < TOLERANCE
        if "recompute_granularity" not in given:  # of which a backward's peak is not counted on a CPU
            assert rank["runs"][-1]["peak_bytes"] <= rank["planned_bytes"]
    assert any(rank["stock"] for rank in ranks)


SEPARATE = {
    "switched off": ({"settings": {"share_prefixes": "off"}}, ""),
    "nothing in common": ({"size": 1}, ""),
    "experts": ({"num_experts": 2, "add_bias_linear": False}, ""),
    "positions of its own": ({"change": "positions"}, "its microbatches have positions of their own"),
    "two calls": ({"change": "two calls"}, "its forward step calls the model 2 times"),
    "rows": ({"change": "other ends"}, "its microbatches are packed with ends"),
}


@pytest.mark.parametrize("case", SEPARATE)
def test_microbatches_that_cannot_share_run_by_themselves_and_the_log_says_why(case: str) -> None:
    given, why = SEPARATE[case]
    finished = succeeded(job(1, "prefixed:compared", stages=1, **given))
    assert "tokens shared" not in finished.output
    assert ("though some may begin alike: " in finished.output) == bool(why)
    assert why in finished.output
    assert max(run["worst"] for rank in finished.figures for run in rank["runs"]) < TOLERANCE


def test_a_model_that_cannot_share_refuses_a_program_that_asks_for_it() -> None:
    given = {"num_experts": 2, "add_bias_linear": False, "settings": {"share_prefixes": "on"}}
    finished = job(1, "prefixed:compared", stages=1, **given)
    assert finished.returncode == 1
    assert "share_prefixes does not go with experts" in finished.output


def test_slimes_microbatches_share_prompts_by_its_hook_alone() -> None:
    finished = job(2, "prefixed:by_slimes_plugin", env={"MEGATRON_EPP": "1"})
    for rank in of_ranks(finished):
        assert max(rank["worst"]) < TOLERANCE
        for results in rank["results"]:
            losses = [[result["loss"] for result in each] for each in (results, rank["stock"])]
            assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE, abs=TOLERANCE)
    assert "tokens shared" in finished.output
