"""Functions that worlds of ranks call (`worker.call`): trainings, recorded."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from scripts.parity.planner import share_planner
from scripts.parity.runs import Run, record, train


def recorded(flags: Sequence[str], checkpoint: str | None = None) -> Run:
    """Train with these flags of Megatron. Saves a checkpoint ahead of the first step, if a place for it is named.

    Megatron's own schedule may need a stand-in for its attention (`stand_ins.has_stand_in`).
    """
    from tests.support.mcore import deep_ep_stand_in, local_hybrid, stand_ins

    local_hybrid.use_torch_norms()
    share_planner()
    attention = stand_ins.plain_attention() if "stock" in flags and stand_ins.has_stand_in(flags) else nullcontext()
    with attention, deep_ep_stand_in.installed() if "flex" in flags else nullcontext():
        return record(flags, None if checkpoint is None else Path(checkpoint))


def tensors(flags: Sequence[str]) -> dict[str, Any]:
    """Train a script's own microbatches with these flags of Megatron.

    Models may have the layers of `stand_ins`, whose attention has no sinks. Plans made from learnt costs run microbatches from
    the last to the first.

    Returns the losses and the gradients of every iteration, the weights after the last, tensor by tensor, and what this package
    has told.
    """
    from megatron.training import training

    from tests.support.mcore import deep_ep_stand_in, local_hybrid, stand_ins

    local_hybrid.use_torch_norms()
    kept: dict[str, Any] = {"losses": [], "gradients": [], "weights": {}}
    step = mock.patch.object(training, "train_step", _keeping(training.train_step, kept))
    exchanges = deep_ep_stand_in.installed() if "flex" in flags else nullcontext()
    attention = nullcontext() if "--softmax-type" in flags else stand_ins.plain_attention()
    with attention, exchanges, reversed_orders(), step, _told() as kept["log"]:
        train(flags)
    return kept


def _keeping(train_step: Callable[..., Any], kept: dict[str, Any]) -> Callable[..., Any]:
    """Return a training step that keeps what it makes. Losses and gradients are scaled by another power of two each time."""

    def step(forward_step: Any, data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
        from megatron.training import get_args

        from megatron_epp.mcore import releases

        number, config = len(kept["losses"]) + 1, args[2]
        config.grad_scale_func = lambda loss: loss * 2.0 ** (number % 3)
        loss, *rest = train_step(forward_step, data_iterator, model, *args, **kwargs)
        predicted_more = {name: sums for name, sums in MTPLossLoggingHelper.tracker.items() if name == "values"}
        sums = dict(loss or {}) | releases.logged_router_losses() | predicted_more
        kept["losses"].append({name: torch.as_tensor(value).detach().clone() for name, value in sums.items()})
        named = {f"{number}.{name}": one for number, chunk in enumerate(model) for name, one in chunk.named_parameters()}
        kept["gradients"].append({name: one.main_grad.detach().clone() for name, one in named.items()})
        if number == get_args().train_iters:
            for chunk in model:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)
            kept["weights"] = {name: one.detach().clone() for name, one in named.items()}
        return (loss, *rest)

    return step


def reversed_orders() -> contextlib.AbstractContextManager[Any]:
    from megatron_epp.planner import chunk_tables, settings

    tables = chunk_tables.microbatch_tables
    starts = settings.MICROBATCH_STARTS

    def reversed_tables(asked: Any) -> dict[str, Any]:
        return dict.fromkeys(starts, tables(asked)["given"][::-1])

    return mock.patch.object(chunk_tables, "microbatch_tables", reversed_tables)


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    lines: list[str] = []
    logger, handler = logging.getLogger("megatron_epp"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
