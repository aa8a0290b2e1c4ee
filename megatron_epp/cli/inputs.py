"""Flags of the commands that plan: the batch, the pipeline and the machine, and what they become."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from megatron_epp.cli.lengths import add_batch, lengths_of
from megatron_epp.cli.model import add_count, add_model, flags_of, of_model
from megatron_epp.cli.types import planner, positive_number, seed, share, stages, whole
from megatron_epp.cost import PipelineCosts, Profile, Rates, analytic_profile, on_device
from megatron_epp.cost.library import (
    RATES,
    Cluster,
    balanced_layers,
    even_layers,
    layers_of,
    load_cluster,
    load_costs,
    shape_of,
    shipped,
)
from megatron_epp.cost.memory import DEVICE_SHARE, FRAGMENTATION_SHARE
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import MOST_LAYERS, naming, shown
from megatron_epp.planner import PLANNERS, UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner.amounts import check_amounts

PLANNER_NAMES = f"{', '.join(sorted(PLANNERS))}, or module:function"


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
    add_count(pipeline, *names, type=stages, default=4, help="pipeline stages, one per rank (default: 4)")
    pipeline.add_argument(
        "--layers-per-stage",
        default="even",
        metavar="even|balanced|N,N,...",
        help="balanced: fewer where the vocabulary's work comes on top, for sequences as long as these (default: even)",
    )
    add_count(pipeline, "--chunk-tokens", "--epp-chunk-tokens", help="most tokens of a chunk (default: no limit)")
    add_count(pipeline, "--slices", "--epp-slices", help="slices of the longest sequence (default: the planner chooses)")
    add_count(pipeline, "--token-multiple", default=1, help="pad chunks to a multiple of this many tokens (default: 1)")
    add_split_weight(pipeline)
    pipeline.add_argument("--steps", type=whole, default=0, metavar="N", help="of local search (default: 0)")
    add_count(
        pipeline,
        "--plan-budget-ms",
        "--epp-plan-budget-ms",
        help="time for planning: what the planner greedy leaves of it goes to local search; what that finds depends on the "
        "machine, unlike with --steps (default: none)",
    )
    pipeline.add_argument("--seed", type=seed, default=0, metavar="S", help="of the planner's search (default: 0)")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--memory-cap-gb",
        "--memory-gb",
        "--epp-memory-cap-gb",
        type=positive_number,
        metavar="GB",
        help="what one rank may hold, in 2^30 bytes, weights and optimizer included "
        f"(default: {100 * DEVICE_SHARE:.0f}%% of the --cluster's device memory; no cap without)",
    )
    memory.add_argument(
        "--fragmentation-share",
        "--epp-fragmentation-share",
        type=share,
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
    add_offload(memory)
    memory.add_argument(
        "--host-memory-gb",
        "--epp-host-memory-gb",
        type=positive_number,
        metavar="GB",
        help="host memory that --offload may take per rank, in 2^30 bytes (default: no limit)",
    )


def add_split_weight(group: argparse._ArgumentGroup) -> None:
    """Add the flag that plans weight gradients as separate actions."""
    names = "--split-weight", "--epp-split-weight-gradient"
    group.add_argument(*names, action="store_true", help="weight gradients as actions of their own (default: off)")


def add_offload(group: argparse._ArgumentGroup) -> None:
    """Add the flag that plans offload copies to host memory."""
    group.add_argument(
        "--offload",
        "--epp-offload",
        nargs="?",
        choices=["on", "off"],
        const="on",
        default="off",
        help="copy activations to the host and back where that is faster than recompute, and have keys and values of slices "
        "there where the rest does not fit otherwise (default: off)",
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group(
        "costs", "from a profile, or by formula from a model and a machine (default: an 8B model)"
    )
    costs.add_argument(
        "--costs", metavar="FILE", help="what `megatron-epp profile` or a training run wrote (default: formulas)"
    )
    add_model(costs)
    costs.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help=f"YAML of a machine; shipped: {', '.join(shipped('clusters'))} (default: --rates)",
    )
    costs.add_argument("--rates", choices=sorted(RATES), help="the machine the formulas assume (default: h100)")
    add_count(costs, "--data-parallel", default=1, help="replicas, which share the optimizer's state (default: 1)")


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
        host_cap_bytes=UNLIMITED_BYTES if args.host_memory_gb is None else int(args.host_memory_gb * 2**30),
    )


def cap_of(given_gb: float | None, cluster: Cluster | None) -> int:
    """Bytes that a rank may hold: as given, or most of the cluster's device memory."""
    if given_gb is None and cluster is not None and cluster.device_memory_gb is not None:
        given_gb = DEVICE_SHARE * cluster.device_memory_gb
    return UNLIMITED_BYTES if given_gb is None else int(given_gb * 2**30)


def options_of(args: argparse.Namespace, planner: str) -> Options:
    """Return the planner options of the flags. Raises `EppError` if ``--recompute`` is neither auto nor a number."""
    if args.recompute != "auto" and not _is_layers(args.recompute):
        raise EppError(f"--recompute {shown(args.recompute)}: give auto or a number of layers, up to {MOST_LAYERS:,}")
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


def costs_of(args: argparse.Namespace, lengths: Sequence[int], longest: int | None = None) -> PipelineCosts:
    """Costs of the pipeline that the flags name.

    Args:
        args: parsed flags.
        lengths: tokens of sequences like those to come, by which layers are balanced.
        longest: tokens of the longest there may be, where it is not among them.

    Raises:
        EppError: a file cannot be read, a flag does not fit the model, or the layers do not make the stages.
    """
    flags = flags_of(args)
    if args.costs is None:
        tokens = args.context or longest or max(lengths, default=0)
        with of_model(args):
            shape = shape_of(flags | {"seq_length": tokens})
        return _costs_by(args, analytic_profile(shape, _rates(args)), shape.num_layers, lengths)
    stored = load_costs(args.costs)
    with naming(f"--costs {args.costs}"):
        if isinstance(stored, PipelineCosts):
            costs = _of_stages(args, stored)
        else:
            with of_model(args):
                num_layers = layers_of(flags) if args.layers or args.model else stored.num_layers
            costs = _costs_by(args, stored, num_layers, lengths)
        check_amounts(lengths, costs, args.token_multiple)
    return costs


def _of_stages(args: argparse.Namespace, stored: PipelineCosts) -> PipelineCosts:
    """Costs of a whole pipeline, as far as flags may change them."""
    if args.layers_per_stage != "even":
        raise EppError("the stages have layers of their own: leave --layers-per-stage out")
    if len(stored.stages) != args.stages:
        raise EppError(f"these are costs of {len(stored.stages)} stages, not of {args.stages}: change --stages")
    share = args.fragmentation_share
    return stored if share is None else replace(stored, fragmentation_share=share)


def _costs_by(args: argparse.Namespace, profile: Profile, num_layers: int, lengths: Sequence[int]) -> PipelineCosts:
    """Costs of a pipeline of the model's parts."""
    layers = _layers(args, profile, num_layers, lengths)
    state_bytes = profile.adam_bytes(args.data_parallel)
    costs = profile.costs(layers, state_bytes_per_parameter=state_bytes, replicas=args.data_parallel)
    return on_device(costs, _fragmentation_share(args), buffers=profile.gradient_buffers(args.stages))


def has_costs_of_stages(args: argparse.Namespace) -> bool:
    """True if ``--costs`` names costs of a whole pipeline, whose layers per stage are fixed."""
    return args.costs is not None and isinstance(load_costs(args.costs), PipelineCosts)


def _fragmentation_share(args: argparse.Namespace) -> float:
    if args.fragmentation_share is not None:
        return float(args.fragmentation_share)
    return 0.0 if args.rates == "cpu" else FRAGMENTATION_SHARE


def _layers(args: argparse.Namespace, profile: Profile, num_layers: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Layers of every stage."""
    if args.layers_per_stage == "even":
        return even_layers(num_layers, args.stages)
    if args.layers_per_stage == "balanced":
        return balanced_layers(profile, num_layers, args.stages, lengths)
    words = args.layers_per_stage.split(",")
    layers = tuple(int(word) for word in words if _is_layers(word))
    if len(layers) != len(words) or len(layers) != args.stages or sum(layers) != num_layers:
        raise EppError(
            f"--layers-per-stage {shown(args.layers_per_stage)}: give even, balanced, or {args.stages} whole numbers (one for "
            f"each of --stages) that add up to {num_layers} (--layers)"
        )
    return layers


def _is_layers(text: str) -> bool:
    return text.isdecimal() and len(text) < 6 and int(text) <= MOST_LAYERS


def _cluster(args: argparse.Namespace) -> Cluster | None:
    return None if args.cluster is None else load_cluster(args.cluster)


def _rates(args: argparse.Namespace) -> Rates:
    if args.cluster is not None and args.rates is not None:
        raise EppError("--cluster and --rates both name a machine; give one of them")
    cluster = _cluster(args)
    return RATES[args.rates or "h100"] if cluster is None else cluster.rates
