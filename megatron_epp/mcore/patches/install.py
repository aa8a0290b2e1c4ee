"""Table of all functions of Megatron that this package patches."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from megatron_epp.mcore.patches import patching
from megatron_epp.mcore.patches.patching import Patch


def apply(*, allow_unknown: bool = False) -> None:
    """Patch Megatron so that `--epp` works; without that flag its behaviour does not change. Idempotent."""
    patching.apply(PATCHES, allow_unknown=allow_unknown, level=logging.DEBUG)


def _add_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_epp.mcore.arguments.parser import add_epp_args

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_epp_args(original(parser))

    return add_megatron_arguments


def _read_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_epp.mcore.arguments.consequences import refuse_restart
    from megatron_epp.mcore.arguments.yaml_cfg import reading_yaml

    reading = reading_yaml(original)

    @functools.wraps(original)
    def parse_args(*rest: Any, **named: Any) -> Any:
        args = reading(*rest, **named)
        refuse_restart(args)
        return args

    return parse_args


def _check_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_epp.mcore.arguments.consequences import prepare_epp_args
    from megatron_epp.mcore.patches import script_call

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        prepare_epp_args(args)
        script_call.check(args)
        return original(args, *rest, **named)

    return validate_args


def _adopt(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_epp.mcore.model.adopt import adopting

    return adopting(original)


def _complete_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        from megatron.training import global_vars

        args = global_vars._GLOBAL_ARGS
        delays = getattr(args, "epp", False) and self.delay_wgrad_compute
        if delays:  # which Megatron ties to an overlap of its own schedules
            self.delay_wgrad_compute = False
        original(self)
        if delays:
            self.delay_wgrad_compute = True
        if getattr(args, "epp", False) and args.epp_placement != "looped":
            from megatron_epp.mcore.model.model_chunks import place

            place(self, args)

    return __post_init__


def _embedding_ranks(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    @functools.wraps(original)
    def default_embedding_ranks(pp_ranks: list[int], *rest: Any) -> list[int]:
        from megatron.training import global_vars

        args = global_vars._GLOBAL_ARGS
        if getattr(args, "epp", False) and args.epp_placement != "looped":
            from megatron_epp.mcore.arguments.consequences import placement_of

            if placement_of(args).ends_meet:
                return pp_ranks[:1]
        return original(pp_ranks, *rest)

    return default_embedding_ranks


def _train_on_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Any, *rest: Any, **named: Any) -> Any:
        from megatron.training import get_args

        if not getattr(get_args(), "epp", False):  # without it not even the imports may matter
            return original(provider, *rest, **named)
        from megatron_epp.mcore.patches.stock_functions import PROVIDER, require_stock
        from megatron_epp.mcore.training.elastic import provide_documents

        require_stock({PROVIDER: provider})
        chunk = getattr(provider, "keywords", {}).get("vp_stage")  # Megatron asks once for each of a rank's model chunks
        ours = functools.partial(provide_documents, vp_stage=chunk)
        ours.is_distributed = True  # type: ignore[attr-defined]  # every rank reads lengths, so every rank builds them
        return original(ours, *rest, **named)

    return build_train_valid_test_data_iterators


def _warm_up_on_a_chunk(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def set_jit_fusion_options(*rest: Any, **named: Any) -> None:
        from megatron.training import get_args

        args = get_args()
        if not getattr(args, "epp", False):
            original(*rest, **named)
            return
        context = args.seq_length
        args.seq_length = min(context, _WARM_UP_TOKENS * args.context_parallel_size * args.tensor_model_parallel_size)
        try:
            original(*rest, **named)
        finally:
            args.seq_length = context

    return set_jit_fusion_options


def _compare_order(original: Callable[..., None]) -> Callable[..., None]:
    from megatron_epp.mcore.training.resumed import checking_order

    return functools.wraps(original)(checking_order(original))


def _pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_epp.mcore.patches import script_call

    signature = inspect.signature(original)

    @functools.wraps(original)
    def pretrain(*rest: Any, **named: Any) -> Any:
        call = signature.bind(*rest, **named)
        with script_call.checked(dict(call.arguments)):
            if (chosen := call.arguments.get("get_embedding_ranks")) is not None:
                call.arguments["get_embedding_ranks"] = _embedding_ranks(chosen)
            try:
                return original(*call.args, **call.kwargs)
            finally:
                if sessions := sys.modules.get("megatron_epp.mcore.training.session"):
                    sessions.end()

    return pretrain


def _choose_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_forward_backward_func(*rest: Any, **named: Any) -> Any:
        from megatron.training import get_args

        stock = original(*rest, **named)
        args = get_args()
        if not getattr(args, "epp", False):
            return stock
        from megatron_epp.mcore.training.elastic import schedule_for

        return schedule_for(args, stock)

    return get_forward_backward_func


_WARM_UP_TOKENS = 2048
"""Tokens per rank on which compiled functions are warmed up with `--epp`.

Megatron warms them up on tensors of --seq-length tokens. With a million tokens and an MLP of 14,336 in bf16, these take 28 GiB
each before there is a model, and no chunk is that long.
"""
_OUR_ATTENTION = "with --epp, builds the model with our attention"

PATCHES = (
    Patch("megatron.training.arguments:add_megatron_arguments", _add_flags, "adds the --epp flags", wraps=True),
    Patch(
        "megatron.training.arguments:parse_args",
        _read_yaml,
        "with --epp, takes the values of --yaml-cfg as flags, and refuses to be restarted in its process",
        wraps=True,
    ),
    Patch("megatron.training.arguments:validate_args", _check_flags, "checks the --epp flags", wraps=True),
    Patch("megatron.core.models.gpt.gpt_model:GPTModel.__init__", _adopt, _OUR_ATTENTION, wraps=True),
    Patch("megatron.core.models.mamba.mamba_model:MambaModel.__init__", _adopt, _OUR_ATTENTION, wraps=True, versions="<0.18"),
    Patch(
        "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__", _adopt, _OUR_ATTENTION, wraps=True, versions=">=0.18"
    ),
    Patch(
        "megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
        _complete_config,
        "with --epp-placement, shares out layers by it; with --epp-split-weight-gradient, lets layers put off their gradients",
        wraps=True,
    ),
    Patch(
        "megatron.core.parallel_state:default_embedding_ranks",
        _embedding_ranks,
        "with --epp-placement, keeps the embedding on one rank where the first has the last stage too",
        wraps=True,
    ),
    Patch(
        "megatron.training.training:build_train_valid_test_data_iterators",
        _train_on_documents,
        "with --epp, gives the data our documents",
        wraps=True,
    ),
    Patch(
        "megatron.training.initialize:set_jit_fusion_options",
        _warm_up_on_a_chunk,
        "with --epp, warms compiled functions up on a chunk, not on --seq-length tokens",
        wraps=True,
    ),
    Patch(
        "megatron.training.training:pretrain",
        _pretrain,
        "with --epp, refuses functions of the script that it would not use, and ends planning when training ends",
        wraps=True,
    ),
    Patch(
        "megatron.training.checkpointing:check_checkpoint_args",
        _compare_order,
        "with --epp, compares the order of sequences with that of the run that saved a checkpoint",
        wraps=True,
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        _choose_schedule,
        "with --epp, returns our schedule",
        wraps=True,
    ),
)
