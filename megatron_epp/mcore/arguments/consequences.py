"""Consequences of a run's flags, before Megatron validates them: refusals, other values, and words on what has no effect."""

from __future__ import annotations

import argparse
import logging

from megatron_epp.cost.optimizer import KINDS
from megatron_epp.mcore.arguments import refusals
from megatron_epp.mcore.arguments.layout import EVEN, KEEPING_LAYERS, VOCABULARY_FLAG, apply_layout, is_divided, is_open
from megatron_epp.mcore.arguments.rule import Door, Rule, flags, problems_of
from megatron_epp.mcore.releases import check_calls, has_user_microbatches, installed_version, saves_several_buckets_resharded
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.placement import placements_of
from megatron_epp.plan.planners import PLANNERS

logger = logging.getLogger(__name__)

IMPLIED = (
    *refusals.PARTING,
    Rule("--no-create-attention-mask-in-dataloader", allowed=(True,), dest="create_attention_mask_in_dataloader"),
)
OF_SAMPLES = (
    *flags("--data-cache-path --allow-ambiguous-pad-tokens"),
    Rule("--num-dataset-builder-threads", allowed=(None, 1)),
    Rule("--mid-level-dataset-surplus", allowed=(0.005,)),
)
"""Flags of `IDLE` that have an effect on Megatron's own samples, with `--epp-documents stream`."""
IDLE = (
    *OF_SAMPLES,
    *flags("--per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap"),
    *flags("--exit-signal-handler-for-dataloader --object-storage-cache-path"),
    Rule("--num-workers", allowed=(2,)),
)
EOD = Rule("--eod-mask-loss")


def tell_data_flags(args: argparse.Namespace) -> None:
    """Log once which of the given data flags, before Megatron completes them, have no effect, and why."""
    lines = [
        (IMPLIED, "implies %s: documents are sequences by themselves, attend to no other, have positions from 0"),
        (IDLE, "makes no use of %s: documents are read as they are, without caches, loader processes or padding"),
        ((EOD,), "masks the loss by %s inside of documents alone: it predicts nothing behind their last tokens"),
    ]
    if args.epp_documents == "stream":
        unused = tuple(row for row in IDLE if row not in OF_SAMPLES)
        lines = [(unused, "makes no use of %s: Megatron's samples are read without loader processes")]
    for rows, words in lines:
        if args.rank == 0 and (names := [row.flag for row in rows if row.is_given(args)]):
            logger.warning(f"--epp {words}", ", ".join(names))


def tell_saved_optimizer(args: argparse.Namespace) -> None:
    """Say once in which layouts the optimizer state that a run saves can be loaded; warn where its values would be wrong."""
    if args.rank != 0 or not (args.save and args.use_distributed_optimizer):
        return
    if args.num_experts:
        ranks, bound = args.expert_model_parallel_size, "2 or more" if args.expert_model_parallel_size > 1 else "1"
        logger.info("optimizer state saved with --expert-model-parallel-size %d loads only with %s, in any form", ranks, bound)
    if not args.dist_ckpt_optim_fully_reshardable:
        form = "with any number of replicas, and only with the same tensor- and pipeline-parallel layout"
        todo = "--dist-ckpt-optim-fully-reshardable keeps it for every layout"
        logger.info("--save keeps optimizer state in a form that loads %s: %s", form, todo)
    elif args.overlap_grad_reduce and not saves_several_buckets_resharded():
        where = "where --overlap-grad-reduce divides gradients into several buckets (NVIDIA/Megatron-LM pull request 5077)"
        what = "saves wrong optimizer state for --dist-ckpt-optim-fully-reshardable"
        todo = "leave one of them out, or add --ddp-num-buckets 1"
        logger.warning("megatron-core %s %s %s: %s", installed_version(), what, where, todo)


def tell_unknown_optimizer(args: argparse.Namespace) -> None:
    """Warn once if the memory of the run's optimizer is not known to plans."""
    if args.rank == 0 and (kind := getattr(args, "optimizer", None)) not in (None, *KINDS):
        todo = "plans count that of Adam; where it has more, lower --epp-memory-cap-gb"
        logger.warning("memory of --optimizer %s is not known: %s", kind, todo)


def prepare_epp_args(args: argparse.Namespace) -> None:
    """Check and complete flags before Megatron validates them. Raises `ArgumentError`, a line per problem, or `EppError`."""
    door = door_of(args)
    if door is Door.USER:
        check_calls()
    refusals.refuse(args, door)
    _leave_open(args, door)
    if door is Door.USER:
        args.delay_wgrad_compute = refusals.delays_weights(args)
    if door is not Door.DOCUMENTS:
        return
    tell_data_flags(args)
    tell_saved_optimizer(args)
    tell_unknown_optimizer(args)
    if args.epp_vocab_parallel == "auto" and (problem := next(problems_of(args, door, refusals.VOCABULARY), None)):
        args.epp_vocab_parallel = "off"
        if args.rank == 0 and args.pipeline_model_parallel_size > 1:
            logger.info("%s auto: the output layer stays on the last stage, since %s", VOCABULARY_FLAG, problem)
    if args.epp_vocab_parallel != "off" and getattr(args, "cross_entropy_loss_fusion", False) and args.rank == 0:
        logger.warning("--cross-entropy-loss-fusion has no effect with %s on: shards compute the loss", VOCABULARY_FLAG)
    apply_layout(args)
    # Megatron copies it to the configs of the model and of data parallelism, which then leaves reductions to `backward_dw`.
    args.delay_wgrad_compute = refusals.delays_weights(args)
    args.micro_batch_size = 1  # so that Megatron's number of microbatches is a replica's number of sequences
    args.dataloader_type = "external"  # Megatron then passes the iterators of a provider on as they are
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        if args.rank == 0:
            logger.warning("--epp weighs every token alike: --calculate-per-token-loss is now on")


def _leave_open(args: argparse.Namespace, door: Door) -> None:
    """Leave to the data what no flag says: layers, stages of ranks (`epp_open_placements`) and the output layer."""
    kind, chunks = args.epp_placement, getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    args.epp_placement = "v" if kind == "v" else getattr(PLANNERS.entry(args.epp_planner), "placement", "looped")
    args.epp_chosen_by_default, args.epp_open_placements = False, []
    weights = {"on": True, "off": False}
    args.epp_split_weight_gradient = weights.get(args.epp_split_weight_gradient, args.epp_split_weight_gradient)
    if door is not Door.DOCUMENTS:
        args.epp_vocab_parallel = "off"
        return
    if args.epp_split_weight_gradient == AUTO:
        why = "" if args.pipeline_model_parallel_size > 1 else "there is one stage"
        if why := why or next(problems_of(args, door, refusals.WEIGHTS_TOGETHER), ""):
            args.epp_split_weight_gradient = False
            logger.debug("weight gradients are computed with their backwards, since %s", why)
    if args.epp_layout == EVEN and (is_divided(args) or args.epp_placement == "ring"):
        args.epp_layout = None
    elif is_open(args):
        args.epp_layout, args.epp_chosen_by_default = "auto", True
    elif args.epp_layout is None and args.rank == 0 and args.pipeline_model_parallel_size > 1:
        logger.info("layers are as Megatron divides them, since %s", next(problems_of(args, door, KEEPING_LAYERS)))
    if args.epp_layout == "auto":
        every = ((each.kind, each.num_chunks) for each in placements_of(args.pipeline_model_parallel_size))
        args.epp_open_placements = [each for each in every if each[0] == (kind or each[0]) and each[1] == (chunks or each[1])]


def door_of(args: argparse.Namespace) -> Door:
    """Return which rows of refusals apply to the flags of a run."""
    if not getattr(args, "epp", False):
        return Door.STOCK
    return Door.USER if has_user_microbatches(args) else Door.DOCUMENTS


def refuse_restart(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` for ``--inprocess-restart``, which scripts set up before they validate flags."""
    if getattr(args, "epp", False):
        refusals.refuse(args, Door.DOCUMENTS, (refusals.NO_RESTART,))
