"""Packing of plans, in the process that makes them."""

from __future__ import annotations

import pickle
import zlib
from functools import lru_cache

from megatron_epp.plan import Plan
from megatron_epp.plan.document import digest
from megatron_epp.plan.lowering import lower
from megatron_epp.port.packed import PackedPlan


def pack(plan: Plan, planning_us: float, share: tuple[int, ...], division: int = 0) -> PackedPlan:
    """Lower and pack a plan. Raises `PlanError` if its order deadlocks."""
    return PackedPlan(*_contents(plan), planning_us, share, division)


@lru_cache(maxsize=4)
def _contents(plan: Plan) -> tuple[bytes, str, tuple[bytes, ...]]:
    """Return message, digest and rows of a plan, kept because consecutive batches of equal lengths often have equal plans."""
    return _packed(plan), digest(plan), tuple(map(_packed, lower(plan)))


def _packed(item: object) -> bytes:
    return zlib.compress(pickle.dumps(item, pickle.HIGHEST_PROTOCOL), level=1)
