"""HelixPipe (arXiv 2507.00394): attention of a layer on another rank than its weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from megatron_epp.mcore.arguments.rule import BOTH, Door, Rule, flags, problems_of

_ON = "does not go with --epp-planner helixpipe"
_NONE_OR_AUTO = (None, False, "off", "auto")
_RULES = (
    *flags("--num-experts --multi-latent-attention --mtp-num-layers --hybrid-layer-pattern --epp-loss", BOTH, say=_ON),
    *flags("--window-attn-skip-freq --attention-output-gate", BOTH, say=_ON),
    *flags("--epp-split-weight-gradient --epp-vocab-parallel", BOTH, say=_ON, allowed=_NONE_OR_AUTO),
    Rule("--fp8-format", say=_ON, use=BOTH, dest="fp8"),
    Rule("--softmax-type", say=_ON, use=BOTH, allowed=(None, "vanilla")),
    Rule("--epp-placement", say=_ON, use=BOTH, allowed=(None, "looped")),
    Rule("--epp-costs", lambda args: args.epp_costs == "learn", _ON, "use analytic"),
    *flags(
        "--save --load", "use torch_dist", when=lambda args: args.ckpt_format != "torch_dist", say=f"by {{ckpt_format}} {_ON}"
    ),
)


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield what does not go with ``--epp-planner helixpipe``."""
    yield from problems_of(args, Door.DOCUMENTS, _RULES)
    ranks, per_stage = args.pipeline_model_parallel_size, getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    (count, rest), has = divmod(args.num_layers, ranks), getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1
    if rest or ranks < 2:
        yield f"--epp-planner helixpipe needs two ranks or more, with equally many of --num-layers {args.num_layers}"
    elif count != (count // per_stage if per_stage else has):
        yield f"--epp-planner helixpipe has a layer on each stage: add --num-virtual-stages-per-pipeline-rank {count}"
