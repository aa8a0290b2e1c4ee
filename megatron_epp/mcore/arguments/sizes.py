"""Checks before start-up that processes, sequences, layers and experts divide over ranks, and that all layers can run."""

from __future__ import annotations

import argparse

from megatron_epp.launch.command import REPLICA_SIZES, world_of
from megatron_epp.mcore.arguments import ArgumentError
from megatron_epp.mcore.arguments.layout import FLAG as LAYOUT
from megatron_epp.mcore.arguments.layout import asked_chunks, hybrid_pattern
from megatron_epp.mcore.model.kinds import KINDS

_REFUSED_LAYERS = {
    "M": "state-space (Mamba)",
    "G": "gated delta net",
    "D": "sparse attention (DSA)",
    "/": "multi-token prediction",
}
"""Names of layers that Megatron has and `kinds.KINDS` has not, by their symbol in `--hybrid-layer-pattern`."""
_BETWEEN_STAGES = "|"
_PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
_PER_RANK = "--num-virtual-stages-per-pipeline-rank"
_LAYOUT = "--pipeline-model-parallel-layout"


def check_layout(args: argparse.Namespace) -> None:
    """Raise `ArgumentError`, with flags and numbers, if a run's processes or sequences do not divide evenly over replicas."""
    replica = world_of(vars(args))
    names = [f"{_flag(name)} {getattr(args, name)}" for name in REPLICA_SIZES]
    if args.world_size % replica != 0:
        raise ArgumentError(
            f"the run has {args.world_size} processes, but {' x '.join(names)} takes {replica} for each replica: start a "
            f"multiple of {replica}, or lower one of them"
        )
    replicas = args.world_size // replica
    for name in ("global_batch_size", "eval_global_batch_size"):
        batch = getattr(args, name, None)
        if batch is None or (batch > 0 and batch % replicas == 0):
            continue
        raise ArgumentError(
            f"{_flag(name)} {batch} does not divide over {replicas} data-parallel replicas ({args.world_size} processes, "
            f"{replica} each): make it a multiple of {replicas}"
        )


def check_pattern(pattern: str | None) -> None:
    """Raise `ArgumentError` for a hybrid model with layers of other kinds than `KINDS`, or with the default layers (None)."""
    known = {kind.symbol: kind.name for kind in KINDS if kind.symbol}
    can = ", ".join(f"{name} ({symbol})" for symbol, name in known.items())
    if pattern is None:
        raise ArgumentError(f"--epp needs --hybrid-layer-pattern to know the layers of a hybrid model; layers of {can} can run")
    others = sorted(set(pattern) - {*known, _BETWEEN_STAGES}, key=pattern.index)
    refused = [f"{_REFUSED_LAYERS.get(symbol, 'unknown')} ({symbol})" for symbol in others]
    if refused:
        raise ArgumentError(
            f"--epp cannot run {', '.join(refused)} layers of --hybrid-layer-pattern {pattern}: slices of a sequence hand on "
            f"keys, values and latents, and no other state yet; layers of {can} can run"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_stages(args: argparse.Namespace) -> None:
    """Refuse flags that describe no valid pipeline, or one that the requested schedule cannot run, before Megatron uses them.

    Raises:
        ArgumentError: with the names of the flags.
    """
    flags = {
        flag: value
        for flag in (_PER_STAGE, _PER_RANK, _LAYOUT)
        if (value := getattr(args, flag[2:].replace("-", "_"), None)) is not None
    }
    if len(flags) > 1:
        raise ArgumentError(f"{' and '.join(flags)} each say how many stages a rank has: give one of them")
    if hybrid_pattern(args):
        return  # there the pattern says it, and Megatron checks it
    flag, value = next(iter(flags.items()), ("", None))
    if getattr(args, "epp_layout", None) is None:
        chunks = _chunks_per_rank(args, flag, value)
    else:
        layout_chunks, (flag, value) = asked_chunks(args), (LAYOUT, args.epp_layout)
        if layout_chunks is None:
            return
        chunks = layout_chunks
    ranks = args.pipeline_model_parallel_size
    if chunks > 1 and ranks < 2:
        raise ArgumentError(
            f"{flag} {value} puts {chunks} stages on a rank, which needs --pipeline-model-parallel-size 2 or more, not {ranks}"
        )
    if args.epp_placement == "v" and chunks < 2:
        raise ArgumentError(f"--epp-placement v needs several stages on a rank: add {_PER_RANK} 2, or leave it out")
    if chunks > 1 and args.epp_schedule != "elastic":
        _check_stock(args)


def _chunks_per_rank(args: argparse.Namespace, flag: str, value: int | str | None) -> int:
    ranks = args.pipeline_model_parallel_size
    if flag == _LAYOUT:
        return _check_layout(str(value), args.num_layers, ranks)
    if value is not None and int(value) < 1:
        raise ArgumentError(f"{flag} is {value}; it must be at least 1")
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if first is not None or last is not None:
        return _check_uneven(args, flag, value)
    total, summands = args.num_layers, f"--num-layers {args.num_layers}"
    if total is None:
        return int(value or 1) if flag == _PER_RANK else 1
    for extra, name in (
        (args.account_for_embedding_in_pipeline_split, "--account-for-embedding-in-pipeline-split"),
        (args.account_for_loss_in_pipeline_split, "--account-for-loss-in-pipeline-split"),
    ):
        total, summands = total + bool(extra), summands + f" and 1 for {name}" * bool(extra)
    if flag == _PER_STAGE:
        if total % (ranks * int(value or 1)):
            raise _indivisible(summands, f"{ranks} in stages of {flag} {value}", ranks * int(value or 1))
        return total // ranks // int(value or 1)
    chunks = int(value or 1)
    if total % (ranks * chunks):
        raise _indivisible(summands, f"{ranks} x {flag} {chunks}" if chunks > 1 else str(ranks), ranks * chunks)
    return chunks


def _indivisible(what: str, over: str, multiple: int) -> ArgumentError:
    return ArgumentError(
        f"{what} cannot be shared evenly by --pipeline-model-parallel-size {over}: make it a multiple of {multiple}, or give "
        f"--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers, or {_LAYOUT}"
    )


def _check_uneven(args: argparse.Namespace, flag: str, value: int | str | None) -> int:
    """Check layer counts given separately for the first or the last rank. Returns the number of stages per rank."""
    if flag == _PER_STAGE:
        raise ArgumentError(
            f"{flag} {value} needs as many layers on every rank: with --decoder-first-pipeline-num-layers or "
            f"--decoder-last-pipeline-num-layers use {_PER_RANK}"
        )
    chunks = int(value or 1)
    ranks, rest = args.pipeline_model_parallel_size, args.num_layers
    parts = []
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        own = getattr(args, name)
        if own is not None:
            parts.append((f"--{name.replace('_', '-')} {own}", own))
            ranks, rest = ranks - 1, (rest or 0) - own
    if ranks > 0:
        if rest % ranks:
            raise ArgumentError(f"{rest} of --num-layers {args.num_layers} are left for {ranks} ranks, who cannot share them")
        parts.append((f"{rest // ranks} of --num-layers {args.num_layers} for every other rank", rest // ranks))
    for layers, count in parts:
        if count % chunks:
            raise ArgumentError(f"{layers} cannot be shared evenly by {flag} {chunks}")
    return chunks


def _check_layout(layout: str, num_layers: int | None, ranks: int) -> int:
    """Check a `--pipeline-model-parallel-layout`. Returns the number of stages per rank."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    stages = PipelineParallelLayerLayout.parse_str_to_list(layout)
    if len(stages) % ranks:
        raise ArgumentError(
            f"{_LAYOUT} {layout} has {len(stages)} stages, which is not a multiple of --pipeline-model-parallel-size {ranks}"
        )
    layers = sum(stage.count(LayerType.decoder) for stage in stages)
    if num_layers is not None and layers != num_layers:
        raise ArgumentError(f"{_LAYOUT} {layout} has {layers} layers but --num-layers is {num_layers}")
    return len(stages) // ranks


def _check_stock(args: argparse.Namespace) -> None:
    """Refuse what Megatron's interleaved schedule cannot run; Megatron uses it where a rank has several stages."""
    schedule = f"--epp-schedule {args.epp_schedule}"
    if args.epp_placement != "looped":
        raise ArgumentError(
            f"{schedule} runs Megatron's own pipeline, which is looped: leave out --epp-placement {args.epp_placement}, or use "
            "--epp-schedule elastic"
        )
    if args.epp_schedule == "packed":
        raise ArgumentError(
            f"{schedule} makes another number of microbatches of every batch, which Megatron's interleaved pipeline cannot "
            "run: leave out the flags that put several stages on a rank"
        )
    ranks = args.pipeline_model_parallel_size
    replicas = args.world_size // (ranks * args.tensor_model_parallel_size * args.context_parallel_size)
    if args.global_batch_size is not None and args.global_batch_size % (ranks * max(1, replicas)):
        raise ArgumentError(
            f"{schedule} runs Megatron's interleaved pipeline, which for each of {replicas} replicas wants a multiple of "
            f"--pipeline-model-parallel-size {ranks} documents: make --global-batch-size {args.global_batch_size} a multiple "
            f"of {ranks * replicas}"
        )
