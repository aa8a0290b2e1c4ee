"""Lengths of verl's microbatches are those of its padded sequences."""

from __future__ import annotations

import pytest
import torch

from megatron_epp.callers import verl
from megatron_epp.mcore.iteration import wrap


@pytest.mark.parametrize(
    ("ranks", "padded"),
    [((1, 1), [5, 8, 1]), ((4, 1), [8, 8, 4]), ((1, 2), [8, 8, 4]), ((2, 2), [8, 8, 8]), ((1, 4), [8, 8, 8])],
)
def test_every_sequence_is_padded_to_a_multiple_of_the_ranks_that_share_it(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int], padded: list[int]
) -> None:
    monkeypatch.setattr(wrap, "sharing_ranks", lambda: ranks)
    tokens = torch.nested.nested_tensor([torch.zeros(5), torch.zeros(8), torch.zeros(1)], layout=torch.jagged)
    assert verl.padded_lengths({"input_ids": tokens}) == padded
