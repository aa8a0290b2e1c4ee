"""The `--epp-*` flags, and what they rule out."""

from __future__ import annotations

import argparse
import logging
from typing import Any, NamedTuple

from megatron_epp.schedule import EppError

logger = logging.getLogger(__name__)


class ArgumentError(EppError):
    """Flags that do not go together. The message names them."""


def add_epp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to Megatron's parser, once."""
    if any(group.title == "elastic pipeline parallelism" for group in parser._action_groups):
        return parser
    group = parser.add_argument_group(title="elastic pipeline parallelism")
    add = group.add_argument
    add("--epp", action="store_true", help="Plan every iteration from the lengths of its sequences and run the plan.")
    add(
        "--epp-schedule",
        choices=["elastic", "stock", "whole", "padded", "packed"],
        default="elastic",
        help="elastic: our plans. The others run Megatron's own schedule on the same documents, for comparison. stock: one "
        "whole document per microbatch, with Megatron's attention; whole: the same with our attention; padded: each "
        "document padded to --seq-length; packed: documents packed up to --seq-length.",
    )
    add("--epp-planner", default="greedy", help="Who makes the plans (default: greedy).")
    add(
        "--epp-memory-cap-gb",
        type=float,
        metavar="GB",
        help="Memory one rank may hold, weights and optimizer included. Default: 90%% of the device's; none on CPU.",
    )
    add("--epp-chunk-tokens", type=int, metavar="N", help="Most tokens in one chunk. Default: chosen per batch.")
    add("--epp-slices", type=int, metavar="K", help="Slices of the longest sequence. Default: chosen per batch.")
    add(
        "--epp-recompute",
        default="auto",
        metavar="auto|N",
        help="Layers per stage that recompute in backward: auto (as few as the cap allows, per stage and chunk) or a number. "
        "Takes the place of --recompute-granularity and its kin.",
    )
    add(
        "--epp-costs",
        default="analytic",
        metavar="analytic|measure|FILE",
        help="Where predicted times come from: formulas, a short measurement at start-up (kept with the checkpoints, so that a "
        "resumed run plans alike), or a file.",
    )
    add("--epp-lookahead", type=int, default=2, metavar="N", help="Iterations to plan ahead of training (default: 2).")
    add(
        "--epp-wait-limit-seconds",
        type=float,
        default=600.0,
        metavar="S",
        help="End the run, naming the action, when an action, message or collective takes longer (default: 600).",
    )
    add("--epp-report-dir", metavar="DIR", help="Write each iteration's planned and measured figures here.")
    add(
        "--epp-trace-iteration",
        type=int,
        metavar="I",
        help="Write the plan and the measured times of every action of iteration I to --epp-report-dir.",
    )
    add("--epp-measure-memory", action="store_true", help="Count the bytes autograd keeps, per rank. Costs a little time.")
    add("--epp-allow-unknown-megatron", action="store_true", help="Patch a Megatron whose code is not known to work.")
    return parser


class _Conflict(NamedTuple):
    """A flag of Megatron's that a plan cannot honour."""

    attribute: str
    flag: str
    allowed: tuple[Any, ...]
    advice: str


_NO = (None, False, 0)
_CONFLICTS = (
    _Conflict("context_parallel_size", "--context-parallel-size", (1,), "set it to 1"),
    _Conflict("virtual_pipeline_model_parallel_size", "--num-layers-per-virtual-pipeline-stage", _NO, "leave it out"),
    _Conflict("pipeline_model_parallel_layout", "--pipeline-model-parallel-layout", _NO, "leave it out"),
    _Conflict("num_experts", "--num-experts", _NO, "use a dense model"),
    _Conflict("multi_latent_attention", "--multi-latent-attention", _NO, "leave it out"),
    _Conflict("mtp_num_layers", "--mtp-num-layers", _NO, "leave it out"),
    _Conflict("attention_dropout", "--attention-dropout", (0.0,), "set it to 0"),
    _Conflict("recompute_granularity", "--recompute-granularity", _NO, "use --epp-recompute"),
    _Conflict("recompute_activations", "--recompute-activations", _NO, "use --epp-recompute"),
    _Conflict("micro_batch_size", "--micro-batch-size", (1,), "set it to 1: a microbatch is one sequence"),
    _Conflict("rampup_batch_size", "--rampup-batch-size", _NO, "leave it out"),
    _Conflict("mock_data", "--mock-data", _NO, "give real documents with --data-path"),
    _Conflict("sft", "--sft", _NO, "leave it out"),
    _Conflict("fp8", "--fp8-format", _NO, "leave it out"),
    _Conflict("fp4", "--fp4-format", _NO, "leave it out"),
    _Conflict("use_megatron_fsdp", "--use-megatron-fsdp", _NO, "leave it out"),
    _Conflict("use_torch_fsdp2", "--use-torch-fsdp2", _NO, "leave it out"),
    _Conflict("window_size", "--window-size", _NO, "leave it out"),
    _Conflict("softmax_type", "--softmax-type", ("vanilla", None), "leave it out"),
    _Conflict("hybrid_context_parallel", "--hybrid-context-parallel", _NO, "leave it out"),
    _Conflict("fine_grained_activation_offloading", "--fine-grained-activation-offloading", _NO, "leave it out"),
    _Conflict("cpu_offloading", "--cpu-offloading", _NO, "leave it out"),
    _Conflict("delay_wgrad_compute", "--delay-wgrad-compute", _NO, "leave it out"),
    _Conflict("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm", _NO, "leave it out"),
    _Conflict("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", _NO, "leave it out"),
    _Conflict("iterations_to_skip", "--iterations-to-skip", (None, []), "leave it out"),
    _Conflict("full_validation", "--full-validation", _NO, "leave it out"),
    _Conflict("multiple_validation_sets", "--multiple-validation-sets", _NO, "leave it out"),
    _Conflict(
        "dataloader_type", "--dataloader-type", (None, "external"), "leave it out: documents are sampled by this package"
    ),
    _Conflict("fim_data", "--fim-data", _NO, "leave it out"),
    _Conflict("logits_load_dir", "--logits-load-dir", _NO, "leave it out"),
    _Conflict("cuda_graph_impl", "--cuda-graph-impl", ("none", None), "set it to none: shapes change every iteration"),
    _Conflict("enable_cuda_graph", "--enable-cuda-graph", _NO, "leave it out"),
    _Conflict("qk_clip", "--qk-clip", _NO, "leave it out"),
    _Conflict("perform_rl_step", "--perform-rl-step", _NO, "leave it out"),
)


def prepare_epp_args(args: argparse.Namespace) -> None:
    """Check and complete the namespace before Megatron validates it.

    Raises:
        ArgumentError: a flag cannot be honoured together with `--epp`; every such flag is named.
    """
    if not getattr(args, "epp", False):
        return
    clashes = [
        f"{c.flag} {value} ({c.advice})"
        for c in _CONFLICTS
        if (value := getattr(args, c.attribute, c.allowed[0])) not in c.allowed and c.attribute != "micro_batch_size"
    ]
    if args.micro_batch_size not in (None, 1):
        clashes.append(f"--micro-batch-size {args.micro_batch_size} (set it to 1: a microbatch is one sequence)")
    if clashes:
        raise ArgumentError("--epp cannot honour " + "; ".join(clashes))
    _check_values(args)
    args.micro_batch_size = 1
    args.dataloader_type = "external"
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        if args.rank == 0:
            logger.warning("--epp weighs every token alike: --calculate-per-token-loss is now on")


def _check_values(args: argparse.Namespace) -> None:
    for name, smallest in (("chunk_tokens", 1), ("slices", 1), ("lookahead", 1), ("trace_iteration", 1)):
        value = getattr(args, f"epp_{name}")
        if value is not None and value < smallest:
            raise ArgumentError(f"--epp-{name.replace('_', '-')} is {value}; it must be at least {smallest}")
    for name in ("memory_cap_gb", "wait_limit_seconds"):
        value = getattr(args, f"epp_{name}")
        if value is not None and value <= 0:
            raise ArgumentError(f"--epp-{name.replace('_', '-')} is {value}; it must be positive")
    if args.epp_recompute != "auto" and not args.epp_recompute.isdigit():
        raise ArgumentError(f"--epp-recompute is {args.epp_recompute!r}; it must be auto or a number of layers")
    if args.epp_trace_iteration is not None and args.epp_report_dir is None:
        raise ArgumentError("--epp-trace-iteration needs --epp-report-dir to write to")
