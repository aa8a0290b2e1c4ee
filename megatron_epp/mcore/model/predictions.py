"""Multi-token prediction over chunks: tokens ahead that the batch knows, and losses weighted by whole sequences.

Megatron's functions roll tokens, labels and masks by one position at each depth, which would end every slice and packed
sequence early. Under a plan a chunk brings what lies ahead of it (`data.batch.AheadArrays`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MultiTokenPredictionLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from megatron_epp.data.batch import AheadArrays
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.replaced import ALL, mark
from megatron_epp.mcore.releases import bound, log_prediction_loss


@dataclass(slots=True)
class ChunkPredictions:
    """Multi-token prediction in the forward of a chunk, and the `depth` whose layer has begun.

    Within `whole` the output layer and loss take all tokens, not only the rows of the main loss.
    """

    arrays: AheadArrays
    whole: Callable[[], AbstractContextManager[None]] = nullcontext
    depth: int = 0


def need_embedding(model: torch.nn.Module) -> None:
    """Tell that layers of multi-token prediction need `embed_ahead`: their own would know no tokens ahead of a slice."""
    for module in model.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            mark(module, ALL, _get_embeddings=MultiTokenPredictionLayer._get_embeddings)


def embed_ahead(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Embed the tokens that lie ahead of a chunk, where its plan knows them."""
    call = bound(original, *rest, **named).arguments
    if not isinstance(params := call.get("packed_seq_params"), ChunkParams):
        return original(*rest, **named)
    ahead: ChunkPredictions = params.ahead
    tokens, position_ids = ahead.arrays.tokens[ahead.depth], ahead.arrays.position_ids[ahead.depth]
    ahead.depth += 1
    embedded = call["embedding"](input_ids=tokens, position_ids=position_ids)
    # As in Megatron's: layers ask of their input that it is no view.
    hidden = make_viewless_tensor(inp=call["hidden_states"], requires_grad=True, keep_graph=True)
    masks = [call.get("padding_mask")] if "padding_mask" in call else []  # since 0.18
    return (tokens, position_ids, *masks, embedded, hidden)


def add_prediction_losses(original: Callable[..., Tensor], *rest: Any, **named: Any) -> Tensor:
    """Add the losses of multi-token prediction to a chunk's, weighted by the counts of whole sequences."""
    call = bound(original, *rest, **named).arguments
    if not isinstance(params := call.get("packed_seq_params"), ChunkParams):
        return original(*rest, **named)
    ahead, arrays, config = params.ahead, params.ahead.arrays, call["config"]
    main, *predicted = torch.chunk(call["hidden_states"], 1 + config.mtp_num_layers, dim=0)
    factor, scale_logits = config.mtp_loss_scaling_factor / config.mtp_num_layers, call.get("scale_logits_fn")
    for depth, hidden in enumerate(predicted):
        with ahead.whole():
            logits, _ = call["output_layer"](
                hidden, weight=call["output_weight"], runtime_gather_output=call["runtime_gather_output"]
            )
            if scale_logits is not None:
                logits = scale_logits(logits)
            losses = call["compute_language_model_loss"](arrays.labels[depth], logits)
        if call["is_training"]:
            log_prediction_loss((arrays.shares[depth] * losses.detach()).sum(), depth, config.mtp_num_layers)
        main = MTPLossAutoScaler.apply(main, factor * arrays.weights[depth] * losses)
    return main
