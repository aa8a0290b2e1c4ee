"""Table of the kinds of Megatron's layers that run in slices, with a file for each that needs code. All others are refused.

The table is read where flags are checked, on machines without Megatron and torch too. Targets,
``module:function``, are imported where flags ask for such layers or a model has them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from megatron_epp.mcore.arguments.layout import AHEAD, hybrid_pattern
from megatron_epp.mcore.arguments.rule import Door, Rule
from megatron_epp.plan.flags import GATED_DELTA_NET


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A kind of layers that runs in slices."""

    name: str
    carries: str = ""  # what slices of a sequence hand on in such a layer; empty for nothing
    symbol: str = ""  # in hybrid patterns; empty for none
    flags: tuple[Rule, ...] = ()  # of Megatron's that plans cannot honour with such layers
    # True for flags that ask for such layers in a way that may be refused
    asked: Callable[[argparse.Namespace], object] = lambda args: False
    problems: Callable[[argparse.Namespace], Iterator[str]] | None = None  # yields why, from these flags, a line each
    is_of: Callable[[Any], bool] = lambda module: False  # True for a module that `adopt` changes
    mixes_tokens: bool = False  # these modules do, without core attention
    adopt: str = ""  # target that changes such layers of a model chunk that Megatron has built, ahead of data parallelism


def adopt_layers(model: Any, args: argparse.Namespace) -> None:
    """Change the layers of a model chunk, kind by kind."""
    for kind in KINDS:
        if any(map(kind.is_of, model.modules())):
            resolve_name(kind.adopt)(model, args)


def layer_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield why plans cannot run the layers that flags ask for."""
    for kind in KINDS:
        if kind.problems and kind.asked(args):
            yield from kind.problems(args)


def mixes_tokens(module: Any) -> bool:
    """Return True for a module that mixes tokens without core attention, and of whose kind plans run layers."""
    return any(kind.mixes_tokens and kind.is_of(module) for kind in KINDS)


def has_experts(settings: Any) -> bool:
    """Return True for flags, or the configuration, of a model with experts."""
    return any(getattr(settings, name, None) for name in ("num_experts", "num_moe_experts"))


def flex_backend(settings: Any) -> str:
    """Return the backend of the flex dispatcher that flags, or a model's configuration, choose; empty for other dispatchers."""
    if getattr(settings, "moe_token_dispatcher_type", None) != "flex":
        return ""
    return str("deepep" if settings.moe_enable_deepep else settings.moe_flex_dispatcher_backend)


def of_experts(problems: str, settings: Any, *rest: Any) -> Iterator[str]:
    """Yield what a function of `experts` yields, if flags, or a configuration, are of a model with experts."""
    if has_experts(settings):
        yield from resolve_name(f"{_HERE}experts:{problems}")(settings, *rest)


def is_delta_net(module: Any) -> bool:
    return _is(module, "megatron.core.ssm.gated_delta_net", "GatedDeltaNet")


def is_mamba(module: Any) -> bool:
    return _is(module, "megatron.core.ssm.mamba_mixer", "MambaMixer")


def _is(module: Any, file: str, name: str) -> bool:
    """Return True for a module of exactly a class, whose file has been imported if there is a module of it."""
    return type(module) is getattr(sys.modules.get(file), name, None)


def _of_attention(args: argparse.Namespace) -> Iterator[str]:
    window, softmax = getattr(args, "window_size", None), getattr(args, "softmax_type", "vanilla")
    if window and (window[0] < 1 or window[1] != 0):
        yield f"--window-size {window[0]},{window[1]}: a window is N,0, of at least one token ahead of a token and none behind"
    if getattr(args, "multi_latent_attention", False) and (window or softmax != "vanilla"):
        flag = f"--window-size {window[0]},{window[1]}" if window else f"--softmax-type {softmax}"
        yield f"{flag} with --multi-latent-attention was never tried with slices: leave one of them out"


def _of_latents(args: argparse.Namespace) -> Iterator[str]:
    if not args.multi_latent_attention:
        yield "--epp-latents on is for a model with --multi-latent-attention: leave it out"


def _of_delta_nets(args: argparse.Namespace) -> Iterator[str]:
    ranks, heads = args.tensor_model_parallel_size * args.context_parallel_size, args.linear_num_key_heads
    if heads is not None and heads % ranks:
        yield (
            f"--linear-num-key-heads {heads} cannot be shared evenly by --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} x --context-parallel-size {args.context_parallel_size}"
        )


def _of_mamba(args: argparse.Namespace) -> Iterator[str]:
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    ranks = f"--tensor-model-parallel-size {tensor} x --context-parallel-size {context}"
    heads, groups = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim, args.mamba_num_groups
    if heads % (tensor * context):
        yield f"--mamba-num-heads {heads} cannot be shared evenly by {ranks}"
    on_rank = groups // tensor  # each goes to several context-parallel ranks if there are too few for all
    if groups % tensor or max(on_rank, context) % min(on_rank, context):
        yield f"--mamba-num-groups {groups} cannot be shared evenly by {ranks}"


def _of_prediction(args: argparse.Namespace) -> Iterator[str]:
    depths, ranks = getattr(args, "mtp_num_layers", None), args.pipeline_model_parallel_size
    is_tied = not args.untie_embeddings_and_output_weights
    if args.save and is_tied and ranks > 1 and args.epp_placement != "v":
        yield (
            f"--mtp-num-layers {depths}, an output layer tied to the embedding and --pipeline-model-parallel-size {ranks} make "
            "a model that Megatron cannot save: add --untie-embeddings-and-output-weights, or leave --save out"
        )


_HERE = "megatron_epp.mcore.model.kinds."
STATES = "states, and rows ahead of a convolution"
EXPERTS = "E"
"""Symbol of experts in hybrid patterns."""
KINDS = (
    LayerKind(
        name="attention",
        carries="keys and values, of a window alone where a layer has one",
        symbol="*",
        flags=(
            Rule("--attention-dropout", use="set it to 0", doors=Door.SLICES, allowed=(0.0,)),
            Rule("--qk-clip", doors=Door.SLICES),
            Rule("--log-max-attention-logit", doors=Door.SLICES),
            Rule(
                "--position-embedding-type",
                use="use rope: angles are by position; positions of three axes come with samples (wrap_samples)",
                allowed=(None, "learned_absolute", "rope", "yarn", "none"),
            ),
        ),
        asked=lambda args: getattr(args, "window_size", None) or getattr(args, "softmax_type", "vanilla") != "vanilla",
        problems=_of_attention,
    ),
    LayerKind(
        name="latent attention",
        carries="latents, or keys and values",
        symbol="+",
        flags=(Rule("--mla-down-proj-fusion", use="leave it out: it was never tried with slices", doors=Door.SLICES),),
        asked=lambda args: args.epp_latents == "on",
        problems=_of_latents,
        is_of=lambda module: hasattr(module, "linear_kv_up_proj"),
        adopt=f"{_HERE}latent_attention:adopt",
    ),
    LayerKind(
        name="gated delta nets",
        carries=STATES,
        symbol="G",
        flags=(Rule("--experimental-attention-variant", allowed=(None, GATED_DELTA_NET)),),
        asked=lambda args: getattr(args, "experimental_attention_variant", None) == GATED_DELTA_NET,
        problems=_of_delta_nets,
        is_of=is_delta_net,
        mixes_tokens=True,
        adopt=f"{_HERE}gated_delta:adopt",
    ),
    LayerKind(
        name="Mamba-2",
        carries=STATES,
        symbol="M",
        flags=(
            Rule(
                "--disable-mamba-mem-eff-path",
                use="leave it out: slices run in the fused kernel",
                allowed=(None, True),
                dest="use_mamba_mem_eff_path",
            ),
        ),
        asked=lambda args: "M" in (hybrid_pattern(args) or ""),
        problems=_of_mamba,
        is_of=is_mamba,
        mixes_tokens=True,
        adopt=f"{_HERE}state_space:adopt",
    ),
    LayerKind(name="an MLP", symbol="-"),
    LayerKind(
        name="experts",
        symbol=EXPERTS,
        flags=(
            Rule("--moe-enable-routing-replay", use="leave it out: routes are a column of --epp-samples"),
            Rule("--overlap-moe-expert-parallel-comm"),
        ),
        asked=lambda args: args.num_experts or args.expert_model_parallel_size > 1,
        problems=lambda args: resolve_name(f"{_HERE}experts:problems")(args),
        is_of=lambda module: hasattr(module, "token_dispatcher"),
        adopt=f"{_HERE}experts:adopt",
    ),
    LayerKind(
        name="multi-token prediction",
        carries="what its layers do",
        symbol=AHEAD,  # chunks bring the tokens ahead of them along, so the embeddings there need nothing of other slices
        flags=(Rule("--mtp-detach-heads", use="leave it out: it was never tried with slices"),),
        asked=lambda args: getattr(args, "mtp_num_layers", None),
        problems=_of_prediction,
    ),
)
