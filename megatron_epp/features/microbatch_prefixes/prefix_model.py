"""Models whose whole microbatches share prefixes: what they compute is cut to a chunk's own tokens, behind the caller's step.

A caller's forward step calls the model with a microbatch packed into one row, and gets hidden states, logits or losses of all
its tokens. In between, layers compute the tokens of the chunk alone, and attention reads keys and values of others.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.features.microbatch_prefixes.sample_tokens import borrowed_of
from megatron_epp.features.microbatch_prefixes.whole_rows import own_tokens, whole_rows, with_zeros
from megatron_epp.features.trees.obstacles import obstacle_of
from megatron_epp.features.trees.tree_cache import TreeView
from megatron_epp.losses import Average
from megatron_epp.mcore.arguments.layout import token_shards
from megatron_epp.mcore.iteration.microbatch_agreement import Shapes
from megatron_epp.mcore.iteration.microbatch_run import MicrobatchRun
from megatron_epp.mcore.iteration.microbatch_stage import MicrobatchStage
from megatron_epp.mcore.model import rotary
from megatron_epp.mcore.model.adopt_built import adopt_built, refusal
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.language_model import axes_of, language_model_of
from megatron_epp.plan import EppError
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links.objects import AgreedError, from_each_of_job

logger = logging.getLogger(__name__)

_PASSED_ON = {"input_ids", "position_ids", "attention_mask", "packed_seq_params", "labels", "loss_mask"}
"""Arguments of a model that are cut to a chunk's own tokens, or are of all its tokens behind the layers."""


class PrefixModel:
    """A stage's language model, which runs chunks of plans with shared prefixes on their own tokens.

    Other calls pass through; the first ones show how a forward step calls it. `problem` says why those cannot be cut, as long
    as none was seen that can.
    """

    def __init__(self, stage: MicrobatchStage) -> None:
        self.problem = "no microbatch has run"
        self._stage, self._model = stage, language_model_of(stage.model)
        self._makes_logits = False  # seen to make them by its output layer, of all rows that the decoder returns
        self._context: ChunkContext | None = None
        # Arguments of the model's calls, and outputs of its output layer's, in a forward step
        self._calls, self._outputs = list[dict[str, Any]](), list[Any]()
        self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        if stage.is_last:
            self._model.decoder.register_forward_hook(self._decoded)
            self._model.output_layer.register_forward_hook(self._projected)
        stage.around = self._around

    @contextmanager
    def _around(self, context: ChunkContext) -> Iterator[None]:
        self._context = context
        try:
            yield
            if self.problem and not self._is_cut:
                self.problem = self._problem_seen(context)
        finally:
            self._context = None
            self._calls.clear()
            self._outputs.clear()

    @property
    def _is_cut(self) -> bool:
        return self._context is not None and isinstance(self._context.view, TreeView)

    @property
    def _leaves_zeros(self) -> bool:
        return self._makes_logits and not self._stage.reads_all

    def _enter(
        self, module: Any, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if (context := self._context) is None or not (self.problem or self._is_cut):
            return None
        call = inspect.signature(module.forward).bind(*args, **named)
        if not self._is_cut:
            self._calls.append(call.arguments)
            return None
        if module.pre_process:  # no other stage reads tokens
            rows = own_tokens(context, call.arguments["input_ids"].device)
            for name in ("input_ids", "position_ids"):
                if isinstance(whole := call.arguments.get(name), Tensor):
                    call.arguments[name] = whole.flatten()[rows][None]
        call.arguments["packed_seq_params"] = ChunkParams(context)
        return call.args, call.kwargs

    def _decoded(self, module: Any, args: tuple[Any, ...], hidden: Tensor) -> Tensor | None:
        if self._context is None or not self._is_cut or self._leaves_zeros:
            return None
        return whole_rows(hidden, self._context, module.config.sequence_parallel)

    def _projected(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        if self.problem and self._context is not None:
            self._outputs.append(output)
        if self._context is None or not self._is_cut or not self._leaves_zeros:
            return None
        logits, *rest = output
        return with_zeros(logits, self._context), *rest

    def _problem_seen(self, context: ChunkContext) -> str:
        if len(self._calls) != 1:
            return f"its forward step calls the model {len(self._calls)} times"
        logits = self._outputs[0][0] if len(self._outputs) == 1 and isinstance(self._outputs[0], tuple) else ()
        self._makes_logits = len(logits) == context.table.num_tokens
        return _problem(self._calls[0], context)


def _problem(arguments: dict[str, Any], context: ChunkContext) -> str:
    """Return why a call of the model with a microbatch cannot be cut to some of its tokens; empty if it can."""
    packed, starts = arguments.get("packed_seq_params"), [*context.table.query_starts]
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    ends = getattr(packed, "cu_seqlens_q", None) if padded is None else padded
    if ends is None:
        return "its microbatches are not packed"
    if ends.tolist() != starts:
        return f"its microbatches are packed with ends {ends.tolist()}, where their lengths make {starts}"
    if arguments.get("attention_mask") is not None:
        return "its microbatches have a mask"
    more = {name for name, value in arguments.items() if not (value is None or value is False)} - _PASSED_ON
    if more:
        return f"its microbatches have {', '.join(sorted(more))}"
    if (positions := arguments.get("position_ids")) is not None:
        of_own = torch.cat([torch.arange(part.num_tokens) for part in context.table.segments])
        if positions.flatten().tolist() != of_own.tolist():
            return "its microbatches have positions of their own"
    return ""


def share(run: MicrobatchRun) -> None:
    """Have microbatches of a run share what their sequences begin with, if its model may. A collective call.

    Raises `AgreedError` if it may not, and was asked to.
    """
    own = next(filter(None, (_obstacle(stage, run.args.context_parallel_size) for stage in run.stages.values())), "")
    if reason := next(filter(None, from_each_of_job(own)), ""):
        if run.args.epp_share_prefixes == "on":
            raise AgreedError(f"{run.names['shares']} does not go with {reason}: leave it out")
        return
    for model in run.models:
        adopt_built(model, run.args)
        rotary.adopt(language_model_of(model))
    models = [PrefixModel(stage) for stage in run.stages.values()]
    run.find_prefixes = partial(_found, models, token_shards(run.args))


def _found(
    models: Sequence[PrefixModel], multiple: int, shapes: Shapes | None, items: Sequence[Sequence[Any]]
) -> tuple[Borrowed, ...] | None:
    if problem := next(filter(None, (model.problem for model in models)), ""):
        _tell(problem)
        return None
    own = next(filter(None, items), ())
    if shapes is None or len(own) != len(shapes) or any(shape.rows > 1 for shape in shapes):
        return ()
    lengths = [shape.lengths for shape in shapes]
    most = [length - 1 for each in lengths for length in each]
    if None not in (unread := [shape.unread for shape in shapes]):
        of_each = (_of_all(each or (), len(sizes)) for each, sizes in zip(unread, lengths, strict=True))
        most = [*map(min, most, chain(*of_each))]
    return borrowed_of(own, lengths, most, multiple)


@cache  # once for all iterations
def _tell(problem: str) -> None:
    logger.info("microbatches run by themselves, though some may begin alike: %s", problem)


def _of_all(unread: Sequence[int], count: int) -> list[int]:
    """Return the numbers of unread tokens of so many sequences, the last of which may be a microbatch's padding."""
    if not 0 <= count - len(unread) <= 1:
        raise EppError(f"unread_of returned {len(unread)} numbers of tokens for a microbatch of {count} sequences")
    return [*unread, *[0] * (count - len(unread))]


def _obstacle(stage: MicrobatchStage, context_ranks: int) -> str:
    """Return why a stage's microbatches run by themselves; empty if they may share prefixes."""
    if (model := language_model_of(stage.model)) is not unwrap_model(stage.model):
        return "a model with a language model inside"
    if context_ranks > 1:
        return "context parallelism, whose microbatches are divided before the model gets them"
    of_model = obstacle_of(lambda name: getattr(model.config, name, None))
    of_model = of_model or ("several axes of positions" if axes_of(model) > 1 else "")
    return of_model or refusal(model, Average.TOKENS, recomputes=True)
