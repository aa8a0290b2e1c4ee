"""Everything this package changes in Megatron: one short table."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from megatron_epp.mcore import patching
from megatron_epp.mcore.patching import Patch


def apply(*, allow_unknown: bool = False) -> None:
    """Patch Megatron so that `--epp` works; without that flag nothing changes for the user. Idempotent."""
    patching.apply(PATCHES, allow_unknown=allow_unknown, level=logging.DEBUG)


def revert() -> None:
    """Undo `apply`."""
    patching.revert(PATCHES)


def _add_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_epp.mcore.args import add_epp_args

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_epp_args(original(parser))

    return add_megatron_arguments


def _check_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_epp.mcore.args import prepare_epp_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        prepare_epp_args(args)
        return original(args, *rest, **named)

    return validate_args


def _train_on_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pretrain(cfg_container: Any, dataset_provider: Any, *rest: Any, **named: Any) -> Any:
        from megatron.training import get_args

        args = get_args()
        if not getattr(args, "epp", False):  # without it not even the imports may matter
            return original(cfg_container, dataset_provider, *rest, **named)
        from megatron_epp.mcore import session as sessions
        from megatron_epp.mcore.elastic import adopt_model, provide_documents
        from megatron_epp.mcore.placement import Placement

        adopt_model(cfg_container, args)
        if Placement.of(args).ends_meet:  # no other rank has a copy of the embedding to keep alike
            named["get_embedding_ranks"] = lambda ranks: ranks[:1]
        try:
            return original(cfg_container, provide_documents, *rest, **named)
        finally:
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
        from megatron_epp.mcore.elastic import schedule_for

        return schedule_for(args, stock)

    return get_forward_backward_func


PATCHES = (
    Patch("megatron.training.arguments:add_megatron_arguments", _add_flags, "adds the --epp flags", wraps=True),
    Patch("megatron.training.arguments:validate_args", _check_flags, "checks the --epp flags", wraps=True),
    Patch(
        "megatron.training.training:pretrain",
        _train_on_documents,
        "with --epp, gives the model our attention and the data our documents",
        wraps=True,
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        _choose_schedule,
        "with --epp, returns our schedule",
        wraps=True,
    ),
)
