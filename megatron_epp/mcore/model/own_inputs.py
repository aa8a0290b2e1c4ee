"""Input rows of a first stage that a caller's function makes, in place of the embedding's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from megatron_epp.data.batch import ChunkSpan, InputArrays
from megatron_epp.plan import EppError
from megatron_epp.plan.attributes import having
from megatron_epp.runtime.attention.context_parallel import of_group


@dataclass(frozen=True, slots=True)
class InputChunk:
    """A chunk as a function of inputs gets it: all of its tokens, whatever ranks share them.

    Attributes:
        model: chunk of the model, without wrappers, on this rank.
        tokens: int64 ``[1, tokens]``; 0 behind the last sequence, where a chunk is padded.
        position_ids: int64 ``[1, tokens]``, or ``[3, 1, tokens]`` with three axes.
        columns: float32 ``[tokens]`` or ``[tokens, width]``, the caller's own, by name.
        spans: those of the samples that are in the chunk, each whole.
    """

    model: Any
    tokens: Tensor
    position_ids: Tensor
    columns: Mapping[str, Tensor]
    spans: tuple[ChunkSpan, ...]
    _language_model: Any

    def embedded(self) -> Tensor:
        """Return the embedding's rows of all tokens, ``[tokens, 1, hidden]``."""
        with _of_all_tokens(self._language_model.embedding):
            rows: Tensor = self._language_model.embedding(input_ids=self.tokens, position_ids=self.position_ids)
            return rows


@dataclass(frozen=True, slots=True)
class OwnInputs:
    """A caller's function from an `InputChunk` to rows ``[tokens, 1, hidden]``, or to a pair of these and of features of that
    shape, which are added to the outputs of `layers`, numbered from 0. It reads the samples' columns `names`.
    """

    function: Callable[[InputChunk], Any]
    names: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()

    def check(self, first_stage_layers: int) -> None:
        """Raise `EppError` where features enter layers that the first stage has not."""
        if beyond := [layer for layer in self.layers if not 0 <= layer < first_stage_layers]:
            raise EppError(
                f"features of inputs enter behind layer {beyond[0]}, counted from 0, and the first stage has "
                f"{first_stage_layers} layers: give it more (num_layers_in_first_pipeline_stage)"
            )

    @contextmanager
    def entering(self, arrays: InputArrays, model: Any, language_model: Any) -> Iterator[Tensor]:
        """Return a context with this rank's rows of a chunk, ``[tokens / ranks, 1, hidden]``, in which layers get the features.

        `model` is the first stage's chunk, without wrappers. Raises `EppError` if there are no rows of the chunk's tokens.
        """
        columns = dict(zip(self.names, arrays.columns, strict=True))
        chunk = InputChunk(model, arrays.tokens, arrays.position_ids, columns, arrays.spans, language_model)
        rows, features = self.function(chunk), ()
        if self.layers:
            if not isinstance(rows, tuple) or len(rows) != 2 or len(rows[1]) != len(self.layers):
                raise EppError(f"inputs must return rows and {len(self.layers)} features, one for each of feature_layers")
            rows, features = rows
        rows, *own = (_part(x, arrays.tokens.shape[1], language_model.config) for x in (rows, *features))
        with ExitStack() as hooks:
            for layer, more in zip(self.layers, own, strict=True):
                hooks.callback(language_model.decoder.layers[layer].register_forward_hook(partial(_add, more)).remove)
            yield rows


def _add(features: Tensor, layer: Any, args: Any, output: Any) -> Any:
    """Add features to a layer's hidden states, as a hook."""
    return (output[0] + features, *output[1:]) if isinstance(output, tuple) else output + features


def _part(rows: Any, num_tokens: int, config: Any) -> Tensor:
    shape = num_tokens, 1, config.hidden_size
    if not isinstance(rows, Tensor) or rows.shape != shape:
        returned = list(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
        raise EppError(f"inputs made {returned} of a chunk; the model takes {list(shape)}, a row for every token")
    shards = of_group(mpu.get_context_parallel_group()).shard(num_tokens)
    rows = rows[shards[0]] if len(shards) == 1 else torch.cat([rows[shard] for shard in shards])
    return scatter_to_sequence_parallel_region(rows) if config.sequence_parallel else rows


_PARTS = ("scatter_to_sequence_parallel", "reduce_scatter_embeddings", "sequence_parallel")
"""Attributes of Megatron's embeddings and their configuration by which sequence-parallel ranks get a part of the rows, with a
dropout of their own."""


@contextmanager
def _of_all_tokens(embedding: Any) -> Iterator[None]:
    """Have an embedding give all rows to every sequence-parallel rank in the body."""
    with ExitStack() as held:
        for part in (getattr(embedding, "config", None), *embedding.modules()):
            held.enter_context(having(part, **{name: False for name in _PARTS if getattr(part, name, False)}))
        yield
