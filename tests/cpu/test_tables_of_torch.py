"""Tables that torch.distributed.pipelining makes are sound, under CUDA's queues too, and one with a fault is not."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from megatron_epp.plan import check, lower
from megatron_epp.plan.check.launches import blocked
from megatron_epp.plan.foreign.pipelining import from_pipelining

RANKS, MICROBATCHES = 4, 8


def table_of(name: str) -> str:
    """Return the table of a schedule with two stages per rank, made without stages and process groups."""
    made: Any = object.__new__(getattr(schedules, name))
    made.n_local_stages = made._n_local_stages = 2
    made.pp_group_size, made._num_stages = RANKS, 2 * RANKS
    made._n_microbatches, made.stage_index_to_group_rank = MICROBATCHES, {}
    made.number_of_rounds = MICROBATCHES // RANKS
    made.microbatches_per_round = MICROBATCHES // made.number_of_rounds
    text = io.StringIO()
    csv.writer(text).writerows(made._calculate_single_rank_operations(rank) for rank in range(RANKS))
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "kept"), [("ScheduleInterleaved1F1B", 11), ("ScheduleInterleavedZeroBubble", 8), ("ScheduleDualPipeV", 9)]
)
def test_torchs_own_tables_are_sound(name: str, kept: int) -> None:
    made = from_pipelining(table_of(name))
    assert check(made) == []
    assert blocked([lower(made)]) == []
    assert len(made.chunks) == MICROBATCHES
    assert max(made.predicted.peak_bytes) == kept


def test_a_backward_of_a_microbatch_that_is_never_forwarded_is_found() -> None:
    text = table_of("ScheduleInterleaved1F1B").replace("4B3", "4B8")
    assert any("never runs" in str(fault) for fault in check(from_pipelining(text)))
