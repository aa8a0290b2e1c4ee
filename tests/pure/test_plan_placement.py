"""Stages go to ranks round and round, or there and back."""

from __future__ import annotations

import pytest

from megatron_epp.plan.placement import Placement


@pytest.mark.parametrize(
    ("placement", "ranks"),
    [
        (Placement("looped", 3, 1), (0, 1, 2)),
        (Placement("looped", 3, 2), (0, 1, 2, 0, 1, 2)),
        (Placement("v", 3, 2), (0, 1, 2, 2, 1, 0)),
        (Placement("v", 2, 3), (0, 1, 1, 0, 0, 1)),
    ],
)
def test_every_stage_has_a_rank_and_every_rank_its_stages_in_order(placement: Placement, ranks: tuple[int, ...]) -> None:
    assert placement.rank_of == ranks
    for rank in range(placement.num_ranks):
        stages = placement.stages(rank)
        assert len(stages) == placement.num_chunks
        assert [ranks[stage] for stage in stages] == [rank] * placement.num_chunks
        assert sorted(stages) == list(stages)
    assert placement.last_rank == ranks[-1]


def test_the_ends_meet_where_the_first_rank_has_the_last_stage_too() -> None:
    kinds = [("looped", 2, 2), ("v", 2, 2), ("v", 2, 3), ("v", 4, 4), ("looped", 1, 1)]
    assert [Placement(*kind).ends_share_rank for kind in kinds] == [False, True, False, True, False]
