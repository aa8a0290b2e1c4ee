"""Start of a training on documents or samples: its run, its model chunks as stages, its costs, and who plans."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.features import targets
from megatron_epp.mcore import early_planning
from megatron_epp.mcore.arguments.parser import options_from
from megatron_epp.mcore.costs.sources import Step, pipeline_costs
from megatron_epp.mcore.data.documents import build_document_iterators
from megatron_epp.mcore.iteration import sliced_run
from megatron_epp.mcore.iteration.base_run import lockstep_groups
from megatron_epp.mcore.iteration.device_inputs import rank_inputs
from megatron_epp.mcore.iteration.sliced_run import SlicedRun
from megatron_epp.mcore.model import rotary
from megatron_epp.mcore.model.adopt import check_adopted
from megatron_epp.mcore.model.block_loss import block_loss
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.model.stage import HeadSettings, MegatronStage
from megatron_epp.mcore.patches import fingerprints, patching
from megatron_epp.mcore.start.run_start import connect, settle, use_communicators
from megatron_epp.mcore.training.caps import offloads
from megatron_epp.port.planning import BatchPlanner
from megatron_epp.runtime.links.objects import ObjectGroup, agreed

logger = logging.getLogger(__name__)


def prepare(args: argparse.Namespace) -> None:
    """Start the planning process, before the model is built. A collective call of all ranks."""
    _, ranks = lockstep_groups()
    if args.epp_schedule == "elastic" and dist.get_rank() in {lockstep_ranks[0] for lockstep_ranks in ranks}:
        early_planning.start(options_from(args, training=True, offload=offloads(args)))


def provide_documents(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return iterators of global batches for train, validation and test, in place of Megatron's datasets."""
    from megatron.training import get_args

    # Megatron asks for iterators once for each model chunk of a rank.
    if vp_stage:  # a rank's chunks run from one batch, which the iterator of the first one gives
        return None, None, None
    args = get_args()
    sliced_run.end()
    strange = patching.unknown(fingerprints.RELIED_ON) if args.rank == 0 else []
    if strange:
        logger.warning("this Megatron is not as megatron-epp was tested with: look at its %s", ", ".join(strange))
    run = new_run(args)
    sliced_run.use(run)
    elastic = args.epp_schedule == "elastic"
    train, valid, test = build_document_iterators(
        args,
        run.plan_source(forward_only=False) if elastic else None,
        run.plan_source(forward_only=True) if elastic else None,
        mpu.get_data_parallel_rank(),
        mpu.get_data_parallel_world_size(),
        num_samples,
    )
    if train is not None and run.plans and not run.replica:
        run.longest_tokens = train.longest_tokens
    return train, valid, test


def new_run(args: argparse.Namespace) -> SlicedRun:
    """Return a run that has no model yet, with the planning process that was started for it."""
    run = SlicedRun(args, attach)
    run.process = early_planning.take() if run.plans and args.epp_schedule == "elastic" else None
    return run


def attach(run: SlicedRun, models: Sequence[torch.nn.Module], config: Any) -> None:
    """Wrap the rank's model chunks as stages, and settle costs and caps."""
    # From here on groups are made. torch makes each on all ranks of the job, so the order of these calls must not depend on
    # the rank.
    connect(run, agreed(partial(_stages_of, run, models, config), run.names))
    run.inputs = rank_inputs(run.stages, next((feature.rows_of for feature in run.features if feature.rows_of), None))
    run.planning_ranks = ObjectGroup.create([ranks[0] for ranks in run.lockstep_ranks], run.groups)
    if run.args.epp_schedule != "elastic":
        return
    use_communicators(run)  # ahead of `settle`, whose caps then count their memory
    settle(run, partial(_prior, run))
    if run.plans:
        planner: BatchPlanner = run.planner_by(run.costs)
        for feature in run.features:
            planner = feature.planner(planner)
        run.plan_with(planner)


def _stages_of(run: SlicedRun, models: Sequence[torch.nn.Module], config: Any) -> dict[int, MegatronStage]:
    """Return the rank's model chunks as stages. Raises `EppError` for a model that cannot run in slices."""
    if run.args.epp_schedule != "stock":
        for model in models:
            check_adopted(model)
            rotary.adopt(language_model_of(model))  # when the program has built it: it may have put its own there
    head = HeadSettings(MegatronStage)
    for change in targets(run.asked, "head"):
        change(run, models, head)
    own, last = run.placement.stages(run.rank), run.placement.num_stages - 1
    return {
        stage: (head.make if stage == last else MegatronStage)(
            model,
            config,
            is_first=stage == 0,
            is_last=stage == last,
            tp_size=mpu.get_tensor_model_parallel_world_size(),
            fp32_kv_gradients=run.args.epp_fp32_kv_gradients,
            block_loss=block_loss(run.args, language_model_of(model), head.asked) if head.has_head and stage == last else None,
            own_inputs=run.own_inputs if stage == 0 else None,
        )
        for stage, model in zip(own, (*models, *models[: len(own) - run.placement.num_chunks]), strict=True)  # the ring's last
    }


def _prior(run: SlicedRun, note: Callable[[Step], None]) -> PipelineCosts:
    """Return costs by formula or from a file, with measured bytes; `note` is called with each step before it starts."""
    with ExitStack() as measuring:
        for feature in run.features:
            measuring.enter_context(feature.measuring())
        return pipeline_costs(run.args, run.stages, run.links, run.ask, run.measured, note)
