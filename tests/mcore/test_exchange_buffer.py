"""Buffers of DeepEP and HybridEP are there before an iteration, and as large as any rank needs."""

import pytest

from tests.support.mcore import worker

SIZES = [(9, 30), (31, 2), (5, 33), (7, 7), (7, 7), (7, 7)]
"""Tokens of two ranks in the largest chunks of their plans, by iteration."""
TOKEN_BYTES = 2 * 16 * 4
SPARE = [(0, 0), (0, 0), (0, 0), (28 * TOKEN_BYTES, 1 << 60), (1 << 60, 28 * TOKEN_BYTES - 1), (0, 0)]
"""Bytes that their plans leave of their caps."""


@pytest.fixture(scope="module")
def ranks():
    return worker.call(2, "tests.support.mcore.jobs.exchanges:buffers", sizes=SIZES, spare=SPARE)


def test_deepeps_buffer_is_there_ahead_of_the_first_exchange_which_takes_it(ranks):
    for of_rank in ranks:
        assert of_rank["deepep"] == {"num_bytes": TOKEN_BYTES, "is taken": True, "reserves": False}


def test_hybrideps_buffer_changes_between_iterations_to_what_any_rank_needs_and_stays_where_all_have_room(ranks):
    """In steps of 4 tokens, as the stand-in's exchanges have them."""
    for of_rank in ranks:
        assert of_rank["hybridep"] == {"sizes": [32, 32, 36, 36, 8, 8], "num buffers": 3, "allocates": False}


def test_other_dispatchers_have_none(ranks):
    for of_rank in ranks:
        assert not of_rank["alltoall"]
