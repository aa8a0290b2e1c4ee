"""Schedules of other systems, read from the tables that they print: see the files of this folder for their formats.

Microbatches are equal, and on every stage F, B without weight gradients, and W take 1 us each. A forward keeps a byte until the
last part of its backward. Copies and recompute are left out, and messages follow from the order of the other actions; messages
that a table of torch states itself are in `launches_of`.
"""

from __future__ import annotations

from megatron_epp.contrib.foreign import pipelining, primus, zero_bubble_fork
from megatron_epp.plan.launches import Rows
from megatron_epp.plan.plan import Plan


def is_table(name: str, text: str) -> bool:
    """Return True if a file of this name with this text is a table, and no plan."""
    if text[:1] == "{":  # a plan, perhaps a large one
        return False
    return name.endswith(".csv") or primus.is_table(text) or zero_bubble_fork.is_table(text)


def from_table(text: str) -> Plan:
    """Read a table of any system as a plan, for `check` and `simulate`: it may be faulty.

    Raises:
        PlanError: it is no such table: an entry has another form, a stage is on two ranks or on none, or a part of a backward
            is missing or there twice.
    """
    if primus.is_table(text):
        return primus.from_primus(text)
    return zero_bubble_fork.from_zero_bubble(text) if zero_bubble_fork.is_table(text) else pipelining.from_pipelining(text)


def launches_of(text: str) -> Rows | None:
    """Return what every rank launches, in order, by a table whose own sends and receives are to be proven; None for others.

    Takes and raises what `from_table` does, which reads the same table as a plan.
    """
    return None if primus.is_table(text) or zero_bubble_fork.is_table(text) else pipelining.launches_of(text)
