"""Samples with pictures, whose rows a function makes, train in slices as whole ones do."""

import pytest

from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.inputs import LENGTHS

TOLERANCE = 1e-5
LAYOUTS = [
    pytest.param(2, {}, id="pipeline"),
    pytest.param(2, {"axes": 3}, id="three axes"),
]


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_slices_with_pictures_have_the_gradients_of_whole_samples(num_ranks, layout):
    assert_equal(num_ranks, layout)


def assert_equal(num_ranks, layout):
    ranks = of_ranks(job(num_ranks, "inputs:pictures", **layout))
    assert len(ranks) == num_ranks
    for rank in ranks:
        assert rank["worst"] <= TOLERANCE
        assert rank["weights"] <= TOLERANCE
        assert rank["chunks"] > len(LENGTHS) // layout.get("replicas", 1)
    expected = {rank["replica"]: rank["expected"] for rank in ranks if any(rank["expected"])}
    assert ranks[0]["losses"] == pytest.approx([sum(losses) for losses in zip(*expected.values(), strict=True)], rel=TOLERANCE)
    assert (sum(rank["trained encoder"] for rank in ranks) > 0) == (layout.get("frozen") != "vision_model")
