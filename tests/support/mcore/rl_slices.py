"""Claims of an update in slices, with verl and with an imitation of its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

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
