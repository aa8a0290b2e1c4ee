"""Replacements of Megatron's dataset provider and schedule with `--epp`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from megatron.core import mpu
from megatron.training import get_args

from megatron_epp.mcore.data.documents import build_document_iterators
from megatron_epp.mcore.training import session as sessions
from megatron_epp.mcore.training.baseline import baseline_schedule
from megatron_epp.mcore.training.forward_backward import forward_backward_elastic
from megatron_epp.plan.errors import EppError


def provide_documents(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return iterators of global batches for train, validation and test, in place of Megatron's datasets."""
    if vp_stage:  # a rank's chunks run from one batch, which the iterator of the first one gives
        return None, None, None
    args = get_args()
    session = sessions.start(args)
    elastic = args.epp_schedule == "elastic"
    return build_document_iterators(
        args,
        session.plan_source(forward_only=False) if elastic else None,
        session.plan_source(forward_only=True) if elastic else None,
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_world_size(),
        num_samples,
    )


def schedule_for(args: argparse.Namespace, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the schedule function that `--epp-schedule` names.

    Raises:
        EppError: NVIDIA ModelOpt is enabled, whose losses no schedule of this package computes.
    """
    if getattr(args, "modelopt_enabled", False):  # by a flag of ModelOpt's, or by what is in the checkpoint
        raise EppError("--epp does not train with NVIDIA ModelOpt, which brings losses of its own: start without --epp")
    return forward_backward_elastic if args.epp_schedule == "elastic" else baseline_schedule(stock)
