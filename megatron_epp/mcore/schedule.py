"""The schedule function Megatron calls: takes an iteration's plan and runs this rank's part of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.mcore import session as sessions
from megatron_epp.mcore.experts import average_router_losses
from megatron_epp.mcore.reduction import Reduction
from megatron_epp.mcore.report import IterationReport, count_tokens
from megatron_epp.mcore.session import Session
from megatron_epp.mcore.stage import MegatronStage
from megatron_epp.runtime.executor import Executor
from megatron_epp.schedule import EppError

logger = logging.getLogger(__name__)


def forward_backward_elastic(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[dict[str, torch.Tensor]]:
    """Run one iteration by its plan. The signature is that of Megatron's pipeline schedules.

    Args:
        data_iterator: yields one `GlobalBatch` per call.
        model: the model, or a list of one.
        num_microbatches: sequences per replica on average; how many a replica gets is the division's affair, and how they are
            cut and packed the plan's.
        forward_only: an evaluation step.

    The others are taken as Megatron passes them; `forward_step_func` is not called, since a chunk is not a batch it knows.

    Returns:
        on the last stage one report, ``{"lm loss": [sum, tokens]}``; elsewhere an empty list.
    """
    if collect_non_loss_data:
        raise EppError("--epp does not collect non-loss data: leave out process_non_loss_data_func")
    model, data_iterator = _only(model), _only(data_iterator)
    config = get_model_config(model)
    session = sessions.current()
    stage = session.attach(model, config)
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    batch = _next_batch(data_iterator, num_microbatches, session)
    if not forward_only:
        count_tokens(batch)
    report = IterationReport.begin(session, batch, forward_only)
    splits = session.args.epp_split_weight_gradient
    with Reduction(config, [model], session.rank == 0, splits) as reduction:
        stage.begin(batch.chunk, partial(reduction.before_last_gradient, 0), partial(reduction.after_last_gradient, 0))
        assert batch.plan is not None
        executor = Executor(batch.plan, session.rank, {session.rank: stage}, session.links, report.recorder, session.watchdog)
        with report.measuring(), torch.set_grad_enabled(not forward_only):
            executor.run()
        stage.check()
    with session.watchdog.watch(lambda: f"rank {session.rank} waits for gradient finalisation (--epp-wait-limit-seconds)"):
        if not forward_only:
            _finalize(config, model, stage, pg_collection, force_all_reduce)
    if config.timers is not None:
        config.timers("forward-backward").stop()
    if not forward_only:
        average_router_losses(num_microbatches, len(batch.plan.chunks))
    report.finish(stage.loss_report)
    return [] if stage.loss_report is None else [{"lm loss": stage.loss_report}]


def _only(item: Any) -> Any:
    if not isinstance(item, list):
        return item
    if len(item) != 1:
        raise EppError(f"--epp runs one model chunk per rank, not {len(item)}: leave out the virtual pipeline flags")
    return item[0]


def _next_batch(data_iterator: Iterator[GlobalBatch], num_microbatches: int, session: Session) -> GlobalBatch:
    start_s = time.perf_counter()
    with session.watchdog.watch(lambda: f"rank {session.rank} waits for its plan (--epp-wait-limit-seconds)"):
        batch = next(data_iterator)
    session.plan_wait_us = (time.perf_counter() - start_s) * 1e6
    if not isinstance(batch, GlobalBatch) or batch.plan is None:
        raise EppError("--epp needs the document iterators of megatron_epp.mcore.documents; another dataset provider is in use")
    replicas = session.replicas
    if batch.global_size != num_microbatches * replicas:
        raise EppError(
            f"Megatron asks for {num_microbatches} sequences for each of {replicas} replicas but the sampler yields "
            f"{batch.global_size} in all"
        )
    return batch


def _finalize(config: Any, model: torch.nn.Module, stage: MegatronStage, pg_collection: Any, force_all_reduce: Any) -> None:
    """Hand over to Megatron: data-parallel and embedding reductions, and the division by the number of tokens."""
    if config.finalize_model_grads_func is None:
        return
    if pg_collection is None:
        pg_collection = get_attr_wrapped_model(model, "pg_collection") or ProcessGroupCollection.use_mpu_process_groups()
    num_tokens = stage.total_tokens
    if num_tokens is None:
        num_tokens = torch.zeros([], dtype=torch.int, device=stage.message(1)[2])
    config.finalize_model_grads_func([model], num_tokens, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
