"""Models whose whole microbatches share prefixes: what they compute is cut to a chunk's own tokens, behind the caller's step.

A caller's forward step calls the model with a microbatch packed into one row, and gets hidden states, logits or losses of all
its tokens. In between, layers compute the tokens of the chunk alone, and attention reads keys and values of others.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.data.batch import OF_TOKENS
from megatron_epp.data.samples import columns_of
from megatron_epp.features.microbatch_prefixes.sample_tokens import borrowed_of
from megatron_epp.features.microbatch_prefixes.whole_rows import own_tokens, whole_rows, with_zeros
from megatron_epp.features.trees.sharing import obstacle
from megatron_epp.features.trees.tree_cache import TreeView
from megatron_epp.losses import Average, NextToken
from megatron_epp.mcore.arguments.layout import token_shards
from megatron_epp.mcore.iteration.microbatch_agreement import Prefixes, Shapes
from megatron_epp.mcore.iteration.microbatch_run import MicrobatchRun
from megatron_epp.mcore.iteration.microbatch_shapes import UnreadOf
from megatron_epp.mcore.iteration.microbatch_stage import MicrobatchStage
from megatron_epp.mcore.model import rotary
from megatron_epp.mcore.model.adopt_built import adopt_built, refusal
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.language_model import language_model_of
from megatron_epp.mcore.model.replaced import put
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
        self.stage, self.model = stage, language_model_of(stage.model)
        self.problem = "no microbatch has run"
        self._makes_logits = False  # seen to make them by its output layer, from the decoder's output
        self._context: ChunkContext | None = None
        self._calls: list[Any] = []  # arguments of the model's calls and outputs of its output layer's, in a forward step
        self._forward, self._decode = self.model.forward, self.model.decoder.forward
        self._signature = inspect.signature(self._forward)
        put(self.model, "forward", self._run)
        if stage.is_last:
            put(self.model.decoder, "forward", self._decoded)
            self._project = self.model.output_layer.forward
            put(self.model.output_layer, "forward", self._logits)
        stage.around = self._around

    @contextmanager
    def _around(self, context: ChunkContext) -> Iterator[None]:
        self._context, self._calls = context, []
        try:
            yield
            if self.problem and not self._shares:
                self.problem = self._seen_problem(context)
        finally:
            self._context, self._calls = None, []

    @property
    def _shares(self) -> bool:
        return self._context is not None and isinstance(self._context.view, TreeView)

    def _run(self, *args: Any, **named: Any) -> Any:
        call = self._signature.bind(*args, **named)
        if self.problem and self._context is not None:
            self._calls.append(call.arguments)
        if (context := self._context) is None or not self._shares:
            return self._forward(*args, **named)
        if self.model.pre_process:  # no other stage reads tokens
            rows = own_tokens(context, call.arguments["input_ids"].device)
            for name in ("input_ids", "position_ids"):
                if isinstance(whole := call.arguments.get(name), Tensor):
                    call.arguments[name] = whole.flatten()[rows][None]
        call.arguments["packed_seq_params"] = ChunkParams(context)
        return self._forward(*call.args, **call.kwargs)

    @property
    def _leaves_zeros(self) -> bool:
        return self._makes_logits and not self.stage.reads_all

    def _decoded(self, *args: Any, **named: Any) -> Any:
        hidden = self._decode(*args, **named)
        if self._context is None or not self._shares or self._leaves_zeros:
            return hidden
        return whole_rows(hidden, self._context, self.model.config.sequence_parallel)

    def _logits(self, *args: Any, **named: Any) -> Any:
        output = self._project(*args, **named)
        if self.problem and self._context is not None:
            self._calls.append(output)
        if self._context is None or not self._shares or not self._leaves_zeros:
            return output
        logits, *rest = output
        return with_zeros(logits, self._context), *rest

    def _seen_problem(self, context: ChunkContext) -> str:
        """Return why a forward step cannot run on some of a microbatch's tokens, as its calls show; empty if it can."""
        calls = [call for call in self._calls if isinstance(call, dict)]
        outputs = [output for output in self._calls if not isinstance(output, dict)]
        if len(calls) != 1:
            return f"its forward step calls the model {len(calls)} times"
        self._makes_logits = (
            len(outputs) == 1 and isinstance(outputs[0], tuple) and len(outputs[0][0]) == context.table.num_tokens
        )
        return _problem(calls[0], context)


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
    if more := [name for name, value in arguments.items() if name not in _PASSED_ON and value not in (None, False)]:
        return f"its microbatches have {', '.join(more)}"
    if (positions := arguments.get("position_ids")) is not None:
        of_own = torch.cat([torch.arange(part.num_tokens) for part in context.table.segments])
        if positions.flatten().tolist() != of_own.tolist():
            return "its microbatches have positions of their own"
    return ""


def share(run: MicrobatchRun) -> None:
    """Have microbatches of a run share what their sequences begin with, if its model may. A collective call.

    Raises `AgreedError` if it may not, and was asked to.
    """
    own = next(filter(None, map(_obstacle, run.stages.values())), "") or _settings_obstacle(run)
    if reason := next(filter(None, from_each_of_job(own)), ""):
        if run.args.epp_share_prefixes == "on":
            raise AgreedError(f"{run.names['shares']} does not go with {reason}: leave it out")
        return
    for model in run.models:
        adopt_built(model, run.args)
        rotary.adopt(language_model_of(model))
    models = [PrefixModel(stage) for stage in run.stages.values()]
    run.find_prefixes = partial(_found, models, token_shards(run.args), run.unread_of)


def _found(
    models: Sequence[PrefixModel],
    multiple: int,
    unread_of: UnreadOf,
    shapes: Shapes | None,
    items: Sequence[Sequence[Any]],
) -> Prefixes | None:
    if problem := next(filter(None, (model.problem for model in models)), ""):
        logger.info("microbatches run by themselves, though some may begin alike: %s", problem)
        return None
    if shapes is None or any(shape.rows > 1 for shape in shapes):
        return Prefixes()
    own = next(filter(None, items), ())
    unread, lengths = [*map(unread_of, own)], [shape.lengths for shape in shapes]
    most = [length - 1 for each in lengths for length in each]
    if is_known := None not in unread:
        # Behind a microbatch's sequences its padding counts as one more.
        of_each = ([*each, *[0] * (len(sizes) - len(each))] for each, sizes in zip(unread, lengths, strict=True) if each)
        most = [*map(min, most, chain(*of_each))]
    return Prefixes(borrowed_of(own, lengths, most, multiple), is_known)


def _settings_obstacle(run: MicrobatchRun) -> str:
    models = [language_model_of(stage.model) for stage in run.stages.values()]
    if run.args.context_parallel_size > 1:
        return "context parallelism, whose microbatches are divided before the model gets them"
    return obstacle(models, run.args.epp_planner, columns_of(NextToken()), OF_TOKENS)


def _obstacle(stage: MicrobatchStage) -> str:
    if language_model_of(stage.model) is not unwrap_model(stage.model):
        return "a model with a language model inside"
    return refusal(stage.model, Average.TOKENS, recomputes=True)
