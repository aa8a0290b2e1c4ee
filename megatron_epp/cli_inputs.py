"""Flags of the commands that plan: the batch, the pipeline and the model, and what they become."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Literal

from megatron_epp.cli_lengths import add_batch, lengths_of
from megatron_epp.cost import PipelineCosts, Profile, Rates, analytic_profile, on_device
from megatron_epp.cost.head import AUTO
from megatron_epp.cost.library import (
    RATES,
    Cluster,
    balanced_layers,
    even_layers,
    load_cluster,
    load_costs,
    load_flags,
    shape_of,
    shipped,
)
from megatron_epp.cost.memory import FRAGMENTATION_SHARE
from megatron_epp.planner import PLANNERS, UNLIMITED_BYTES, Options, Problem
from megatron_epp.schedule.errors import EppError

_MODEL: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 8,
    "vocab_size": 128256,
    "swiglu": True,
    "bf16": True,
}
"""Without --model: as Llama 3 8B, so that planning needs no YAML."""
PLANNER_NAMES = f"{', '.join(sorted(PLANNERS))}, or module:function"
_HEADROOM = 0.9
"""Share of a device's memory that a plan may fill where no cap is given."""


def add_problem(parser: argparse.ArgumentParser, several_batches: bool = False) -> None:
    """Add the flags. Those that Megatron has too also go by Megatron's names, those of the plugin also by ``--epp-...``.

    Args:
        several_batches: the flags that name batches may be given several times.
    """
    add_batch(parser, several_batches)
    _add_pipeline(parser)
    _add_memory(parser)
    _add_costs(parser)


def add_planner(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names who plans."""
    names = "--planner", "--epp-planner"
    parser.add_argument(
        *names, type=planner, metavar="NAME", default="greedy", help=f"who plans: {PLANNER_NAMES} (default: greedy)"
    )


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    pipeline = parser.add_argument_group("pipeline")
    names = ("--stages", "--pipeline-size", "--pipeline-model-parallel-size")
    _count(pipeline, *names, default=4, help="pipeline stages, one per rank (default: 4)")
    pipeline.add_argument(
        "--layers-per-stage",
        default="even",
        metavar="even|balanced|N,N,...",
        help="balanced: fewer where the vocabulary's work comes on top (default: even)",
    )
    _count(pipeline, "--chunk-tokens", "--epp-chunk-tokens", help="most tokens of a chunk (default: no limit)")
    _count(pipeline, "--slices", "--epp-slices", help="slices of the longest sequence (default: the planner chooses)")
    _count(pipeline, "--token-multiple", default=1, help="pad chunks to a multiple of this many tokens (default: 1)")
    pipeline.add_argument(
        "--split-weight", "--epp-split-weight-gradient", action="store_true", help="weight gradients as actions of their own"
    )
    pipeline.add_argument("--steps", type=_whole, default=0, metavar="N", help="of local search (default: 0)")
    _count(
        pipeline,
        "--plan-budget-ms",
        "--epp-plan-budget-ms",
        help="time for planning: what the planner greedy leaves of it goes to local search; what that finds depends on the "
        "machine, unlike with --steps (default: none)",
    )
    pipeline.add_argument("--seed", type=int, default=0, metavar="S", help="of the planner's search (default: 0)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--memory-cap-gb",
        "--memory-gb",
        "--epp-memory-cap-gb",
        type=positive_number,
        metavar="GB",
        help="what one rank may hold, in 2^30 bytes, weights and optimizer included "
        "(default: 90%% of the --cluster's device memory; no cap without)",
    )
    memory.add_argument(
        "--fragmentation-share",
        "--epp-fragmentation-share",
        type=_share,
        metavar="SHARE",
        help="of what chunks hold, what to allow for gaps between an allocator's blocks, 0 to 1 (default: 0.05, with "
        "--rates cpu 0)",
    )
    memory.add_argument(
        "--recompute",
        "--epp-recompute",
        default="auto",
        metavar="auto|N",
        help="layers per stage that recompute in backward: as few as the cap allows, or a number (default: auto)",
    )
    memory.add_argument(
        "--recompute-levels",
        "--epp-recompute-levels",
        choices=["whole", "all"],
        default="all",
        help="what a layer may recompute: itself whole, or also all but core attention, or MLP and norms (default: all)",
    )
    memory.add_argument(
        "--offload",
        "--epp-offload",
        nargs="?",
        choices=["on", "off"],
        const="on",
        default="off",
        help="copy activations to the host and back where that is faster than recompute (default: off)",
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group(
        "costs", "from a profile, or by formula from a model and a machine (default: an 8B model)"
    )
    costs.add_argument(
        "--costs", metavar="FILE", help="what `megatron-epp profile` or a training run wrote, in place of formulas"
    )
    add_model(costs)
    costs.add_argument(
        "--cluster", metavar="NAME|FILE", help=f"YAML of a machine's rates; shipped: {', '.join(shipped('clusters'))}"
    )
    costs.add_argument("--rates", choices=sorted(RATES), help="the machine the formulas assume (default: h100)")
    _count(
        costs,
        "--data-parallel",
        default=1,
        help="replicas, which share the optimizer's state (default: 1)",
    )


def add_model(costs: argparse._ArgumentGroup) -> None:
    """Add the flags that make a model's shape, and those that say which ranks share it."""
    add_shape(costs)
    _count(costs, "--tensor-parallel", "--tensor-model-parallel-size", help="ranks that share a layer (default: 1)")
    costs.add_argument("--sequence-parallel", action="store_true", help="they share the tokens between matrix products too")
    _count(costs, "--context-parallel", "--context-parallel-size", help="ranks that share the tokens (default: 1)")
    _count(costs, "--expert-parallel", "--expert-model-parallel-size", help="ranks that share the experts (default: 1)")


def add_shape(costs: argparse._ArgumentGroup) -> None:
    """Add the flags that make a model's shape."""
    costs.add_argument(
        "--model", metavar="NAME|FILE", help=f"YAML of Megatron's flags; shipped: {', '.join(shipped('models'))}"
    )
    _count(costs, "--layers", "--num-layers", help="transformer layers (default: 32)")
    _count(costs, "--hidden", "--hidden-size", help="width of the residual stream (default: 4096)")
    _count(costs, "--ffn", "--ffn-hidden-size", help="width inside the MLP, or inside an expert (default: 14336)")
    _count(costs, "--heads", "--num-attention-heads", help="query heads (default: 32)")
    _count(costs, "--kv-heads", "--num-query-groups", help="key and value heads (default: 8)")
    _count(costs, "--vocab", "--vocab-size", help="vocabulary size (default: 128256)")
    costs.add_argument("--no-gated-mlp", action="store_true", help="one input projection, not two (SwiGLU)")
    _count(costs, "--experts", "--num-experts", help="experts per layer (default: none)")
    _count(costs, "--experts-per-token", "--moe-router-topk", help="experts a token passes (default: 2)")
    _count(costs, "--bytes-per-value", help="of activations: 2 for bf16, 4 for fp32 (default: 2)")
    costs.add_argument(
        "--loss-block-tokens",
        "--epp-loss-block-tokens",
        type=_blocks,
        metavar="auto|N|0",
        help="tokens of a block of the loss, whose logits are made again in backward; 0 for all of a chunk at once (default: "
        "auto, blocks where the longest sequence has more than 2 GiB of fp32 logits on a rank)",
    )


def problem_of(args: argparse.Namespace, lengths: tuple[int, ...] | None = None) -> Problem:
    """The problem of one batch.

    Args:
        args: parsed flags.
        lengths: of the batch; None for the one that the flags name.

    Raises:
        EppError: the lengths, or the cluster's file, are not what they should be.
    """
    cap_bytes = cap_of(args.memory_cap_gb, _cluster(args))
    return Problem(
        lengths=lengths_of(args) if lengths is None else lengths,
        placement=tuple(range(args.stages)),
        cap_bytes=(cap_bytes,) * args.stages,
        token_multiple=args.token_multiple,
        forward_only=args.forward_only,
    )


def cap_of(given_gb: float | None, cluster: Cluster | None) -> int:
    """Bytes that a rank may hold: as given, or most of the cluster's device memory."""
    if given_gb is None and cluster is not None and cluster.device_memory_gb is not None:
        given_gb = _HEADROOM * cluster.device_memory_gb
    return UNLIMITED_BYTES if given_gb is None else int(given_gb * 2**30)


def options_of(args: argparse.Namespace, planner: str) -> Options:
    """Raises `EppError` when ``--recompute`` is neither auto nor a number."""
    if args.recompute != "auto" and not args.recompute.isdecimal():
        raise EppError(f"--recompute {args.recompute}: give auto or a number of layers")
    recompute: Literal["auto"] | int = "auto" if args.recompute == "auto" else int(args.recompute)
    return Options(
        chunk_tokens=args.chunk_tokens,
        slices=args.slices,
        context=args.context,
        recompute=recompute,
        recompute_levels=args.recompute_levels,
        planner=planner,
        split_weight=args.split_weight,
        offload=args.offload == "on",
        steps=args.steps,
        budget_ms=args.plan_budget_ms,
        seed=args.seed,
    )


def costs_of(args: argparse.Namespace, longest: int) -> PipelineCosts:
    """Costs of the pipeline that the flags name.

    Args:
        args: parsed flags.
        longest: tokens of the longest sequence.

    Raises:
        EppError: a file cannot be read, a flag does not fit the model, or the layers do not make the stages.
    """
    flags = flags_of(args)
    if args.costs is None:
        profile = analytic_profile(shape_of(flags | {"seq_length": args.context or longest}), _rates(args))
    else:
        stored = load_costs(args.costs)
        if isinstance(stored, PipelineCosts):
            share = args.fragmentation_share
            return stored if share is None else replace(stored, fragmentation_share=share)
        profile = stored
    num_layers = flags["num_layers"] if args.costs is None or args.layers or args.model else profile.num_layers
    layers = _layers(args, profile, num_layers)
    state_bytes = profile.adam_bytes(args.data_parallel)
    costs = profile.costs(layers, state_bytes_per_parameter=state_bytes, replicas=args.data_parallel)
    return on_device(costs, _fragmentation_share(args), buffers=profile.gradient_buffers(args.stages))


def _fragmentation_share(args: argparse.Namespace) -> float:
    if args.fragmentation_share is not None:
        return float(args.fragmentation_share)
    return 0.0 if args.rates == "cpu" else FRAGMENTATION_SHARE


def _layers(args: argparse.Namespace, profile: Profile, num_layers: int) -> tuple[int, ...]:
    """Layers of every stage."""
    if args.layers_per_stage == "even":
        return even_layers(num_layers, args.stages)
    if args.layers_per_stage == "balanced":
        return balanced_layers(profile, num_layers, args.stages)
    words = args.layers_per_stage.split(",")
    layers = tuple(int(word) for word in words if word.isdecimal())
    if len(layers) != len(words) or len(layers) != args.stages or sum(layers) != num_layers:
        raise EppError(
            f"--layers-per-stage {args.layers_per_stage}: give even, balanced, or {args.stages} whole numbers (one for each of "
            f"--stages) that add up to {num_layers} (--layers)"
        )
    return layers


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """Megatron's flags of the model: those of the file, or of an 8B model, and over them those given."""
    flags = dict(_MODEL) if args.model is None else dict(load_flags(args.model))
    given = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "ffn_hidden_size": args.ffn,
        "num_attention_heads": args.heads,
        "group_query_attention": True if args.kv_heads else None,
        "num_query_groups": args.kv_heads,
        "vocab_size": args.vocab,
        "swiglu": False if args.no_gated_mlp else None,
        "num_experts": args.experts,
        "moe_router_topk": args.experts_per_token,
        "bf16": None if args.bytes_per_value is None else args.bytes_per_value == 2,
        "tensor_model_parallel_size": args.tensor_parallel,
        "sequence_parallel": args.sequence_parallel or None,
        "context_parallel_size": args.context_parallel,
        "expert_model_parallel_size": args.expert_parallel,
        "epp_loss_block_tokens": args.loss_block_tokens,
    }
    return flags | {name: value for name, value in given.items() if value is not None}


def _cluster(args: argparse.Namespace) -> Cluster | None:
    return None if args.cluster is None else load_cluster(args.cluster)


def _rates(args: argparse.Namespace) -> Rates:
    if args.cluster is not None and args.rates is not None:
        raise EppError("--cluster and --rates both name a machine; give one of them")
    cluster = _cluster(args)
    return RATES[args.rates or "h100"] if cluster is None else cluster.rates


def _count(group: argparse._ArgumentGroup, *flags: str, **settings: Any) -> None:
    group.add_argument(*flags, type=count, metavar="N", **settings)


def count(text: str) -> int:
    """A whole number from 1, as argparse reads it."""
    if not (text.isdecimal() and len(text) < 16 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def planner(text: str) -> str:
    """A planner's name, as argparse reads it."""
    if ":" not in text and text not in PLANNERS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(sorted(PLANNERS))}, and no module:function")
    return text


def _whole(text: str) -> int:
    if not (text.isdecimal() and len(text) < 16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _blocks(text: str) -> str | int:
    return text if text == AUTO else _whole(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, 0 to 1")
    return value


def positive_number(text: str) -> float:
    """A number above 0, as argparse reads it."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value
