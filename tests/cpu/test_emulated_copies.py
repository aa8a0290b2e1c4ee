"""Emulated copies: each waits for its link and its planned time, and backwards wait for it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest

from megatron_epp.plan import Action, EppError, Op
from megatron_epp.runtime.tools.emulate_copies import WaitingOffload, host_locks
from tests.support.plan.small_plans import offload, shared_link, with_step

SCALE = 1000.0
"""Planned 5 us last 5 ms."""
OWNER = (0, 0)


class Seen:
    """Copies in the order in which they ended."""

    def __init__(self):
        self.spans_s = {}

    def __call__(self, action, start_s, end_s):
        self.spans_s[str(action)] = (start_s, end_s)

    def took_s(self, name):
        start_s, end_s = self.spans_s[name]
        return end_s - start_s


def emulated(plan=None, rank=0, locks=None, seen=None):
    return WaitingOffload(plan or offload(), rank, locks or {}, SCALE, seen or Seen())


def test_a_copy_takes_its_planned_time_and_a_backward_waits_for_its_load():
    seen = Seen()
    copies = emulated(with_step(offload(), "0L0", time_us=20.0), seen=seen)
    with copies.forward_of(OWNER):
        copies.out(OWNER, 0.5, nullcontext)
    copies.free(OWNER)
    assert 0.005 <= seen.took_s("0O0") < 1
    copies.back(OWNER, nullcontext)
    copies.before_backward(OWNER)
    assert 0.02 <= seen.took_s("0L0") < 1
    assert copies.loaded_s == seen.spans_s["0L0"][1] > seen.spans_s["0O0"][1]
    copies.assert_empty()


def test_a_backward_without_a_load_waits_for_nothing():
    copies = emulated()
    copies.before_backward((0, 2))
    assert copies.loaded_s == 0.0


def test_copies_that_have_not_ended_are_named():
    with pytest.raises(EppError, match="copies have not ended: 0O0 0L0"):
        emulated().assert_empty()


def test_ranks_that_share_a_link_take_turns_in_each_direction():
    plan = shared_link()
    locks = host_locks(plan, threading)
    assert set(locks) == {(0, Op.O), (0, Op.L)}
    copies, seen = {}, {}
    for rank in (0, 1):
        seen[rank] = Seen()
        copies[rank] = emulated(plan, rank, locks, seen[rank])
    with locks[0, Op.O]:
        for rank in (0, 1):
            copies[rank].out((rank, 0), 0.5, nullcontext)
        assert not seen[0].spans_s
        assert not seen[1].spans_s
    for rank in (0, 1):
        copies[rank].free((rank, 0))
    (first, second) = sorted(seen[rank].spans_s[str(Action(Op.O, rank, 0))] for rank in (0, 1))
    assert first[1] <= second[0]


def test_a_link_of_a_single_rank_needs_no_turns():
    assert host_locks(offload(), threading) == {}
    assert host_locks(replace(shared_link(), host_links=(0, 1)), threading) == {}
