"""A model's output layer and loss by blocks of tokens: what `--epp-loss-block-tokens` does while a stage runs the model."""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.cost.head import AUTO, loss_block_tokens, loss_workspace_bytes
from megatron_epp.mcore.linear import weight_gradient
from megatron_epp.runtime.block_loss import Head, block_losses
from megatron_epp.schedule import EppError

logger = logging.getLogger(__name__)


class BlockLoss:
    """Takes the place of a model's output layer and of its loss.

    Megatron's models hand what the output layer returns to `compute_language_model_loss`. Here that is the layer's input: MuP's
    factor on the logits, which comes in between, is then one on the input, and gives the same logits.

    Args:
        model: with an output layer, unwrapped.
        block_tokens: of a block.
    """

    def __init__(self, model: Any, block_tokens: int) -> None:
        self._model, self._layer, self.block_tokens = model, model.output_layer, block_tokens
        self._weight: Tensor | None = None

    @property
    def workspace_bytes(self) -> int:
        """What there is only while a pass computes the loss."""
        layer, value_bytes = self._layer, self._model.config.params_dtype.itemsize
        return loss_workspace_bytes(
            self.block_tokens,
            layer.output_size_per_partition,
            layer.input_size,
            value_bytes,
            fused_accumulation=layer.gradient_accumulation_fusion,
        )

    @contextmanager
    def instead(self) -> Iterator[None]:
        """While the model runs a chunk with labels."""
        self._layer.forward, self._model.compute_language_model_loss = self._keep_weight, self._losses
        try:
            yield
        finally:
            del self._layer.forward, self._model.compute_language_model_loss
            self._weight = None

    def _keep_weight(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        """Stands in for the output layer's `forward`."""
        self._weight = self._layer.weight if weight is None else weight
        return hidden, None

    def _losses(self, labels: Tensor, hidden: Tensor) -> Tensor:
        """Stands in for `compute_language_model_loss`.

        Args:
            labels: ``[batch, tokens]``.
            hidden: ``[tokens / shards, batch, hidden]``.

        Returns:
            ``[batch, tokens]``.
        """
        assert self._weight is not None  # the output layer ran
        layer, group = self._layer, self._layer.tp_group
        if layer.sequence_parallel:
            whole = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
        else:
            whole = copy_to_tensor_model_parallel_region(hidden, group=group)
        head = Head(
            self.block_tokens,
            group if group.size() > 1 else None,
            functools.partial(_rows, group if layer.sequence_parallel else None),
            functools.partial(weight_gradient, self._weight, None, True) if layer.gradient_accumulation_fusion else None,
        )
        rows = labels.transpose(0, 1)
        losses = block_losses(_rows(None, whole), hidden, self._weight, rows.reshape(-1), head)
        return losses.view(rows.shape).transpose(0, 1).contiguous()


def block_loss(args: argparse.Namespace, model: torch.nn.Module) -> BlockLoss | None:
    """What computes a last stage's loss, or None where Megatron does.

    Raises:
        EppError: a number of tokens was asked for and this model cannot have it.
    """
    bare = unwrap_model(model)
    block_tokens = block_tokens_of(args)
    if block_tokens == 0:
        return None
    obstacle = _obstacle(bare)
    if not obstacle:
        return BlockLoss(bare, block_tokens)
    if args.epp_loss_block_tokens != AUTO:
        raise EppError(f"--epp-loss-block-tokens {block_tokens} is not possible: {obstacle}; leave it out, or give 0")
    logger.warning("the logits of a whole chunk are there at once (see --epp-loss-block-tokens): %s", obstacle)
    return None


def block_tokens_of(args: argparse.Namespace) -> int:
    """Tokens of a block as the flags have it, the same on every rank; 0 for logits of a whole chunk at once."""
    longest = max(args.seq_length, args.epp_chunk_tokens or 0) // args.context_parallel_size
    return loss_block_tokens(args.epp_loss_block_tokens, args.padded_vocab_size // args.tensor_model_parallel_size, longest)


def _obstacle(model: Any) -> str:
    """Why a model's loss cannot go by blocks; empty if it can."""
    layer = getattr(model, "output_layer", None)
    if type(layer) is not ColumnParallelLinear:
        return f"the output layer is a {type(layer).__name__}"
    if layer.bias is not None:
        return "the output layer has a bias"
    if layer.gather_output:
        return "the output layer gathers its logits"
    if model.config.enable_autocast:
        return "autocast chooses the type of the logits"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "ranks share the output layer's weight and gather it"
    return ""


def _rows(gather_over: Any, x: Tensor) -> Tensor:
    """``[tokens, 1, in]`` as ``[tokens, in]``, of all ranks that have a part of the tokens."""
    if gather_over is not None:
        x = gather_from_sequence_parallel_region(x, group=gather_over)
    return x.reshape(-1, x.shape[-1])
