"""Rules about sizes: processes, batches and layers divide over replicas, ranks and stages; before Megatron completes flags.

Megatron's own assertions about them are left to it where they say as much (`start.validate`).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from megatron_epp.mcore.arguments.conflicts import Door
from megatron_epp.mcore.arguments.layout import LAYOUT_FLAG, PER_RANK, hybrid_pattern, is_open, readable_layout, token_multiple
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of

REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Parallel sizes whose product is the number of ranks of one data-parallel replica."""
_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
_LAYOUT = "--pipeline-model-parallel-layout"


def world_of(megatron: Mapping[str, Any]) -> int:
    """Number of ranks of one data-parallel replica. Raises EppError for a size below 1."""
    sizes = {name: 1 if megatron.get(name) is None else megatron[name] for name in REPLICA_SIZES}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise EppError(f"{flag_of(name)} is {size!r}; it must be a whole number from 1")
    return math.prod(sizes.values())


def replicas_of(args: Namespace, _: Door) -> Iterator[str]:
    """Yield which processes and sequences do not divide over replicas."""
    replica, processes = world_of(vars(args)), args.world_size
    if processes % replica:
        names = " x ".join(f"{flag_of(name)} {getattr(args, name)}" for name in REPLICA_SIZES)
        yield (
            f"the run has {processes} processes, but {names} takes {replica} for each replica: start a multiple of {replica}, "
            "or lower one of them"
        )
        return
    replicas = processes // replica
    for name in ("global_batch_size", "eval_global_batch_size"):
        batch = getattr(args, name, None)
        if batch is not None and (batch <= 0 or batch % replicas):
            yield (
                f"{flag_of(name)} {batch} does not divide over {replicas} data-parallel replicas ({processes} processes, "
                f"{replica} each): make it a multiple of {replicas}"
            )


def shares(args: Namespace, _: Door) -> Iterator[str]:
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
    if heads is not None and heads % tensor_ranks:
        yield (
            f"--num-attention-heads {heads} cannot be shared evenly by --tensor-model-parallel-size {tensor_ranks}: make it a "
            f"multiple of {tensor_ranks}"
        )


def stages(args: Namespace, _: Door) -> Iterator[str]:
    """Yield why flags describe no valid pipeline, or one that the requested schedule cannot run."""
    names = (flag[2:].replace("-", "_") for flag in (_PER_STAGE, PER_RANK, _LAYOUT))
    flags = [(flag_of(name), value) for name in names if (value := getattr(args, name, None)) is not None]
    if hybrid_pattern(args) or (len(flags) > 1 and args.epp_layout is None):
        return  # Megatron refuses two flags, and checks a pattern
    count = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    if is_open(args) and count != 0:  # and layers are divided as the run's data want it
        chunks = count or (2 if args.epp_placement == "v" else 1)
        flag, value = PER_RANK, chunks
    elif args.epp_layout is None:
        flag, value = flags[0] if flags else ("", 1)
        chunks = yield from _stages_of_layers(args, flag, value)
    else:
        layout = readable_layout(args)
        flag, value, chunks = LAYOUT_FLAG, args.epp_layout, None if layout is None else layout.placement.num_chunks
    if chunks is None:
        return
    ranks = args.pipeline_model_parallel_size
    if chunks > 1 and ranks < 2:
        yield (
            f"{flag} {value} puts {chunks} stages on a rank, which needs --pipeline-model-parallel-size 2 or more, not {ranks}"
        )
    if args.epp_placement == "v" and chunks < 2:
        yield f"--epp-placement v needs several stages on a rank: add {PER_RANK} 2, or leave it out"
    if chunks > 1 and args.epp_schedule != "elastic":
        yield from _of_interleaved(args)


def _stages_of_layers(args: Namespace, flag: str, value: int | str) -> Generator[str, None, int | None]:
    """Yield why layers do not divide over stages; return the number of stages on a rank, None if they do not.

    Args:
        flag: of Megatron's that says how many stages a rank has; empty for one.
    """
    layers, ranks = args.num_layers, args.pipeline_model_parallel_size
    if flag == _LAYOUT:
        counts = _layers_of_stages(str(value))
        if layers is not None and sum(counts) != layers:
            yield f"{flag} {value} has {sum(counts)} layers but --num-layers is {layers}"
        return len(counts) // ranks
    if (per := int(value)) < 1:
        yield f"{flag} is {value}; it must be at least 1"
        return None
    if any(getattr(args, name) is not None for name in _ENDS):
        if flag != _PER_STAGE:  # which Megatron refuses
            yield from _of_ends(args, flag, per)
        return per
    if layers is None:
        return per if flag == PER_RANK else 1
    extras = [f" and 1 for {flag_of(name)}" for name in _EXTRAS if getattr(args, name)]
    if (layers + len(extras)) % (ranks * per):
        over = {_PER_STAGE: f"{ranks} in stages of {flag} {per}", PER_RANK: f"{ranks} x {flag} {per}"}.get(flag, str(ranks))
        yield (
            f"--num-layers {layers}{''.join(extras)} cannot be shared evenly by --pipeline-model-parallel-size {over}: make it "
            f"a multiple of {ranks * per}, or give --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers, "
            f"or {_LAYOUT}"
        )
        return None
    return (layers + len(extras)) // ranks // per if flag == _PER_STAGE else per


_ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_EXTRAS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def _layers_of_stages(layout: str) -> list[int]:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return [stage.count(LayerType.decoder) for stage in PipelineParallelLayerLayout.parse_str_to_list(layout)]


def _of_ends(args: Namespace, flag: str, chunks: int) -> Iterator[str]:
    """Yield why layers that are counted separately for the first or the last rank cannot be shared."""
    ranks, others = args.pipeline_model_parallel_size, args.num_layers or 0
    counts = {}
    for name in _ENDS:
        if (layers := getattr(args, name)) is not None:
            counts[f"{flag_of(name)} {layers}"] = layers
            ranks, others = ranks - 1, others - layers
    if ranks > 0 and others % ranks:
        yield f"{others} of --num-layers {args.num_layers} are left for {ranks} ranks, who cannot share them"
        return
    if ranks > 0:
        counts[f"{others // ranks} of --num-layers {args.num_layers} for every other rank"] = others // ranks
    yield from (f"{layers} cannot be shared evenly by {flag} {chunks}" for layers, count in counts.items() if count % chunks)


def _of_interleaved(args: Namespace) -> Iterator[str]:
    """Yield what Megatron's interleaved schedule cannot run; Megatron uses it where a rank has several stages."""
    schedule, ranks = f"--epp-schedule {args.epp_schedule}", args.pipeline_model_parallel_size
    replicas = args.world_size // (ranks * args.tensor_model_parallel_size * args.context_parallel_size)
    if args.epp_placement == "v":
        yield (
            f"{schedule} runs Megatron's own pipeline, which is looped: leave out --epp-placement {args.epp_placement}, or use "
            "--epp-schedule elastic"
        )
    if args.epp_schedule == "packed":
        yield (
            f"{schedule} makes another number of microbatches of every batch, which Megatron's interleaved pipeline cannot "
            "run: leave out the flags that put several stages on a rank"
        )
    elif args.global_batch_size is not None and args.global_batch_size % (ranks * max(1, replicas)):
        yield (
            f"{schedule} runs Megatron's interleaved pipeline, which for each of {replicas} replicas wants a multiple of "
            f"--pipeline-model-parallel-size {ranks} documents: make --global-batch-size {args.global_batch_size} a multiple "
            f"of {ranks * replicas}"
        )
