"""Changes that `--epp` makes to a model while Megatron builds it: our core attention, and rotary angles by position.

They are made in the constructors of Megatron's models, so that they apply whether a config, a `model_provider` or a script of
the user's calls the constructor.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.utils import unwrap_model
from megatron.training import global_vars

from megatron_epp.mcore.arguments.sizes import check_pattern
from megatron_epp.mcore.model import model_chunks
from megatron_epp.mcore.model.layer_spec import relayed
from megatron_epp.mcore.model.linear import split_weight_gradients
from megatron_epp.mcore.model.rotary import PositionedRotary
from megatron_epp.plan import EppError
from megatron_epp.runtime.attention import context_parallel

_SPECS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec")
"""Constructor parameters through which models receive the specs of their layers."""


def adopting(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap a model's constructor so that with `--epp` it builds a model that plans can run."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: torch.nn.Module, *rest: Any, **named: Any) -> None:
        args = global_vars._GLOBAL_ARGS  # None where a model is built without Megatron's training
        if not getattr(args, "epp", False) or args.epp_schedule == "stock":
            original(self, *rest, **named)
            return
        call = signature.bind(self, *rest, **named)
        if "transformer_layer_spec" not in call.arguments:  # a hybrid model
            if args.epp_placement != "looped":
                raise EppError(
                    f"--epp-placement {args.epp_placement} is for GPTModel; leave it out for a {type(self).__name__}"
                )
            check_pattern(call.arguments.get("hybrid_layer_pattern") or call.arguments.get("hybrid_override_pattern"))
        call.arguments |= {name: relayed(call.arguments[name]) for name in _SPECS if name in call.arguments}
        if args.epp_placement != "looped":
            call.arguments |= model_chunks.ends(args, call.arguments.get("vp_stage"))
        original(*call.args, **call.kwargs)
        _finish(self, args)

    return construct


def check_adopted(model: torch.nn.Module) -> None:
    """Raise `EppError` for a model that was built without our attention."""
    bare = unwrap_model(model)
    if not getattr(bare, "has_relay", False):
        raise EppError(f"--epp trains GPTModel and HybridModel; the script builds a {type(bare).__name__}")


def _finish(model: torch.nn.Module, args: argparse.Namespace) -> None:
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None:
        model.rotary_pos_emb = PositionedRotary(rotary, context_parallel.of_group(mpu.get_context_parallel_group()))
    if args.epp_placement != "looped":
        model_chunks.tie(model, args)
    if args.epp_split_weight_gradient and args.epp_schedule == "elastic":
        split_weight_gradients([model])
    model.has_relay = True
