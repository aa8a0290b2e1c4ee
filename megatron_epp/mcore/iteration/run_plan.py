"""One iteration on one rank: its part of a plan, run on the rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from megatron.core.utils import get_model_config

from megatron_epp.mcore.iteration.base_run import Run
from megatron_epp.mcore.iteration.reduction import Reduction, gather_parameters
from megatron_epp.mcore.iteration.report import IterationReport
from megatron_epp.plan import Op, Plan
from megatron_epp.runtime.context import Program
from megatron_epp.runtime.executor import HANDLERS, Executor, Handler
from megatron_epp.runtime.memory_use import device_usage

BeginStage = Callable[[Any, Callable[[], None], Callable[[], None]], None]
"""Gives a stage its inputs, and what it calls before its last gradient and when its gradients are complete."""


def run_plan(
    run: Run,
    models: Sequence[torch.nn.Module],
    plan: Plan,
    report: IterationReport,
    reduction: Reduction,
    begin: BeginStage,
    program: Program,
    inputs: Callable[[int], Any] | None = None,
) -> None:
    """Run this rank's part of a plan, and start the reduction of gradients. For `program` see `Executor`; `inputs` of a chunk
    are for features, and None if chunks are a caller's microbatches.
    """
    if not plan.forward_only:
        run.check_trained()

    def out_of_memory(*failed: Any) -> str:  # with a text that only a run which fails imports
        asked = partial(device_usage, saved=report.saved), run.args.epp_recompute != "auto", run.makes_chunks, run.names
        text: str = resolve_name("megatron_epp.runtime.out_of_memory:OutOfMemoryReport")(*asked).text(*failed)
        return text

    # What the plan does not order is launched around it, at the same points on all ranks: the gathering of parameters, then
    # what features launch before and behind it.
    with reduction, report.saved or nullcontext(), torch.set_grad_enabled(not plan.forward_only), ExitStack() as around:
        if not plan.forward_only:
            gather_parameters(get_model_config(models[0]), models)
        handlers: Mapping[Op, Handler] = HANDLERS
        for feature in run.features:
            handlers = {**handlers, **around.enter_context(feature.running(plan, inputs, reduction, handlers))}
        for index, stage in enumerate(run.stages.values()):
            begin(stage, partial(reduction.before_last_gradient, index), partial(reduction.reduce, index))
        Executor(
            plan,
            run.rank,
            run.stages,
            program,
            run.links,
            recorder=report.recorder,
            watchdog=run.watchdog,
            out_of_memory=out_of_memory,
            handlers=handlers,
        ).run()
