"""Checks of Megatron's flags against the `--epp-*` flags, and values that follow from both."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator

from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.flag import Number
from megatron_epp.mcore.arguments.refused import NO_RESTART, check_conflicts, tell_data_flags
from megatron_epp.mcore.arguments.sizes import check_experts, check_layout, check_pattern, check_stages
from megatron_epp.mcore.arguments.table import TABLE
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.reading import shown

logger = logging.getLogger(__name__)


def prepare_epp_args(args: argparse.Namespace) -> None:
    """Check and complete the namespace before Megatron validates it.

    Raises:
        ArgumentError: flags cannot be honoured together with `--epp`; the message has one line per problem.
    """
    if not getattr(args, "epp", False):
        return
    problems = []
    for check in _CHECKS:
        try:
            check(args)
        except ArgumentError as error:
            problems.append(str(error))
    problems += [*_layout_problems(args), *_plan_problems(args)]
    if problems:
        raise ArgumentError("\n".join(problems))
    tell_data_flags(args)
    args.delay_wgrad_compute = _splits(args) and args.transformer_impl == "transformer_engine"
    args.micro_batch_size = 1
    args.dataloader_type = "external"
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        if args.rank == 0:
            logger.warning("--epp weighs every token alike: --calculate-per-token-loss is now on")


def refuse_restart(args: argparse.Namespace) -> None:
    """Raise `ArgumentError` if the run is to be restarted within its processes (``--inprocess-restart``).

    Scripts set up the restart before they validate flags, and an error raised after that may merely restart the run.
    """
    if getattr(args, "epp", False):
        check_conflicts(args, (NO_RESTART,))


def _check_patterns(args: argparse.Namespace) -> None:
    for name in ("layer", "override"):
        if pattern := getattr(args, f"hybrid_{name}_pattern", None):
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
        given = getattr(args, row.dest, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not read.accepts(value):
                raise ArgumentError(f"{row.training} is {shown(value)}; it must be {read.must_be}")


def _layout_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with the tokens and heads of a chunk's ranks."""
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


def _plan_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield which of our own flags do not go together."""
    planner, budget_ms = args.epp_planner, args.epp_plan_budget_ms
    if args.epp_recompute != "auto" and planner == "milp":
        yield "--epp-planner milp chooses recompute itself: leave --epp-recompute at auto"
    if args.epp_offload == "off":
        if args.epp_host_memory_gb is not None:
            yield "--epp-host-memory-gb needs --epp-offload: add that, or leave this out"
    elif planner != "greedy":
        yield f"--epp-offload is for --epp-planner greedy, not {planner}; leave one of them out"
    elif args.epp_recompute != "auto":
        yield "--epp-offload takes the place of recompute where it can: leave --epp-recompute at auto"
    if budget_ms is not None and planner != "greedy":
        yield f"--epp-plan-budget-ms is for --epp-planner greedy, not {planner}; leave one of them out"
    elif budget_ms is not None and budget_ms >= 1000 * args.epp_wait_limit_seconds:
        yield (
            f"--epp-plan-budget-ms {budget_ms} is not below --epp-wait-limit-seconds {args.epp_wait_limit_seconds:g}: the run "
            "would end while it plans"
        )
    if args.epp_trace is not None and args.epp_report_dir is None:
        yield "--epp-trace needs --epp-report-dir to write to"
    # The flag makes Transformer Engine, and Megatron's data parallelism with it, delay weight gradients, as plans with W need.
    if args.delay_wgrad_compute and not _splits(args):
        yield "--epp puts off weight gradients with --epp-split-weight-gradient: leave out --delay-wgrad-compute"


_CHECKS = (check_conflicts, check_layout, _check_numbers, check_stages, check_experts, _check_patterns)
