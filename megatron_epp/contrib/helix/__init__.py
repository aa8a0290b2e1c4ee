"""HelixPipe (arXiv 2507.00394): attention of a layer on another rank than its weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

_REFUSED = {
    "epp_split_weight_gradient": ("on", True),
    "epp_vocab_parallel": ("on",),
    "epp_placement": ("v",),
    "epp_costs": ("learn",),
    "epp_loss": (),
    "num_experts": (),
    "multi_latent_attention": (True,),
    "attention_output_gate": (True,),
    "hybrid_layer_pattern": (),
    "mtp_num_layers": (),
    "window_attn_skip_freq": (),
    "softmax_type": ("off-by-one", "learnable"),
    "fp8": (),
}
"""Attributes of parsed flags with the values that plans of HelixPipe do not go with; without values, with all but None."""


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what does not go with ``--epp-planner helixpipe``."""
    what, ranks = "--epp-planner helixpipe", args.pipeline_model_parallel_size
    for name, values in _REFUSED.items():
        value = getattr(args, name, None)
        if value in values or (not values and value is not None):
            flag = "--fp8-format" if name == "fp8" else f"--{name.replace('_', '-')}"
            yield f"{what} does not go with {flag} {value}: leave one of them out"
    count, rest = divmod(args.num_layers, ranks)
    per_stage = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    chunks = count // per_stage if per_stage else getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1
    if rest or ranks < 2:
        yield f"{what} needs two ranks or more, with equally many layers: --num-layers {args.num_layers} is on {ranks}"
    elif chunks != count:
        yield f"{what} has a layer on each stage: add --num-virtual-stages-per-pipeline-rank {count}"
    if (args.save or args.load) and getattr(args, "ckpt_format", "torch_dist") != "torch_dist":
        yield f"{what} saves and loads by --ckpt-format torch_dist alone, not {args.ckpt_format}"
