"""Flags of the commands that take a model: those that make its shape, and what they become."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron_epp.cli.types import blocks, count, layers
from megatron_epp.cost.library import load_flags, shipped
from megatron_epp.plan.reading import naming

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
"""Model used without --model: the shape of Llama 3 8B, so that planning needs no YAML."""


def add_model(costs: argparse._ArgumentGroup) -> None:
    """Add the flags that make a model's shape, and those that say which ranks share it."""
    add_shape(costs)
    add_count(costs, "--tensor-parallel", "--tensor-model-parallel-size", help="ranks that share a layer (default: 1)")
    costs.add_argument("--sequence-parallel", action="store_true", help="they share the tokens between matrix products too")
    add_count(costs, "--context-parallel", "--context-parallel-size", help="ranks that share the tokens (default: 1)")
    add_count(costs, "--expert-parallel", "--expert-model-parallel-size", help="ranks that share the experts (default: 1)")


def add_shape(costs: argparse._ArgumentGroup) -> None:
    """Add the flags that make a model's shape."""
    costs.add_argument(
        "--model",
        metavar="NAME|FILE",
        help=f"YAML of Megatron's flags; shipped: {', '.join(shipped('models'))} (default: like llama3-8b)",
    )
    add_count(costs, "--layers", "--num-layers", type=layers, help="transformer layers (default: 32)")
    add_count(costs, "--hidden", "--hidden-size", help="width of the residual stream (default: 4096)")
    add_count(costs, "--ffn", "--ffn-hidden-size", help="width inside the MLP, or inside an expert (default: 14336)")
    add_count(costs, "--heads", "--num-attention-heads", help="query heads (default: 32)")
    add_count(costs, "--kv-heads", "--num-query-groups", help="key and value heads (default: 8)")
    add_count(costs, "--vocab", "--vocab-size", help="vocabulary size (default: 128256)")
    costs.add_argument("--no-gated-mlp", action="store_true", help="one input projection, not two (SwiGLU)")
    add_count(costs, "--experts", "--num-experts", help="experts per layer (default: none)")
    add_count(costs, "--experts-per-token", "--moe-router-topk", help="experts a token passes (default: 2)")
    add_count(costs, "--bytes-per-value", help="of activations: 2 for bf16, 4 for fp32 (default: 2)")
    costs.add_argument(
        "--loss-block-tokens",
        "--epp-loss-block-tokens",
        type=blocks,
        metavar="auto|N|0",
        help="tokens of a block of the loss, whose logits are made again in backward; 0 for all of a chunk at once (default: "
        "auto, blocks where the longest sequence has more than 2 GiB of fp32 logits on a rank)",
    )


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


def of_model(args: argparse.Namespace) -> AbstractContextManager[None]:
    """Names the model's file in errors about its shape."""
    return nullcontext() if args.model is None else naming(f"--model {args.model}")


def add_count(group: argparse._ArgumentGroup, *flags: str, **settings: Any) -> None:
    """Add a flag that takes a whole number from 1, or one of the type given."""
    group.add_argument(*flags, type=settings.pop("type", count), metavar="N", **settings)
