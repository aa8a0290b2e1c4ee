"""Samples with a long response train in slices under a cap, as in a framework's microbatches."""

from __future__ import annotations

from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.rl_slices import assert_equal_training_within_the_cap


def test_an_update_in_slices_equals_one_of_whole_microbatches_and_keeps_to_a_cap_that_they_exceed() -> None:
    ranks = of_ranks(job(2, "rl_slices:updated", has_verl=False))
    assert_equal_training_within_the_cap(ranks, "a sample has 512 tokens, a microbatch at most 256")
