"""Tables that torch.distributed.pipelining makes are sound, under CUDA's queues too, and one with a fault is not."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from megatron_epp.contrib.foreign.pipelining import from_pipelining, launches_of
from megatron_epp.plan import check, lower
from megatron_epp.plan.check.deadlock import blocked

RANKS, MICROBATCHES = 4, 8


def rows_of(name: str) -> dict[int, list[Any]]:
    """Return torch's actions of every rank of a schedule with two stages per rank, made without stages and process groups."""
    made: Any = object.__new__(getattr(schedules, name))
    made.n_local_stages = made._n_local_stages = 2
    made.pp_group_size, made._num_stages = RANKS, 2 * RANKS
    made._n_microbatches, made.stage_index_to_group_rank = MICROBATCHES, {}
    made.number_of_rounds = MICROBATCHES // RANKS
    made.microbatches_per_round = MICROBATCHES // made.number_of_rounds
    return {rank: made._calculate_single_rank_operations(rank) for rank in range(RANKS)}


def table_of(rows: dict[int, list[Any]]) -> str:
    """Return rows as torch writes them."""
    text = io.StringIO()
    csv.writer(text).writerows(rows.values())
    return text.getvalue()


@pytest.mark.parametrize(
    ("name", "kept"), [("ScheduleInterleaved1F1B", 11), ("ScheduleInterleavedZeroBubble", 8), ("ScheduleDualPipeV", 9)]
)
def test_torchs_own_tables_are_sound(name: str, kept: int) -> None:
    made = from_pipelining(table_of(rows_of(name)))
    assert check(made) == []
    assert blocked([lower(made)]) == []
    assert len(made.chunks) == MICROBATCHES
    assert max(made.predicted.peak_bytes) == kept


def test_the_sends_and_receives_that_torch_adds_cannot_hang() -> None:
    compute = {rank: [one for one in row if one is not None] for rank, row in rows_of("ScheduleInterleavedZeroBubble").items()}
    text = table_of(schedules._add_send_recv(compute, lambda stage: stage % RANKS, 2 * RANKS))
    rows = launches_of(text)
    assert rows is not None
    assert sum("SEND" in action.op for row in rows for action in row) == 2 * (2 * RANKS - 1) * MICROBATCHES
    assert check(from_pipelining(text), rows) == []


def test_a_backward_of_a_microbatch_that_is_never_forwarded_is_found() -> None:
    text = table_of(rows_of("ScheduleInterleaved1F1B")).replace("4B3", "4B8")
    assert any("never runs" in str(fault) for fault in check(from_pipelining(text)))
