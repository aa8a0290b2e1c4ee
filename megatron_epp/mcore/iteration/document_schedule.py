"""The schedule that Megatron's training loop calls with `--epp`: it runs plans."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.utils import get_model_config

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.iteration import sliced_run
from megatron_epp.mcore.iteration.loggers import memory_text
from megatron_epp.mcore.iteration.reduction import NoReduction, Reduction
from megatron_epp.mcore.iteration.report import IterationReport, count_tokens
from megatron_epp.mcore.iteration.schedule_call import ScheduleCall
from megatron_epp.mcore.iteration.sliced_run import SlicedRun
from megatron_epp.mcore.model.losses import average_router_losses, report_of
from megatron_epp.mcore.model.stage import MegatronStage, timed
from megatron_epp.mcore.patches.stock_functions import FORWARD_STEP, require_stock
from megatron_epp.plan import EppError

logger = logging.getLogger(__name__)

_RAISED_BY_ALL = (EppError, StopIteration)
"""Errors that all ranks of the job raise: errors of planning, and the end of the documents. Others are one rank's own."""


def schedule_for(args: argparse.Namespace, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the schedule function that `--epp-schedule` names. Raises `EppError` with NVIDIA ModelOpt, whose losses differ."""
    if getattr(args, "modelopt_enabled", False):  # by a flag of ModelOpt's, or by what is in the checkpoint
        raise EppError("--epp does not train with NVIDIA ModelOpt, which brings losses of its own: start without --epp")
    if args.epp_schedule == "elastic":
        return forward_backward_elastic
    from megatron_epp.mcore.training.baseline import baseline_schedule  # which a training by plans does not need

    return baseline_schedule(stock)


def forward_backward_elastic(**arguments: Any) -> list[dict[str, torch.Tensor]]:
    """Run one iteration by its plan, called as Megatron's pipeline schedules are (`ScheduleCall`).

    `num_microbatches` is the number of sequences per replica on average, and the data iterator yields one `GlobalBatch` per
    call. `forward_step_func`, which does not take chunks, is not called, and is refused unless it is Megatron's own. Returns
    one report on the last rank, ``{"lm loss": [sum, tokens]}`` (see `report_of`), elsewhere none.
    """
    call = ScheduleCall(**arguments)
    if call.collect_non_loss_data:
        raise EppError("--epp does not collect non-loss data: leave out process_non_loss_data_func")
    require_stock({FORWARD_STEP: call.forward_step_func})
    call.check_messages()
    models, config, forward_only, count = call.models, call.config, call.forward_only, call.num_microbatches
    run = sliced_run.current()
    run.attach(models, config)
    with timed(config.timers, "forward-backward", log_level=1, barrier=config.barrier_with_L1_time):
        with timed(config.timers, "batch-generator"), run.telling_others(unless=_RAISED_BY_ALL):
            batch = _next_batch(call.iterators[0], count, run, forward_only)

        def finish(num_tokens: torch.Tensor) -> None:
            run.finish_gradients(models, num_tokens, call.pg_collection, call.force_all_reduce)
            if not batch.trains:
                warn_and_clear_untrained(run, models, config, batch)

        loss, report = run_batch(run, models, batch, forward_only, finish)
        if not forward_only:
            count_tokens(batch.prepared)
            if run.args.epp_batch_tokens is not None:
                # To which Megatron's loop adds the sequences that it has asked for.
                run.args.consumed_train_samples = batch.consumed_samples - count * run.replicas
    if not forward_only and batch.plan is not None:
        average_router_losses(count, len(batch.plan.chunks))
    finish_batch(run, batch, loss, report, forward_only)
    return [] if loss is None else [report_of(loss, run.loss)]


def run_batch(
    run: SlicedRun,
    models: list[torch.nn.Module],
    batch: GlobalBatch,
    forward_only: bool,
    finish: Callable[[torch.Tensor], None],
    on_not_finite: Callable[[str], None] | None = None,
    *,
    reduces: bool = True,
) -> tuple[torch.Tensor | None, IterationReport]:
    """Run a planned batch, and finish its gradients.

    Args:
        finish: called after the last backward with the number of tokens, which is 0 on all ranks but the last.
        on_not_finite: called on a rank that has found the loss of a token that is not finite, in place of an `EppError`;
            gradients are without it.

    Returns on the last rank the sums to report, elsewhere None; and the report of the iteration, for `finish_batch`.
    """
    assert batch.plan is not None
    # Reports are made while later batches are on the device, where this one's inputs must not be kept.
    report = IterationReport.begin(run, replace(batch, prepared=None), forward_only)
    if batch.peak_items is not None:
        run.peak_text = memory_text(batch.plan.predicted.peak_bytes, batch.peak_items, report.iteration)
    run.watchdog.note = _of_own_chunks(run, batch)  # until the next batch: the device may stand still behind the host
    with run.telling_others():
        for feature in run.features:
            feature.before(batch)
        # Hooks take one backward as a parameter's last. That is wrong where vocabulary shards add gradients behind it, or where
        # a chunk without spans gives encoders none.
        may_use_hooks = run.rank == 0 and run.own_inputs is None and not any(feature.adds_gradients for feature in run.features)
        reduction: Reduction = NoReduction(models)
        if reduces:
            reduction = Reduction(get_model_config(models[0]), models, may_use_hooks, run.options.split_weight)
        inputs = batch.prepared
        report.count_saved_tensors(inputs.upload.buffer, batch.plan.forward_only)

        def begin(stage: MegatronStage, *calls: Callable[[], None]) -> None:
            stage.begin(inputs.chunk, *calls)

        run.run_plan(models, batch.plan, report.recorder, report.saved, reduction, begin, inputs.program, inputs.chunk)
        for stage in run.stages.values():
            stage.end()
        for problem in filter(None, (stage.problem for stage in run.stages.values())):
            # Before gradients are finished, which other ranks take part in: none of them gets to a step.
            if on_not_finite is None:
                raise EppError(f"{problem}. Check where these values come from, or leave the token out of the mask")
            on_not_finite(problem)
        with run.watching("waits for the loss"):
            loss, num_tokens = _loss_on_last_rank(run)
        if not forward_only:
            finish(num_tokens)
    return loss, report


def _of_own_chunks(run: SlicedRun, batch: GlobalBatch) -> str:
    """Return what a hang may come from where replicas run plans of their own; empty where all run one order."""
    if len(run.lockstep_groups) == 1 or batch.plan is None:
        return ""
    return (
        f"\nReplicas run unequal numbers of chunks (here {len(batch.plan.chunks)}). If a hook of a parameter or module makes a "
        "collective over replicas, it waits for a chunk that others do not have: make it behind the last backward, in the "
        "model configuration's finalize_model_grads_func or a pre-hook of the optimizer's step"
    )


def finish_batch(
    run: SlicedRun, batch: GlobalBatch, loss: torch.Tensor | None, report: IterationReport, forward_only: bool
) -> None:
    report.log_previous_and_begin(loss)
    if not forward_only:
        run.after(batch, report.recorder)


def warn_and_clear_untrained(run: SlicedRun, models: Sequence[Any], config: Any, batch: GlobalBatch) -> None:
    """Warn of a batch without trained tokens, and remove its gradients: routers' losses divided by no tokens.

    The warning is logged for the 1st, 2nd, 4th, 8th such batch and so on.
    """
    run.untrained_batches += 1
    count = run.untrained_batches
    if config.num_moe_experts is not None:
        for model in models:
            model.scale_gradients(0.0)
    if dist.get_rank() == 0 and count & (count - 1) == 0:
        whose = f"none of the {batch.global_size} sequences up to sample {batch.consumed_samples}"
        advice = f"raise {run.names['global_batch_size']}, or leave such documents out"
        if run.names is not TRAINING:  # a loop of a program's own, whose samples are not counted
            whose, advice = "no sample of this step", "leave such samples out"
        logger.warning(
            "%s has a trained token: their loss and gradients are 0, and the optimizer takes its step all the same (batch %d "
            "of this kind; %s)",
            *(whose, count, advice),
        )


def _loss_on_last_rank(run: SlicedRun) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the loss report and the number of tokens on Megatron's last rank, from the last stage's; elsewhere None and 0."""
    placement, (any_stage, *_) = run.placement, run.stages.values()
    device = any_stage.message(1)[2]
    num_sums = 2 + (0 if run.loss is None else len(run.loss.logged))
    loss, num_tokens = torch.zeros(num_sums, device=device), torch.zeros([], dtype=torch.int, device=device)
    last = run.stages.get(placement.num_stages - 1)
    if last is not None:
        assert last.loss_report is not None
        assert last.total_tokens is not None
        loss, num_tokens = last.loss_report, last.total_tokens
    # `train_step` reads the losses of the last pipeline rank, and `finalize_model_grads` broadcasts its number of tokens. In a
    # V the last stage is on the first rank.
    if placement.ends_share_rank:
        group = mpu.get_pipeline_model_parallel_group()
        for values in (loss, num_tokens):
            dist.broadcast(values, dist.get_global_rank(group, placement.last_rank), group=group)
    return (loss, num_tokens) if run.rank == placement.num_ranks - 1 else (None, torch.zeros_like(num_tokens))


def _next_batch(data_iterator: Any, num_microbatches: int, run: SlicedRun, forward_only: bool) -> GlobalBatch:
    start_s = time.perf_counter()
    with run.watching("waits for its plan"):
        batch = next(data_iterator)
        if isinstance(batch, GlobalBatch) and batch.prepared is None and batch.plan is not None:  # saved by an earlier process
            batch = getattr(data_iterator, "iterable", data_iterator).restored(batch)
    run.plan_wait_us = (time.perf_counter() - start_s) * 1e6
    if not isinstance(batch, GlobalBatch) or batch.plan is None:  # another patch or caller has given its own iterators
        raise EppError("--epp needs the iterators of megatron_epp.mcore.data.documents; another dataset provider is in use")
    counts_tokens = run.args.epp_batch_tokens is not None and not forward_only
    if not counts_tokens and batch.global_size != num_microbatches * run.replicas:
        raise EppError(
            f"Megatron asks for {num_microbatches} sequences for each of {run.replicas} replicas but the sampler yields "
            f"{batch.global_size} in all"
        )
    return batch
