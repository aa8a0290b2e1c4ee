"""Flags of the commands that plan: the batch, the pipeline and the model, and what they become."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

from megatron_epp.cost import CPU, H100, ModelShape, PipelineCosts, analytic_costs
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.schedule.errors import EppError

_RATES = {"h100": H100, "cpu": CPU}


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the flags. Those that Megatron has too also go by Megatron's names, those of the plugin also by ``--epp-...``."""
    batch = parser.add_argument_group("batch")
    source = batch.add_mutually_exclusive_group(required=True)
    source.add_argument("--lengths", metavar="N,N,...", help="tokens of every sequence")
    source.add_argument("--lengths-file", metavar="FILE", help="numbers separated by spaces, commas or lines; - reads stdin")
    batch.add_argument("--forward-only", action="store_true", help="plan an evaluation, without backward")

    pipeline = parser.add_argument_group("pipeline")
    _count(pipeline, "--stages", "--pipeline-model-parallel-size", default=4, help="pipeline stages, one per rank (default: 4)")
    pipeline.add_argument(
        "--memory-cap-gb",
        "--epp-memory-cap-gb",
        type=_positive_number,
        metavar="GB",
        help="what one rank may hold, in 2^30 bytes, weights and optimizer included (default: no cap)",
    )
    _count(pipeline, "--chunk-tokens", "--epp-chunk-tokens", help="most tokens of a chunk (default: no limit)")
    _count(pipeline, "--slices", "--epp-slices", help="slices of the longest sequence (default: the planner chooses)")
    pipeline.add_argument(
        "--recompute",
        "--epp-recompute",
        default="auto",
        metavar="auto|N",
        help="layers per stage that recompute in backward: as few as the cap allows, or a number (default: auto)",
    )
    _count(pipeline, "--token-multiple", default=1, help="pad chunks to a multiple of this many tokens (default: 1)")

    costs = parser.add_argument_group("costs", "from a profile, or by formula from the model's shape (default: an 8B model)")
    costs.add_argument("--costs", metavar="FILE", help="a cost profile (JSON), in place of the flags below; it fixes --stages")
    costs.add_argument(
        "--rates", choices=sorted(_RATES), default="h100", help="the machine the formulas assume (default: h100)"
    )
    _count(costs, "--layers", "--num-layers", default=32, help="transformer layers (default: 32)")
    _count(costs, "--hidden", "--hidden-size", default=4096, help="width of the residual stream (default: 4096)")
    _count(costs, "--ffn", "--ffn-hidden-size", default=14336, help="width inside the MLP (default: 14336)")
    _count(costs, "--heads", "--num-attention-heads", default=32, help="query heads (default: 32)")
    _count(costs, "--kv-heads", "--num-query-groups", default=8, help="key and value heads (default: 8)")
    _count(costs, "--vocab", "--vocab-size", default=128256, help="vocabulary size (default: 128256)")
    costs.add_argument("--no-gated-mlp", dest="gated_mlp", action="store_false", help="one input projection, not two (SwiGLU)")
    _count(costs, "--bytes-per-value", default=2, help="of activations: 2 for bf16, 4 for fp32 (default: 2)")
    _count(costs, "--tensor-parallel", "--tensor-model-parallel-size", default=1, help="ranks that share a layer (default: 1)")
    costs.add_argument("--sequence-parallel", action="store_true", help="they share the tokens between matrix products too")


def problem_of(args: argparse.Namespace) -> Problem:
    """Raises `EppError` when the lengths are not what they should be."""
    cap_bytes = UNLIMITED_BYTES if args.memory_cap_gb is None else int(args.memory_cap_gb * 2**30)
    return Problem(
        lengths=_lengths(args),
        placement=tuple(range(args.stages)),
        cap_bytes=(cap_bytes,) * args.stages,
        token_multiple=args.token_multiple,
        forward_only=args.forward_only,
    )


def options_of(args: argparse.Namespace, planner: str) -> Options:
    """Raises `EppError` when ``--recompute`` is neither auto nor a number."""
    if args.recompute != "auto" and not args.recompute.isdecimal():
        raise EppError(f"--recompute {args.recompute}: give auto or a number of layers")
    recompute: Literal["auto"] | int = "auto" if args.recompute == "auto" else int(args.recompute)
    return Options(chunk_tokens=args.chunk_tokens, slices=args.slices, recompute=recompute, planner=planner)


def costs_of(args: argparse.Namespace) -> PipelineCosts:
    """Raises `EppError` when the profile cannot be read or the layers do not divide into the stages."""
    if args.costs is not None:
        return PipelineCosts.from_json(Path(args.costs).read_text(encoding="utf-8", errors="replace"))
    if args.layers % args.stages:
        raise EppError(f"{args.layers} layers do not divide into {args.stages} stages; change --layers or --stages")
    shape = ModelShape(
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=args.ffn,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_heads,
        vocab_size=args.vocab,
        gated_mlp=args.gated_mlp,
        bytes_per_value=args.bytes_per_value,
        tensor_parallel=args.tensor_parallel,
        sequence_parallel=args.sequence_parallel,
    )
    return analytic_costs(shape, _RATES[args.rates], [args.layers // args.stages] * args.stages)


def count(text: str) -> int:
    """A whole number from 1, as argparse reads it."""
    if not _is_count(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _count(group: argparse._ArgumentGroup, *flags: str, **settings: Any) -> None:
    group.add_argument(*flags, type=count, metavar="N", **settings)


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 16 and int(text) > 0


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def _lengths(args: argparse.Namespace) -> tuple[int, ...]:
    if args.lengths is not None:
        flag, text = "--lengths", args.lengths
    else:
        flag = f"--lengths-file {args.lengths_file}"
        text = (
            sys.stdin.read()
            if args.lengths_file == "-"
            else Path(args.lengths_file).read_text(encoding="utf-8", errors="replace")
        )
    words = text.replace(",", " ").split()
    if wrong := next((word for word in words if not _is_count(word)), None):
        raise EppError(f"{flag}: {wrong!r} is not a number of tokens (a whole number, 1 or more)")
    if not words:
        raise EppError(f"{flag}: no lengths")
    return tuple(int(word) for word in words)
