"""Checks of Megatron's flags against the `--epp-*` flags, and values that follow from both."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron_epp.mcore.arguments.data_flags import tell_data_flags
from megatron_epp.mcore.arguments.errors import ArgumentError
from megatron_epp.mcore.arguments.expert_flags import check_experts
from megatron_epp.mcore.arguments.layout import check_layout, check_pattern
from megatron_epp.mcore.arguments.stage_flags import check_stages
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.reading import shown

logger = logging.getLogger(__name__)

_MOST_WHOLE = (1 << 31) - 1
"""Largest number of tokens, slices, iterations or milliseconds."""
_MOST_AMOUNT = 1e9
"""Largest size in GB, or time in seconds."""


class _Conflict(NamedTuple):
    """A Megatron flag that a plan cannot honour, or only with certain values."""

    flag: str
    allowed: tuple[Any, ...] = (None, False)
    advice: str = "leave it out"
    dest: str = ""

    @property
    def attribute(self) -> str:
        return self.dest or self.flag[2:].replace("-", "_")


_NO_RESTART = _Conflict(
    "--inprocess-restart", advice="leave it out: the watchdog of the run that failed goes on, and would end the restarted one"
)
_CONFLICTS = (
    _NO_RESTART,
    _Conflict("--attention-dropout", (0.0,), "set it to 0"),
    _Conflict("--cp-comm-type", (None, ["p2p"], ["a2a"]), "leave it out: heads are exchanged for tokens, as a2a does"),
    _Conflict("--hierarchical-context-parallel-sizes"),
    _Conflict("--micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    _Conflict("--eval-micro-batch-size", (None, 1), "set it to 1: a microbatch is one sequence"),
    _Conflict("--mock-data", advice="give real documents with --data-path"),
    _Conflict("--moe-token-dispatcher-type", (None, "allgather", "alltoall"), "use alltoall"),
    _Conflict("--recompute-granularity", advice="use --epp-recompute"),
    _Conflict("--recompute-activations", advice="use --epp-recompute"),
    _Conflict("--cuda-graph-impl", ("none", None), "set it to none: shapes change every iteration"),
    _Conflict("--dataloader-type", (None, "external"), "leave it out: documents are sampled by this package"),
    _Conflict("--softmax-type", ("vanilla",)),
    _Conflict("--fp8-format", dest="fp8"),
    _Conflict("--fp4-format", dest="fp4"),
    _Conflict("--check-for-spiky-loss", advice="leave it out: a chunk's loss is as large as the chunk"),
    _Conflict("--iterations-to-skip", ([], None)),
    _Conflict("--cpu-offloading-num-layers", (0, None)),
    _Conflict("--tp-comm-overlap", advice="leave it out: its buffers have one size, chunks have many"),
    _Conflict("--multi-latent-attention", advice="use grouped queries: slices hand on keys and values, not latents"),
    _Conflict("--mtp-num-layers", advice="leave it out: a slice's last tokens would need the next slice's first ones"),
    _Conflict(
        "--position-embedding-type", (None, "learned_absolute", "rope", "yarn", "none"), "use rope: angles are by position"
    ),
    *map(
        _Conflict,
        (
            "--experimental-attention-variant",
            "--log-max-attention-logit",
            "--window-size",
            "--qk-clip",
            "--sft",
            "--fim-data",
            "--use-varlen-dataset",
            "--use-legacy-models",
            "--sequence-packing-scheduler",
            "--use-megatron-fsdp",
            "--use-torch-fsdp2",
            "--hybrid-context-parallel",
            "--fine-grained-activation-offloading",
            "--defer-embedding-wgrad-compute",
            "--overlap-moe-expert-parallel-comm",
            "--overlap-param-gather-with-optimizer-step",
            "--enable-cuda-graph",
            "--external-cuda-graph",
            "--heterogeneous-layers-config-path",
            "--heterogeneous-layers-config-encoded-json",
            "--rampup-batch-size",
            "--step-batch-size-schedule",
            "--phase-transition-iterations",
            "--full-validation",
            "--multiple-validation-sets",
            "--logits-load-dir",
            "--perform-rl-step",
        ),
    ),
)


def prepare_epp_args(args: argparse.Namespace) -> None:
    """Check and complete the namespace before Megatron validates it.

    Raises:
        ArgumentError: flags cannot be honoured together with `--epp`; the message has one line per problem: all flags of
            `_CONFLICTS`, and the first problem that each of the other checks finds.
    """
    if not getattr(args, "epp", False):
        return
    problems = []
    for check in _CHECKS:
        try:
            check(args)
        except ArgumentError as error:
            problems.append(str(error))
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
        _check_conflicts(args, (_NO_RESTART,))


def _check_conflicts(args: argparse.Namespace, conflicts: Iterable[_Conflict] = _CONFLICTS) -> None:
    clashes = [
        f"{c.flag} {value} ({c.advice})"
        for c in conflicts
        if hasattr(args, c.attribute) and (value := getattr(args, c.attribute)) not in c.allowed
    ]
    if clashes:
        raise ArgumentError("--epp cannot honour " + "; ".join(clashes))


def _check_patterns(args: argparse.Namespace) -> None:
    for name in ("layer", "override"):
        if pattern := getattr(args, f"hybrid_{name}_pattern", None):
            check_pattern(pattern)


def _splits(args: argparse.Namespace) -> bool:
    return args.epp_split_weight_gradient and args.epp_schedule == "elastic"


def _check_weight_gradients(args: argparse.Namespace) -> None:
    """Refuse `--delay-wgrad-compute` unless plans split weight gradients.

    It makes Transformer Engine's layers, and Megatron's data parallelism with them, delay weight gradients, as such plans need.
    Megatron checks that the installed Transformer Engine can do so.
    """
    if args.delay_wgrad_compute and not _splits(args):
        raise ArgumentError("--epp puts off weight gradients with --epp-split-weight-gradient: leave out --delay-wgrad-compute")


def token_multiple(args: argparse.Namespace) -> int:
    """Multiple to which chunks' token counts are padded: the number of ranks that share a chunk's tokens."""
    return args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)


def placement_of(args: argparse.Namespace) -> Placement:
    """Return the placement of the pipeline's stages on ranks, from validated arguments."""
    ranks, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    return Placement(args.epp_placement, ranks, chunks)


def _check_context_parallel(args: argparse.Namespace) -> None:
    ranks = args.context_parallel_size
    if ranks > 1 and args.epp_schedule == "stock":
        raise ArgumentError(
            "--epp-schedule stock runs Megatron's own attention, which shares out tokens in another order under "
            "--context-parallel-size: use --epp-schedule whole"
        )
    heads, tensor_ranks = args.num_attention_heads, args.tensor_model_parallel_size
    if heads is not None and heads % (tensor_ranks * ranks) != 0:
        raise ArgumentError(
            f"--num-attention-heads {heads} cannot be shared evenly by --tensor-model-parallel-size {tensor_ranks} x "
            f"--context-parallel-size {ranks} ranks: make it a multiple of {tensor_ranks * ranks}"
        )


def _check_offload(args: argparse.Namespace) -> None:
    if args.epp_offload == "off":
        if args.epp_host_memory_gb is not None:
            raise ArgumentError("--epp-host-memory-gb is for --epp-offload; leave it out, or add that")
        return
    if args.epp_planner != "greedy":
        raise ArgumentError(f"--epp-offload is for --epp-planner greedy, not {args.epp_planner}; leave one of them out")
    if args.epp_recompute != "auto":
        raise ArgumentError("--epp-offload takes the place of recompute where it can: leave --epp-recompute at auto")


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("chunk_tokens", "slices", "lookahead", "trace", "plan_budget_ms"):
        given = getattr(args, f"epp_{name}")
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not 1 <= value <= _MOST_WHOLE:
                told = f"--epp-{name.replace('_', '-')} is {shown(value)}"
                raise ArgumentError(f"{told}; it must be at least 1, and at most {_MOST_WHOLE:,}")
    for name in ("memory_cap_gb", "wait_limit_seconds", "host_memory_gb"):
        value = getattr(args, f"epp_{name}")
        if value is not None and not 0 < value <= _MOST_AMOUNT:  # not a number compares with none
            raise ArgumentError(f"--epp-{name.replace('_', '-')} is {value}; it must be positive, and at most {_MOST_AMOUNT:g}")
    share = args.epp_fragmentation_share
    if share is not None and not 0 <= share <= 1:
        raise ArgumentError(f"--epp-fragmentation-share is {share}; it must be a share, 0 to 1")


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_MOST_WHOLE)) and int(text) <= _MOST_WHOLE


def _check_length(args: argparse.Namespace) -> None:
    multiple = token_multiple(args)
    needed = multiple * (args.epp_slices or 1)
    if args.seq_length is not None and args.seq_length < needed:
        raise ArgumentError(
            f"--seq-length {args.seq_length} is too short for {args.epp_slices or 1} slices of at least {multiple} tokens: "
            f"raise it to {needed}, or lower --epp-slices"
        )


def _check_recompute(args: argparse.Namespace) -> None:
    if args.epp_recompute != "auto" and not _is_whole(args.epp_recompute):
        raise ArgumentError(f"--epp-recompute is {shown(args.epp_recompute)}; it must be auto or a number of layers")
    if args.epp_recompute != "auto" and args.epp_planner == "milp":
        raise ArgumentError("--epp-planner milp chooses recompute itself: leave --epp-recompute at auto")


def _check_loss_blocks(args: argparse.Namespace) -> None:
    blocks = args.epp_loss_block_tokens
    if blocks != "auto" and not _is_whole(blocks):
        told = f"--epp-loss-block-tokens is {shown(blocks)}"
        raise ArgumentError(f"{told}; it must be auto or a number of tokens, 0 for no blocks")


def _check_budget(args: argparse.Namespace) -> None:
    budget_ms = args.epp_plan_budget_ms
    if budget_ms is not None and args.epp_planner != "greedy":
        raise ArgumentError(f"--epp-plan-budget-ms is for --epp-planner greedy, not {args.epp_planner}; leave one of them out")
    if budget_ms is not None and budget_ms >= 1000 * args.epp_wait_limit_seconds:
        raise ArgumentError(
            f"--epp-plan-budget-ms {budget_ms} is not below --epp-wait-limit-seconds {args.epp_wait_limit_seconds:g}: the run "
            "would end while it plans"
        )


def _check_trace(args: argparse.Namespace) -> None:
    if args.epp_trace is not None and args.epp_report_dir is None:
        raise ArgumentError("--epp-trace needs --epp-report-dir to write to")


_CHECKS = (
    _check_conflicts,
    check_layout,
    _check_numbers,
    _check_length,
    _check_context_parallel,
    check_stages,
    _check_recompute,
    _check_loss_blocks,
    _check_offload,
    _check_budget,
    _check_trace,
    _check_weight_gradients,
    check_experts,
    _check_patterns,
)
