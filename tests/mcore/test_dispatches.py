"""A layer with experts holds copies of its tokens while these are with their experts, as many as plans count."""

from __future__ import annotations

import pytest

from tests.mcore.test_activations import EXPERTS, GROUPED, LLAMA, SIZES, small
from tests.support.mcore.forked import job, of_ranks

FLAGS = [*small(SIZES | LLAMA | GROUPED | EXPERTS), "--hidden-size", "512", "--moe-router-topk", "8"]
SHARED = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
CASES = {
    "two ranks have experts": ({"expert_model_parallel_size": 2}, FLAGS),
    "one rank has them": ({"expert_model_parallel_size": 1}, FLAGS),
    "two ranks share each": (SHARED, [*FLAGS, "--sequence-parallel"]),
    "and add up in fp32": (SHARED, [*FLAGS, "--sequence-parallel", "--moe-router-dtype", "fp32"]),
}
TOLERANCE = 0.05
"""Share of the layer's output, which is there before the copies are gone."""


@pytest.fixture(scope="module")
def figures() -> dict[str, tuple[float, float]]:
    planned_and_measured, _ = of_ranks(job(2, "dispatches", cases=list(CASES.values())))
    return dict(zip(CASES, planned_and_measured, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_forward_holds_the_copies_that_plans_count(figures: dict[str, tuple[float, float]], name: str) -> None:
    planned, measured = figures[name]
    print(f"\n{name}: {measured:.0f} bytes per token besides what is kept, {planned:.0f} planned")
    assert measured == pytest.approx(planned, rel=TOLERANCE)
