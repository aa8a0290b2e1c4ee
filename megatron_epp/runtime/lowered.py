"""Executor of a plan that has not been lowered yet, as a planning process lowers those of a training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_epp.plan import Plan
from megatron_epp.plan.lowering import lower
from megatron_epp.runtime.context import Program, Stage, chunk_layouts
from megatron_epp.runtime.executor import Executor


@lru_cache(maxsize=16)
def prepare(plan: Plan, rank: int) -> Program:
    """Lower a plan and lay out its chunks, which takes tens of milliseconds for large plans. The last 16 results are cached."""
    return Program(lower(plan)[rank], chunk_layouts(plan))


def executor_of(plan: Plan, rank: int, stages: Mapping[int, Stage], *rest: Any, **how: Any) -> Executor:
    """Return the executor of a rank; `rest` and `how` are its arguments behind the program. Raises `RunError` as it does."""
    return Executor(plan, rank, stages, prepare(plan, rank), *rest, **how)
