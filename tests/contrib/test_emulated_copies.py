"""Emulated copies: each waits for its link and its planned time, and backwards wait for it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest

from megatron_epp.contrib.demos.emulate import EmulatedRank, WaitingOffload, host_locks
from megatron_epp.plan import Action, EppError, Op
from tests.support.plan.small_plans import offload, shared_link, with_step

SCALE = 1000.0
"""Planned 5 us last 5 ms."""
OWNER = (0, 0)


class Copies(WaitingOffload):
    """Emulated copies of a rank, with the times at which they ran, in seconds of the monotonic clock."""

    def __init__(self, plan=None, rank=0, locks=None):
        self.state = EmulatedRank(plan or offload(), rank, SCALE)
        super().__init__(self.state, locks or {})

    @property
    def spans_s(self):
        return {name: (start_us * SCALE * 1e-6, end_us * SCALE * 1e-6) for name, start_us, end_us in self.state.events}

    def took_s(self, name):
        start_s, end_s = self.spans_s[name]
        return end_s - start_s


def test_a_copy_takes_its_planned_time_and_a_backward_waits_for_its_load():
    copies = Copies(with_step(offload(), "0L0", time_us=20.0))
    with copies.forward_of(OWNER):
        copies.out(OWNER, 0.5, 0, nullcontext)
    copies.free(OWNER)
    assert copies.took_s("0O0") >= 0.005
    copies.back(OWNER, nullcontext)
    copies.before_backward(OWNER)
    assert copies.took_s("0L0") >= 0.02
    assert copies.loaded_s == pytest.approx(copies.spans_s["0L0"][1])
    assert copies.loaded_s > copies.spans_s["0O0"][1]
    copies.assert_empty()


def test_a_backward_without_a_load_waits_for_nothing():
    copies = Copies()
    copies.before_backward((0, 2))
    assert copies.loaded_s == 0.0


def test_copies_that_have_not_ended_are_named():
    with pytest.raises(EppError, match="copies have not ended: 0O0 0L0"):
        Copies().assert_empty()


def test_ranks_that_share_a_link_take_turns_in_each_direction():
    plan = shared_link()
    locks = host_locks(plan, threading)
    assert set(locks) == {(0, Op.O), (0, Op.L)}
    copies = [Copies(plan, rank, locks) for rank in (0, 1)]
    with locks[0, Op.O]:
        for rank in (0, 1):
            copies[rank].out((rank, 0), 0.5, 0, nullcontext)
        assert not copies[0].spans_s
        assert not copies[1].spans_s
    for rank in (0, 1):
        copies[rank].free((rank, 0))
    (first, second) = sorted(copies[rank].spans_s[str(Action(Op.O, rank, 0))] for rank in (0, 1))
    assert first[1] <= second[0]


def test_links_that_one_rank_has_alone_need_no_lock():
    assert host_locks(offload(), threading) == {}
    assert host_locks(replace(shared_link(), host_links=(0, 1)), threading) == {}
