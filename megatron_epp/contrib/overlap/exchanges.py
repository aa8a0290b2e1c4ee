"""Exchanges of Megatron's layers, at which the two actions of a step take turns."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed
from megatron.core import mpu
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings

from megatron_epp.contrib.overlap import flags_against_overlap
from megatron_epp.contrib.overlap.turns import Collective, PairRunner, StepsOfTwo, Turns, exchanges_of, run_together
from megatron_epp.mcore.iteration.run_feature import RunFeature
from megatron_epp.plan import Op, Plan
from megatron_epp.runtime.executor import Handler

if TYPE_CHECKING:
    from megatron_epp.mcore.iteration.base_run import Run

logger = logging.getLogger(__name__)

_LAUNCHED = (
    *(Collective(torch.distributed, name) for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")),
    *(Collective(mappings, name) for name in ("dist_all_gather_func", "dist_reduce_scatter_func")),
)
"""Functions by which Megatron and Transformer Engine exchange activations.

The linear layers' own gather with sequence parallelism is not one of them: it fills a buffer that all layers share, which
another action must not fill before it has been used.
"""


class Overlap(RunFeature):
    """Steps of two actions in a run, where its plans have such steps."""

    def __init__(self, run: Run) -> None:
        self._args, self._rank = run.args, run.rank

    @contextmanager
    def running(
        self, plan: Plan, inputs: Any, reduction: Any, handlers: Mapping[Op, Handler]
    ) -> Iterator[Mapping[Op, Handler]]:
        has_steps = any(step.also for step in plan.ranks[self._rank])
        run_pair = pair_runner(self._args) if has_steps else None
        yield {} if run_pair is None else StepsOfTwo(plan, self._rank, run_pair, handlers).handlers()


def pair_runner(args: argparse.Namespace) -> PairRunner | None:
    """Return what runs the two actions of a step in turns, by Megatron's arguments; None where they run one after the other.

    Rank 0 logs the reason once.
    """
    for flag, reason in flags_against_overlap(args):
        _say(f"with {flag} {reason}")
        return None
    launched = [method for method in _LAUNCHED if hasattr(method.module, method.name)]
    collectives = exchanges_of(launched, mpu.get_tensor_model_parallel_group())

    @contextmanager
    def exchanging(turns: Turns) -> Iterator[None]:
        with collectives(turns), _without_forks():
            yield

    return partial(run_together, exchanges=exchanging)


@functools.cache
def _say(reason: str) -> None:
    if torch.distributed.get_rank() == 0:
        logger.info("the two actions of a step run one after the other: %s", reason)


@contextmanager
def _without_forks() -> Iterator[None]:
    """Leave Megatron's random states as they are, which its layers would switch to and from, one action at a time.

    Nothing draws from them without dropout.
    """
    tracker = get_cuda_rng_tracker()
    tracker.fork = lambda *_: nullcontext()
    try:
        yield
    finally:
        del tracker.fork
