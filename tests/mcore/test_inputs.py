"""Samples with pictures, whose rows a function makes, train in slices as whole ones do."""

import pytest

from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.inputs import LENGTHS

TOLERANCE = 1e-5
LAYOUTS = {
    "tensor and sequence parallel": (4, {"axes": 3, "tensor_parallel": 2, "sequence_parallel": True, "feature_layers": 1}),
    "a frozen tower": (2, {"frozen": "vision_model"}),
    "a frozen language model": (2, {"frozen": "language_model", "plans": {"recompute": 1}, "feature_layers": 2}),
}


@pytest.mark.parametrize(("num_ranks", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_slices_with_pictures_have_the_gradients_of_whole_samples(num_ranks, layout):
    assert_equal(num_ranks, layout)


@pytest.fixture(scope="module")
def of_two_stages(tmp_path_factory):
    """A folder with the gradients of whole samples on two stages, with positions of three axes."""
    folder = tmp_path_factory.mktemp("stages")
    assert_equal(2, {"axes": 3, "written": folder})
    return folder


@pytest.mark.parametrize("layout", [{"context_parallel": 2}, {"replicas": 2, "overlaps": True}], ids=str)
def test_layouts_that_megatron_cannot_run_here_have_the_gradients_of_whole_samples_in_others(of_two_stages, layout):
    """Its schedule would wait for early gradients of the tower, which a replica's last microbatch does not have."""
    assert_equal(4, {"axes": 3, "read": of_two_stages, **layout})


@pytest.mark.slow
def test_several_stages_on_a_rank_have_the_gradients_of_whole_samples_on_as_many_ranks(tmp_path):
    assert_equal(4, {"axes": 3, "written": tmp_path})
    assert_equal(2, {"axes": 3, "read": tmp_path, "stages": 4})


def test_ranks_that_share_tokens_have_one_dropout_of_the_rows_that_a_function_takes():
    for rank in of_ranks(job(2, "inputs:dropout")):
        assert rank["equal"]
        assert 0.3 < rank["dropped"] < 0.7


TOLD = {
    "no function": "sample 0 has 3 spans, and no function makes their rows: pass inputs=",
    "columns without a function": "input_columns volume are for a function of inputs, and there is none: pass inputs=",
    "features without a function": "feature_layers 0, 1 are for a function of inputs, and there is none: pass inputs=",
    "no column": "sample 0 has no volume, which the inputs read; it has tokens, trained, spans",
    "a span beyond the end": "sample 0: span 0 has tokens 40 to 45, and the sample has inputs 0 to 44",
    "forced": "tokens 3 to 15 of sample 0 cannot be cut at a multiple of 1 outside of its 1 spans there, the first",
    "another planner": "by planner 'seq1f1b' sequence ",
    "rows of another shape": "16] of a chunk; the model takes [",
    "positions": "sample 0 has positions, which a model with position_embedding_type='mrope' alone reads",
    "features behind the first stage": "layer 4, counted from 0, and the first stage has 4 layers: give it more",
    "no features": "inputs must return rows and 1 features, one for each of feature_layers",
    "right": "trains",
}


def test_what_cannot_be_honoured_is_told_before_anything_starts():
    (said,) = of_ranks(job(1, "inputs:refusals"))
    assert said.keys() == TOLD.keys()
    assert {name: text for name, text in said.items() if TOLD[name] not in text} == {}


def assert_equal(num_ranks, layout):
    ranks = of_ranks(job(num_ranks, "inputs:pictures", **layout))
    assert len(ranks) == num_ranks
    for rank in ranks:
        assert rank["worst"] <= TOLERANCE
        assert rank["weights"] <= TOLERANCE
        assert rank["chunks"] > len(LENGTHS) // layout.get("replicas", 1)
    expected = {rank["replica"] * ("read" not in layout): rank["expected"] for rank in ranks if any(rank["expected"])}
    assert ranks[0]["evaluated"] == pytest.approx(ranks[0]["losses"][0], rel=TOLERANCE)
    assert ranks[0]["losses"] == pytest.approx([sum(losses) for losses in zip(*expected.values(), strict=True)], rel=TOLERANCE)
    assert (sum(rank["trained encoder"] for rank in ranks) > 0) == (layout.get("frozen") != "vision_model")
