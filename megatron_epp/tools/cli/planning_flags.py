"""Flags of the commands that plan or take a model, and what is read from them: a batch, a pipeline, a machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from megatron_epp.cost.casts import recipe_of
from megatron_epp.cost.memory import DEVICE_SHARE
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import TRAINED_SHARE, OptimizerBytes
from megatron_epp.mcore.arguments.parser import add, names_of
from megatron_epp.mcore.arguments.table import FP8, OPTIMIZER, ROWS, SHAPE
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import ALLTOALL
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Lengths
from megatron_epp.plan.reading import naming_file
from megatron_epp.planner import UNLIMITED_BYTES, Problem
from megatron_epp.planner.validation import check_amounts
from megatron_epp.tools.cli.lengths import PARENTS, add_batch
from megatron_epp.tools.cli.terminal import PROGRAM, Parser, tell
from megatron_epp.tools.formulas import Profile, Rates, analytic_profile, library
from megatron_epp.tools.formulas.analytic import profile_for
from megatron_epp.tools.formulas.library import Cluster, load_costs, load_flags, shape_of
from megatron_epp.tools.formulas.parameters import parameters_of, summary

_SHAPE = tuple(row.setting for row in SHAPE)
SHAPE_FLAGS = ("model", *_SHAPE, "loss_block_tokens")  # settings of the flags that `add_shape` adds
OPTIMIZER_FLAGS = tuple(row.setting for row in OPTIMIZER)  # settings of the flags that `add_optimizer` adds
FP8_FLAGS = tuple(row.setting for row in FP8)  # settings of the flags of casts to FP8
_PARALLEL = ("tensor_parallel", "context_parallel", "expert_parallel", "expert_tensor_parallel")
_MODEL: dict[str, Any] = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "vocab_size": 128256}
_MODEL |= {"num_attention_heads": 32, "group_query_attention": True, "num_query_groups": 8, "swiglu": True, "bf16": True}
"""Model used without --model: the shape of Llama 3 8B, so that planning needs no YAML."""


def add_problem(parser: Parser, several_batches: bool = False) -> None:
    add_batch(parser, several_batches)
    pipeline = parser.add_argument_group("pipeline")
    add(pipeline, "num_stages", default=None)
    add(pipeline, "layout", "vocab_parallel", "chunk_tokens", "slices", "token_multiple", "split_weight", "overlap_exchanges")
    add(pipeline, "plan_limit_s", "seed")
    memory = parser.add_argument_group("memory")
    add(memory, "cap_bytes", "fragmentation_share", "recompute", "recompute_modes", "offload", "host_cap_bytes")
    sources = "from a profile, or by formula from a model and a machine (default: an 8B model)"
    costs = parser.add_argument_group("costs", sources)
    add(costs, "costs_file")
    add_model(costs)
    add(costs, *FP8_FLAGS)
    add(costs, "latents", default=None)
    add(costs, "cluster", "attention_kernel", "devices", "rates", "data_parallel")
    add_optimizer(parser.add_argument_group("optimizer", "Megatron's flags of its optimizer, as in training"))


def add_model(costs: argparse._ArgumentGroup) -> None:
    add_shape(costs)
    add(costs, "tensor_parallel", "sequence_parallel", *_PARALLEL[1:], "expert_dispatcher")


def add_shape(costs: argparse._ArgumentGroup) -> None:
    add(costs, "model", *_SHAPE)
    add(costs, "loss_block_tokens", default=None)


def add_optimizer(group: argparse._ArgumentGroup) -> None:
    """Add the flags that change the bytes of gradients and of the optimizer's states, and the number of what trains."""
    add(group, *OPTIMIZER_FLAGS, "trained_parameters")


def flags_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return Megatron's flags of the model and optimizer: from the file or an 8B model, with given flags taking precedence."""
    flags = dict(_MODEL) if args.model is None else dict(load_flags(args.model))
    rows = [ROWS[setting] for setting in (*_SHAPE, *_PARALLEL, *FP8_FLAGS, "loss_block_tokens", "latents")]
    values = {row.dest: getattr(args, row.short_dest, None) for row in (*rows, *OPTIMIZER) if row.training}
    values |= {row.dest: values[row.dest] or None for row in OPTIMIZER if row.is_switch}
    values |= {
        "group_query_attention": True if args.kv_heads else None,
        "swiglu": False if args.no_gated_mlp else None,
        "bf16": None if args.bytes_per_value is None else args.bytes_per_value == 2,
        "sequence_parallel": args.sequence_parallel or None,
    }
    if dispatcher := getattr(args, ROWS["expert_dispatcher"].short_dest, None):
        is_plain = dispatcher == ALLTOALL
        values |= {"moe_token_dispatcher_type": ALLTOALL if is_plain else "flex", "moe_flex_dispatcher_backend": dispatcher}
    flags |= {name: value for name, value in values.items() if value is not None}
    if (trained := getattr(args, "trained_parameters", None)) is not None:
        with of_model(args):
            flags[TRAINED_SHARE] = min(1.0, trained / parameters_of(flags))
    return flags


def tell_sharing(args: argparse.Namespace) -> None:
    """Log how a Hugging Face config was understood, and how many ranks share a layer where only the model's file says so."""
    if args.model is None or getattr(args, "costs", None) is not None:
        return
    flags, names = load_flags(args.model), names_of(args.parser)
    if library.is_config(args.model):
        tell(f"{PROGRAM}: model {args.model}: {summary(flags)}")
    for setting in _PARALLEL:
        ranks = flags.get(ROWS[setting].dest)
        if getattr(args, ROWS[setting].short_dest) is None and isinstance(ranks, int) and ranks > 1:
            what, flag = setting.replace("_parallel", " parallelism"), names[setting]
            tell(f"{PROGRAM}: model {args.model}: {what} over {ranks} ranks, as its file says; {flag} changes it")


def of_model(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Names the model's file in errors about its shape."""
    return nullcontext() if args.model is None else naming_file(f"--model {args.model}")


def token_multiple(args: argparse.Namespace) -> int:
    """Return the multiple to which chunks are padded: as given, or as a training pads them."""
    if args.token_multiple is not None:
        return int(args.token_multiple)
    with of_model(args):
        return library.token_multiple_of(flags_of(args))


def as_trained(args: argparse.Namespace, *batches: Lengths) -> list[Lengths]:
    """Return batches, without parents where the model runs every sequence by itself, which is told."""
    trained: list[Lengths]
    trained, note = resolve_name(f"{PARENTS}as_trained")(batches, flags_of(args))
    if note:
        tell(f"{PROGRAM}: {note}")
    return trained


def problem_of(args: argparse.Namespace, batch: Lengths, placement: Placement) -> Problem:
    cap_bytes = cap_of(args.memory_cap_gb, cluster_of(args))
    return Problem(
        batch.lengths,
        placement.rank_of,
        (cap_bytes,) * placement.num_ranks,
        token_multiple=token_multiple(args),
        forward_only=args.forward_only,
        host_cap_bytes=UNLIMITED_BYTES if args.host_memory_gb is None else int(args.host_memory_gb * 2**30),
        borrowed=batch.borrowed,
    )


def cap_of(given_gb: float | None, cluster: Cluster | None) -> int:
    """Bytes that a rank may hold: as given, or most of the cluster's device memory."""
    if given_gb is None and cluster is not None and cluster.device_memory_gb is not None:
        given_gb = DEVICE_SHARE * cluster.device_memory_gb
    return UNLIMITED_BYTES if given_gb is None else int(given_gb * 2**30)


def costs_of(args: argparse.Namespace, lengths: Sequence[int], layout: Layout, longest: int | None = None) -> PipelineCosts:
    """Return the costs of the pipeline that flags name; `longest` is of all batches. Raises `EppError`."""
    source, _ = costs_source(args, longest or max(lengths, default=0))
    if args.costs is None:
        assert isinstance(source, Profile)  # formulas make no other
        return costs_by(args, source, layout)
    with naming_file(f"--costs {args.costs}"):
        if isinstance(source, Profile):
            costs = costs_by(args, source, layout)
        else:
            share = args.fragmentation_share
            costs = source if share is None else replace(source, fragmentation_share=share)
        check_amounts(lengths, costs, token_multiple(args))
    return costs


def costs_source(args: argparse.Namespace, longest: int) -> tuple[Profile | PipelineCosts, int]:
    """Return costs of a file or formulas, and the number of layers; `longest` for want of ``--context``. Raises `EppError`."""
    flags = flags_of(args)
    if args.costs is None:
        with of_model(args):
            library.check_formulas(flags)
            shape = shape_of(flags | {"seq_length": args.context or longest})
        return analytic_profile(shape, _rates(args)).training(flags.get(TRAINED_SHARE, 1.0)), shape.num_layers
    stored = load_costs(args.costs)
    if isinstance(stored, PipelineCosts):
        if args.trained_parameters is not None:
            raise EppError(f"--costs {args.costs} has costs of stages as they have trained: leave --trained-parameters out")
        return stored, sum(stored.num_layers)
    with naming_file(f"--costs {args.costs}"), of_model(args):
        if flags.get("epp_latents") == "on" or flags.get("moe_layer_freq", 1) != 1 or recipe_of(flags):
            stored = profile_for(stored, shape_of(flags), _rates(args))
        stored = stored.training(flags.get(TRAINED_SHARE, 1.0))
        return stored, library.layers_of(flags) if args.layers or args.model else stored.num_layers


def costs_by(args: argparse.Namespace, profile: Profile, layout: Layout) -> PipelineCosts:
    flags = flags_of(args) | {"data_parallel_size": args.data_parallel}
    optimizer, share = OptimizerBytes.of_flags(flags, profile.weight_bytes), args.fragmentation_share
    share = 0.0 if share is None and args.rates == "cpu" else share
    return layout.costs_of(profile.costs_on_device(layout, optimizer, args.data_parallel, share), profile)


def has_costs_of_stages(args: argparse.Namespace) -> bool:
    """True if ``--costs`` names costs of a whole pipeline, whose layers per stage are fixed."""
    return args.costs is not None and isinstance(load_costs(args.costs), PipelineCosts)


def cluster_of(args: argparse.Namespace) -> Cluster | None:
    """Return the cluster that the flags name, with their attention kernel. Raises `EppError` for a bad file."""
    if args.cluster is None:
        return None
    cluster = library.load_cluster(args.cluster)
    if args.attention_kernel is None:
        return cluster
    if not cluster.rates.attention_kernel:
        own = f"cluster {cluster.name} has its own and names no attention_kernel: leave it out"
        raise EppError(f"--attention-kernel {args.attention_kernel}: rates of kernels are an H100's, and {own}")
    return replace(cluster, rates=replace(cluster.rates, attention_kernel=args.attention_kernel))


def _rates(args: argparse.Namespace) -> Rates:
    if args.cluster is not None and args.rates is not None:
        raise EppError("--cluster and --rates both name a machine; give one of them")
    cluster = cluster_of(args)
    if cluster is None:
        if args.devices is not None:
            raise EppError("--devices says how the devices of a --cluster are linked: name one, or leave it out")
        if args.attention_kernel is not None:
            raise EppError("--attention-kernel is of a --cluster of H100s or H200s: name one, or leave it out")
        return library.RATES[args.rates or "h100"]
    return cluster.rates if args.devices is None else cluster.linked(args.devices)
