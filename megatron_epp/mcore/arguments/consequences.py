"""Checks of Megatron's flags against the `--epp-*` flags, flags that a plan cannot honour, and values that follow from both."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pkgutil import resolve_name

from megatron_epp.cost.optimizer import KINDS
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.flag import GIVEN, MegatronFlag, Number
from megatron_epp.mcore.arguments.layout import apply_layout, hybrid_pattern, layout_problems
from megatron_epp.mcore.arguments.losses import loss_problems
from megatron_epp.mcore.arguments.sizes import check_layout, check_pattern, check_stages
from megatron_epp.mcore.arguments.table import TABLE, TRAINING, called
from megatron_epp.mcore.arguments.vocabulary import vocabulary_problems
from megatron_epp.mcore.features import installed_version, saves_several_buckets_resharded
from megatron_epp.mcore.model.kinds import KINDS as LAYER_KINDS
from megatron_epp.plan.errors import Names, as_setting
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.reading import brief
from megatron_epp.planner.registry import PLANNERS

logger = logging.getLogger(__name__)


NO_RESTART = MegatronFlag(
    "--inprocess-restart", advice="leave it out: the watchdog of the run that failed goes on, and would end the restarted one"
)
TWICE_REDUCED = MegatronFlag(
    "--num-distributed-optimizer-instances",
    (None, 1),
    "leave it out: Megatron reduces gradients again whose reduction a schedule has started",
)
_IN_TURN = "leave it out: it takes microbatches in the order in which they run, and counts again what runs again"
IN_ORDER = (
    MegatronFlag("--moe-routing-trace-path", advice=_IN_TURN),
    MegatronFlag("--save-activations-interval", advice=_IN_TURN),
    MegatronFlag("--save-dgrads-interval", advice=_IN_TURN),
    MegatronFlag("--save-tokens-per-expert-interval", advice=_IN_TURN),
    MegatronFlag("--logits-save-dir", advice=_IN_TURN),
    MegatronFlag("--logits-load-dir", advice=_IN_TURN),
)
"""Flags of what keeps state by the order of running (docs/megatron-state.md)."""
_NEVER = """
    --fim-data
    --use-varlen-dataset --use-legacy-models --sequence-packing-scheduler --use-megatron-fsdp --use-torch-fsdp2
    --hybrid-context-parallel --dynamic-context-parallel
    --fine-grained-activation-offloading --defer-embedding-wgrad-compute
    --overlap-param-gather-with-optimizer-step --enable-cuda-graph
    --external-cuda-graph --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json
    --rampup-batch-size --step-batch-size-schedule --phase-transition-iterations --full-validation
    --multiple-validation-sets --perform-rl-step --enable-mhc-connections --output-logit-dtype
"""
"""Flags that plans cannot honour with any value."""
CONFLICTS = (
    NO_RESTART,
    MegatronFlag("--cp-comm-type", (None, ["p2p"], ["a2a"]), "leave it out: heads are exchanged for tokens, as a2a does"),
    MegatronFlag("--hierarchical-context-parallel-sizes"),
    MegatronFlag("--micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    MegatronFlag("--eval-micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    MegatronFlag("--mock-data", advice="give real documents with --data-path"),
    MegatronFlag("--sft", advice="leave it out, and make documents and their mask with `megatron-epp prepare --chat`"),
    MegatronFlag("--recompute-granularity", advice="use --epp-recompute"),
    MegatronFlag("--recompute-activations", advice="use --epp-recompute"),
    MegatronFlag("--cuda-graph-impl", ("none", None), "set it to none: shapes change every iteration"),
    MegatronFlag("--dataloader-type", (None, "external"), "leave it out: documents are sampled by this package"),
    MegatronFlag("--fp8-format", dest="fp8"),
    MegatronFlag("--fp4-format", dest="fp4"),
    MegatronFlag("--check-for-spiky-loss", advice="leave it out: a chunk's loss is as large as the chunk"),
    MegatronFlag("--log-straggler", advice="leave it out: it times the script's forward steps, of which plans run none"),
    MegatronFlag("--iterations-to-skip", ([], None)),
    MegatronFlag("--cpu-offloading-num-layers", (0, None)),
    MegatronFlag("--tp-comm-overlap", advice="leave it out: its buffers have one size, chunks have many"),
    TWICE_REDUCED,
    *IN_ORDER,
    *(flag for kind in LAYER_KINDS for flag in kind.flags),
    *map(MegatronFlag, _NEVER.split()),
)


def check_conflicts(settings: object, conflicts: Iterable[MegatronFlag] = CONFLICTS, names: Names = TRAINING) -> None:
    """Raise `ArgumentError` that names all given settings that cannot be honoured, with advice for each.

    Args:
        settings: Megatron's arguments, or a model's configuration.
    """
    clashes = [
        f"{as_setting(row.flag if names is TRAINING else row.attribute, getattr(settings, row.attribute))} ({row.advice})"
        for row in conflicts
        if row.is_given(settings)
    ]
    if clashes:
        raise ArgumentError(f"{refusal(names)} " + "; ".join(clashes))


def refusal(names: Names) -> str:
    """Begin the refusal of settings that plans cannot honour, for who calls settings by these names."""
    return "--epp cannot honour" if names is TRAINING else "a plan cannot honour"


def check_weight_shards(settings: object, names: Names = TRAINING) -> None:
    """Raise `ArgumentError` if ranks share weights beyond tensor parallelism, which 0.19 and later can.

    Args:
        settings, names: as `check_conflicts` takes them.
    """
    tensor_ranks = getattr(settings, "tensor_model_parallel_size", 1)
    for prefix in ("", "expert_"):
        ranks = getattr(settings, f"{prefix}tensor_parallel_size", None) or tensor_ranks
        shards = getattr(settings, f"{prefix}tensor_parallel_num_weight_shards", None) or ranks
        shards = max(shards, ranks * getattr(settings, f"{prefix}gtp_weight_remat_size", 1))
        if shards > ranks:
            name = called(f"{prefix}tensor_parallel_num_weight_shards", names)
            raise ArgumentError(
                f"{refusal(names)} {as_setting(name, shards)} on {ranks} tensor-parallel ranks: weights are gathered ahead "
                "in the order of the first iteration, which recompute changes; leave it out"
            )


IMPLIED = (
    MegatronFlag("--reset-position-ids"),
    MegatronFlag("--reset-attention-mask"),
    MegatronFlag("--dataloader-inter-document-masking"),
    MegatronFlag("--no-create-attention-mask-in-dataloader", (True,), dest="create_attention_mask_in_dataloader"),
)
_UNUSED = """
    --data-cache-path --per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
    --exit-signal-handler-for-dataloader --object-storage-cache-path --allow-ambiguous-pad-tokens
"""
IDLE = (
    *map(MegatronFlag, _UNUSED.split()),
    MegatronFlag("--num-dataset-builder-threads", (1,)),
    MegatronFlag("--num-workers", (2,)),
    MegatronFlag("--mid-level-dataset-surplus", (0.005,)),
)
_OF_SAMPLES = frozenset(
    ("--data-cache-path", "--num-dataset-builder-threads", "--mid-level-dataset-surplus", "--allow-ambiguous-pad-tokens")
)
"""Flags in `IDLE` that have an effect on Megatron's own samples, with `--epp-documents stream`."""
_IN_ITERATIONS = "use its kin in iterations: a batch has as many samples as fit --epp-batch-tokens"
COUNTING = (
    MegatronFlag("--train-samples", advice=_IN_ITERATIONS),
    MegatronFlag("--lr-decay-samples", advice=_IN_ITERATIONS),
    MegatronFlag("--lr-warmup-samples", (None, 0), _IN_ITERATIONS),
    MegatronFlag("--override-ckpt-iteration", advice="leave it out: iterations do not tell how many samples were consumed"),
)
"""Flags for which every batch has --global-batch-size samples."""
EOD = MegatronFlag("--eod-mask-loss")


def tell_data_flags(args: argparse.Namespace) -> None:
    """Log once which of the given data flags, before Megatron completes them, have no effect, and why."""
    if args.rank != 0:
        return
    if args.epp_documents == "stream":
        if idle := _given(tuple(row for row in IDLE if row.flag not in _OF_SAMPLES), args):
            logger.warning("--epp makes no use of %s: Megatron's samples are read without loader processes", idle)
        return
    if implied := _given(IMPLIED, args):
        logger.warning(
            "--epp implies %s: documents are sequences by themselves, attend to no other, and have positions from 0", implied
        )
    if idle := _given(IDLE, args):
        logger.warning(
            "--epp makes no use of %s: documents are read from their files as they are, without caches, loader processes or "
            "padding",
            idle,
        )
    if EOD.is_given(args):
        logger.warning(
            "--eod-mask-loss masks the loss behind end-of-document tokens, as in Megatron, and --epp predicts nothing behind a "
            "document's last token: only those inside of documents are masked"
        )


def tell_saved_optimizer(args: argparse.Namespace) -> None:
    """Say once in which layouts the optimizer state that a run saves can be loaded; warn where its values would be wrong."""
    if args.rank != 0 or not (args.save and args.use_distributed_optimizer):
        return
    if args.num_experts:
        ranks = args.expert_model_parallel_size
        bound = "2 or more" if ranks > 1 else "1"
        logger.info("optimizer state saved with --expert-model-parallel-size %d loads only with %s, in any form", ranks, bound)
    if not args.dist_ckpt_optim_fully_reshardable:
        logger.info(
            "--save keeps optimizer state in a form that loads with any number of replicas, and only with the same tensor- and "
            "pipeline-parallel layout: --dist-ckpt-optim-fully-reshardable keeps it for every layout"
        )
    elif args.overlap_grad_reduce and not saves_several_buckets_resharded():
        logger.warning(
            "megatron-core %s saves wrong optimizer state for --dist-ckpt-optim-fully-reshardable where --overlap-grad-reduce "
            "divides gradients into several buckets (NVIDIA/Megatron-LM pull request 5077): leave one of them out, or add "
            "--ddp-num-buckets 1",
            installed_version(),
        )


def tell_unknown_optimizer(args: argparse.Namespace) -> None:
    """Warn once if the memory of the run's optimizer is not known to plans."""
    if args.rank == 0 and (kind := getattr(args, "optimizer", None)) not in (None, *KINDS):
        logger.warning(
            "memory of --optimizer %s is not known: plans count that of Adam; where it has more, lower --epp-memory-cap-gb",
            kind,
        )


def _given(flags: tuple[MegatronFlag, ...], args: argparse.Namespace) -> str:
    return ", ".join(row.flag for row in flags if row.is_given(args))


def prepare_epp_args(args: argparse.Namespace) -> None:
    """Check and complete the namespace before Megatron validates it.

    Raises:
        ArgumentError: flags cannot be honoured together with `--epp`, or need it and it is missing; the message has one line
            per problem.
    """
    if not getattr(args, "epp", False):
        _check_forgotten(args)
        return
    problems: list[str] = []
    for check in _CHECKS:
        try:
            problems += check(args) or ()
        except ArgumentError as error:
            problems.append(str(error))
    if problems:
        raise ArgumentError("\n".join(problems))
    tell_data_flags(args)
    tell_saved_optimizer(args)
    tell_unknown_optimizer(args)
    apply_layout(args)
    # Megatron copies it to the configs of the model and of data parallelism, which then leaves reductions to `backward_dw`.
    args.delay_wgrad_compute = _splits(args) and args.transformer_impl == "transformer_engine"
    args.micro_batch_size = 1  # so that Megatron's number of microbatches is a replica's number of sequences
    args.dataloader_type = "external"  # Megatron then passes the iterators of a provider on as they are
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        if args.rank == 0:
            logger.warning("--epp weighs every token alike: --calculate-per-token-loss is now on")


def _check_forgotten(args: argparse.Namespace) -> None:
    """Refuse flags of ours without `--epp`, which would train Megatron's samples by its own schedule without a word."""
    words = {word.partition("=")[0] for word in sys.argv}  # a flag may be given its default, which the namespace does not show
    ours = (row for row in TABLE if row.is_ours and row.setting not in ("epp", "allow_unknown_megatron"))
    idle = [
        row.training for row in ours if row.training in words or getattr(args, row.dest, None) not in (None, False, row.default)
    ]
    if idle:
        names, verb = ", ".join(idle), "do" if len(idle) > 1 else "does"
        raise ArgumentError(f"{names} {verb} nothing without --epp: add it, or leave {'them' if len(idle) > 1 else 'it'} out")


def refuse_restart(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` if the run is to be restarted within its processes (``--inprocess-restart``).

    Scripts set up the restart before they validate flags, and an error raised after that may merely restart the run.
    """
    if getattr(args, "epp", False):
        check_conflicts(args, (NO_RESTART,))


def _check_patterns(args: argparse.Namespace) -> None:
    if pattern := hybrid_pattern(args):
        check_pattern(pattern)


def _splits(args: argparse.Namespace) -> bool:
    return args.epp_split_weight_gradient and args.epp_schedule == "elastic"


def token_multiple(args: argparse.Namespace) -> int:
    """Multiple to which chunks' token counts are padded: the number of ranks that share a chunk's tokens."""
    return args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)


def placement_of(args: argparse.Namespace) -> Placement:
    """Return the placement of the pipeline's stages on ranks, from validated arguments."""
    ranks, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    return Placement(args.epp_placement, ranks, chunks)


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse a number outside its row's limits."""
    for row in TABLE:
        if not (row.is_ours and isinstance(read := row.read, Number)):
            continue
        setting = getattr(args, row.dest, None)
        for value in setting if isinstance(setting, list) else [setting]:
            if value is not None and not read.accepts(value):
                raise ArgumentError(f"{row.training} is {brief(value)}; it must be {read.must_be}")


def _share_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield why tokens or heads cannot be divided over the ranks that share a chunk."""
    multiple, slices = token_multiple(args), args.epp_slices or 1
    if args.seq_length is not None and args.seq_length < multiple * slices:
        yield (
            f"--seq-length {args.seq_length} is too short for {slices} slices of at least {multiple} tokens: "
            f"raise it to {multiple * slices}, or lower --epp-slices"
        )
    ranks, heads, tensor_ranks = args.context_parallel_size, args.num_attention_heads, args.tensor_model_parallel_size
    if ranks > 1 and args.epp_schedule == "stock":
        yield (
            "--epp-schedule stock runs Megatron's own attention, which shares out tokens in another order under "
            "--context-parallel-size: use --epp-schedule whole"
        )
    if heads is not None and heads % (tensor_ranks * ranks) != 0:
        yield (
            f"--num-attention-heads {heads} cannot be shared evenly by --tensor-model-parallel-size {tensor_ranks} x "
            f"--context-parallel-size {ranks} ranks: make it a multiple of {tensor_ranks * ranks}"
        )


def _batch_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the settings that are incompatible with batches of a number of tokens."""
    if args.epp_batch_tokens is None:
        return
    if args.epp_schedule != "elastic":
        yield f"--epp-batch-tokens is for --epp-schedule elastic, not {args.epp_schedule}: leave one of them out"
    if args.epp_documents == "stream":
        yield "--epp-batch-tokens is for sequences of different lengths: with --epp-documents stream use --global-batch-size"
    for conflict in COUNTING:
        if conflict.is_given(args):
            yield f"--epp-batch-tokens does not go with {conflict.flag} {getattr(args, conflict.attribute)} ({conflict.advice})"


def _plan_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the combinations of our own flags that are incompatible."""
    planner, budget_ms = args.epp_planner, args.epp_plan_budget_ms
    entry = PLANNERS.entry(planner)
    if entry is not None and entry.lacks:
        yield f"--epp-planner {planner} is planned, not run: training lacks {entry.lacks}; use --epp-planner greedy"
    if args.epp_offload == "off":
        if args.epp_host_memory_gb is not None:
            yield "--epp-host-memory-gb needs --epp-offload: add that, or leave this out"
    elif args.epp_offload == "on" or args.epp_host_memory_gb is not None:
        flag = "--epp-offload" if args.epp_offload == "on" else "--epp-host-memory-gb"
        if entry is not None and not entry.may_offload:
            yield f"{flag} is for --epp-planner greedy and orders of papers, not {planner}; leave one of them out"
        elif args.epp_recompute != "auto":
            yield f"{flag} is for offload, which takes the place of recompute where it can: leave --epp-recompute at auto"
    if budget_ms is not None and planner != "greedy":
        yield f"--epp-plan-budget-ms is for --epp-planner greedy, not {planner}; leave one of them out"
    elif budget_ms is not None and budget_ms >= 1000 * args.epp_wait_limit_seconds:
        yield (
            f"--epp-plan-budget-ms {budget_ms} is not below --epp-wait-limit-seconds {args.epp_wait_limit_seconds:g}: the run "
            "would end while it plans"
        )
    if args.epp_documents == "stream" and (resets := _given(IMPLIED[:3], args)):
        yield f"--epp-documents stream runs samples across documents: leave out {resets}, or use --epp-documents split"
    if args.epp_order == GIVEN:
        yield f"--epp-order {GIVEN} is for --epp-microbatches user: leave it out, documents are cut and packed by the plan"
    if args.epp_costs == "measure":
        yield (
            "--epp-costs measure has gone: use learn, which fits costs to the first iterations of training, or a file that "
            "`megatron-epp profile -o FILE` writes"
        )
    if args.epp_trace is not None and args.epp_report_dir is None:
        yield "--epp-trace needs --epp-report-dir to write to"
    # The flag makes Transformer Engine, and Megatron's data parallelism with it, delay weight gradients, as plans with W need.
    if args.delay_wgrad_compute and not _splits(args):
        yield "--epp puts off weight gradients with --epp-split-weight-gradient: leave out --delay-wgrad-compute"


OPTIONAL = {"epp_overlap_exchanges": "megatron_epp.contrib.overlap.flags:problems"}
"""Switches of other packages, each with the function that yields what is incompatible with it, imported if it is on."""


def _optional_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield the settings that are incompatible with switches of other packages."""
    for attribute, where in OPTIONAL.items():
        if getattr(args, attribute):
            yield from resolve_name(where)(args)


_CHECKS: tuple[Callable[[argparse.Namespace], Iterable[str] | None], ...] = (
    check_conflicts,
    check_weight_shards,
    check_layout,
    _check_numbers,
    _share_problems,
    layout_problems,
    check_stages,
    _batch_problems,
    loss_problems,
    _plan_problems,
    _optional_problems,
    vocabulary_problems,
    _check_patterns,
    *(kind.problems for kind in LAYER_KINDS),
)
