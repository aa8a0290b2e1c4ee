"""Megatron-Bridge's Qwen2.5-VL and Qwen3-VL, from its wheel, train in slices as their own forwards do with whole samples."""

import pytest

from tests.callers.test_training_steps import if_installed
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.bridge_inputs import LENGTHS

pytestmark = pytest.mark.callers
TOLERANCE = 1e-5


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
