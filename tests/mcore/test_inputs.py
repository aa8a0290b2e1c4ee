"""Samples with pictures, whose rows a function makes, train in slices as whole ones do."""

import pytest

from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.inputs import LENGTHS

TOLERANCE = 1e-5
LAYOUTS = [
    pytest.param(2, {}, id="pipeline"),
    pytest.param(2, {"axes": 3}, id="three axes"),
    pytest.param(4, {"axes": 3, "tensor_parallel": 2, "sequence_parallel": True}, id="tensor and sequence parallel"),
    pytest.param(4, {"replicas": 2}, id="replicas"),
    pytest.param(2, {"frozen": "vision_model"}, id="a frozen tower"),
    pytest.param(2, {"frozen": "language_model"}, id="a frozen language model"),
    pytest.param(2, {"plans": {"recompute": 1}}, id="recompute"),
]


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS)
def test_slices_with_pictures_have_the_gradients_of_whole_samples(num_ranks, layout):
    assert_equal(num_ranks, layout)


@pytest.mark.parametrize(
    ("stages", "num_ranks", "layout"),
    [
        pytest.param(2, 4, {"context_parallel": 2}, id="context parallel"),
        pytest.param(4, 2, {"stages": 4}, id="two stages per rank"),
    ],
)
def test_layouts_that_megatron_cannot_run_here_have_the_gradients_of_whole_samples_in_others(
    tmp_path, stages, num_ranks, layout
):
    of_ranks(job(stages, "inputs:pictures", axes=3, written=tmp_path))
    assert_equal(num_ranks, {"axes": 3, "read": tmp_path, **layout})


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
