"""Why plans cannot run the layers that Megatron's flags ask for. Those of experts are in their file.

Flags are checked on machines without Megatron and torch, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator


def of_attention(args: argparse.Namespace) -> Iterator[str]:
    window, softmax = getattr(args, "window_size", None), getattr(args, "softmax_type", "vanilla")
    if window and (window[0] < 1 or window[1] != 0):
        yield f"--window-size {window[0]},{window[1]}: a window is N,0, of at least one token ahead of a token and none behind"
    if getattr(args, "multi_latent_attention", False) and (window or softmax != "vanilla"):
        flag = f"--window-size {window[0]},{window[1]}" if window else f"--softmax-type {softmax}"
        yield f"{flag} with --multi-latent-attention was never tried with slices: leave one of them out"


def of_latents(args: argparse.Namespace) -> Iterator[str]:
    if not args.multi_latent_attention:
        yield "--epp-latents on is for a model with --multi-latent-attention: leave it out"


def of_delta_nets(args: argparse.Namespace) -> Iterator[str]:
    ranks, heads = args.tensor_model_parallel_size * args.context_parallel_size, args.linear_num_key_heads
    if heads is not None and heads % ranks:
        yield (
            f"--linear-num-key-heads {heads} cannot be shared evenly by --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} x --context-parallel-size {args.context_parallel_size}"
        )


def of_mamba(args: argparse.Namespace) -> Iterator[str]:
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    ranks = f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context}"
    heads, groups = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim, args.mamba_num_groups
    if heads % (tensor * context):
        yield f"--mamba-num-heads {heads} cannot be shared evenly by {ranks}"
    on_rank = groups // tensor  # each goes to several context-parallel ranks if there are too few for all
    if groups % tensor or max(on_rank, context) % min(on_rank, context):
        yield f"--mamba-num-groups {groups} cannot be shared evenly by {ranks}"


def of_prediction(args: argparse.Namespace) -> Iterator[str]:
    depths, ranks = getattr(args, "mtp_num_layers", None), args.pipeline_model_parallel_size
    if not args.save:
        return
    if not args.untie_embeddings_and_output_weights and ranks > 1 and args.epp_placement != "v":
        yield (
            f"--mtp-num-layers {depths}, an output layer tied to the embedding and --pipeline-model-parallel-size {ranks} make "
            "a model that Megatron cannot save: add --untie-embeddings-and-output-weights, or leave --save out"
        )
