"""Samples with a long response train in slices under a cap, as in a framework's microbatches."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.mcore.forked import job, of_ranks

TOLERANCE = 1e-5


def assert_equal_training_within_the_cap(ranks: Sequence[dict[str, Any]], said: str) -> None:
    """Assert equal updates, the cap that only slices and full recompute keep to, and that the framework refuses the longest
    sample with half the token budget.
    """
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["gradients"] < TOLERANCE
        whole, in_slices = rank["losses"]
        assert in_slices == pytest.approx(whole, rel=TOLERANCE)
        every, fewer, none = rank["held_bytes"].values()
        assert rank["sliced_bytes"] <= rank["cap_bytes"]
        assert every <= rank["cap_bytes"] < fewer < none
        assert said in rank["refusal"]


def test_an_update_in_slices_equals_one_of_whole_microbatches_and_keeps_to_a_cap_that_they_exceed() -> None:
    ranks = of_ranks(job(2, "rl_slices:updated", has_verl=False))
    assert_equal_training_within_the_cap(ranks, "a sample has 512 tokens, a microbatch at most 256")
