"""Output layer and loss of a model without the logits of a whole chunk.

They are computed by blocks of tokens (`--epp-loss-block-tokens`), or by Megatron's kernel that fuses the two
(`--cross-entropy-fusion-impl linear`), which only its development branch has, for Blackwell.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.core.tensor_parallel.layers import prepare_input_tensors_for_wgrad_compute
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.mcore import releases
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.model.replaced import BEFORE, HOOKS, attached
from megatron_epp.mcore.model.trained_rows import LOSS, OfRows, own_functions
from megatron_epp.plan import EppError
from megatron_epp.plan.errors import as_setting
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.sizing import loss_block_tokens, loss_workspace_bytes
from megatron_epp.runtime.loss.kernels import LossCase, explain
from megatron_epp.runtime.loss.token_blocks import Head, block_losses, block_values

logger = logging.getLogger(__name__)


class AskedOfLogits(NamedTuple):
    """Properties of a loss of the user's, as `losses.Loss` has them."""

    has_entropy: bool = False
    temperature: float = 1.0
    candidates: int = 0


OF_LABELS = AskedOfLogits()


class BlockLoss(OfRows):
    """Replacement of the output layer and loss of an unwrapped model, computed by blocks of tokens.

    Megatron's models pass the output layer's result to `compute_language_model_loss`. Here this is the layer's input. MuP's
    factor on the logits, which is applied in between, then multiplies the input and gives the same logits.

    Candidates of the next forward are ``[tokens, asked.candidates]``; None stands for its labels. Of the last forward `more`
    has the candidates' log-probabilities and the entropies, ``[rows, tokens]``; None if not asked for.
    """

    asked = OF_LABELS
    candidates: Tensor | None = None
    more: Tensor | None = None

    def __init__(self, model: Any, block_tokens: int) -> None:
        self._model, self._layer, self.block_tokens = model, model.output_layer, block_tokens
        self._weight: Tensor | None = None
        device, entries = "cuda" if torch.cuda.is_initialized() else "cpu", self._layer.output_size_per_partition
        shared = self._layer.tp_group.size() > 1
        self.kernel, self.passed_over = explain(LossCase(device, model.config.params_dtype, entries, shared))

    @property
    def obstacle(self) -> str:
        reason = loss_obstacle(self._model)
        return reason and f"{reason}, and plans compute the loss by blocks of tokens: turn that off (loss_block_tokens 0)"

    @property
    def workspace_bytes(self) -> int:
        """Bytes that are allocated only while a pass computes the loss."""
        layer = self._layer
        return loss_workspace_bytes(
            self.block_tokens,
            layer.output_size_per_partition,
            layer.input_size,
            self._model.config.params_dtype.itemsize,
            fused_accumulation=layer.gradient_accumulation_fusion,
            in_place=self.kernel is not None,
            has_entropy=self.asked.has_entropy,
        )

    @contextmanager
    def instead(self, rows: Tensor | None = None) -> Iterator[None]:
        """Return a context in which the model computes losses so, of tokens `rows` (`trained_rows.rows_to_compute`), else 0."""
        self._layer.forward, self._model.compute_language_model_loss = self._keep_weight, self._losses
        self._rows = rows
        try:
            yield
        finally:
            del self._layer.forward, self._model.compute_language_model_loss
            self._weight = self._rows = None

    def _keep_weight(
        self, input_: Tensor, weight: Any = None, *, output_cross_entropy_loss: bool = False, labels: Any = None, **_: Any
    ) -> tuple[Tensor, None] | Tensor:
        """Replace the output layer's `forward`. A layer fused with the loss gets labels, and returns the losses."""
        self._weight = self._layer.weight if weight is None else weight
        if output_cross_entropy_loss:
            assert labels is not None
            return self._losses(labels, input_)
        return input_, None

    def _losses(self, labels: Tensor, hidden: Tensor) -> Tensor:
        """Replace `compute_language_model_loss`, given ``[batch, tokens]`` and ``[tokens / shards, batch, hidden]``."""
        assert self._weight is not None  # the output layer ran
        layer, group = self._layer, self._layer.tp_group
        if self.asked.temperature != 1.0:
            hidden = hidden / self.asked.temperature
        whole = all_tokens(hidden, layer.sequence_parallel, group)
        head = Head(
            self.block_tokens,
            group if group.size() > 1 else None,
            functools.partial(_rows, group if layer.sequence_parallel else None),
            functools.partial(weight_gradient, self._weight, None, True) if layer.gradient_accumulation_fusion else None,
            self._rows,
            self.asked.has_entropy,
        )
        rows = labels.transpose(0, 1)
        inputs, entries, number = (_rows(None, whole), hidden, self._weight), rows.reshape(-1), self.asked.candidates
        if number or self.asked.has_entropy:
            others = entries[:, None].expand(-1, number) if self.candidates is None else self.candidates
            values = block_values(*inputs, torch.cat([entries[:, None], others], dim=1), head)
            losses, self.more = values[0], torch.cat([-values[1 : 1 + number], values[1 + number :]])
        else:
            losses = block_losses(*inputs, entries, head)
        return losses.view(rows.shape).transpose(0, 1).contiguous()


class FusedLoss:
    """Output layer and loss left to Megatron's fused kernel.

    Its backward recomputes logits and computes the weight's gradient, not split from it. The logits of a few thousand
    vocabulary entries that it holds at a time are less than a layer's own gradients, which plans count.
    """

    obstacle, workspace_bytes = "", 0

    def instead(self, rows: Tensor | None = None) -> AbstractContextManager[None]:
        """Return a context that changes nothing, in which the model runs a chunk with labels: the kernel takes all tokens."""
        return nullcontext()

    whole = instead


def block_loss(
    args: argparse.Namespace, model: torch.nn.Module, asked: AskedOfLogits = OF_LABELS
) -> BlockLoss | FusedLoss | None:
    """Choose how a last stage computes its loss without all logits of a chunk; None if they are held all at once.

    What a loss asks for beyond log-probabilities of labels needs blocks. Raises `EppError` for a block size that is impossible
    for this model, and for Megatron's fused kernel if neither it nor blocks in its place can run here.
    """
    bare = unwrap_model(model)
    if asked != OF_LABELS:
        if obstacle := loss_obstacle(bare):
            raise EppError(
                "the loss needs entropies, candidates or a temperature, which the model's output layer has not: " + obstacle
            )
        loss = BlockLoss(bare, block_tokens_of(args, always=True) or max(args.seq_length, args.epp_chunk_tokens or 0))
        loss.asked = asked
        return loss
    if releases.fuses_output_with_loss(bare):
        return _fused_loss(args, bare)
    block_tokens = block_tokens_of(args)
    if block_tokens == 0:
        return None
    obstacle, name = loss_obstacle(bare), names_of(args)["loss_block_tokens"]
    if not obstacle:
        return _told(BlockLoss(bare, block_tokens))
    if args.epp_loss_block_tokens != AUTO:
        raise EppError(f"{as_setting(name, block_tokens)} is not possible: {obstacle}; leave it out, or give 0")
    logger.warning("the logits of a whole chunk are there at once (see %s): %s", name, obstacle)
    return None


def _fused_loss(args: argparse.Namespace, model: Any) -> BlockLoss | FusedLoss:
    block_tokens = block_tokens_of(args, always=True)
    wants_blocks = args.epp_loss_block_tokens != AUTO and block_tokens > 0
    name = names_of(args)["loss_block_tokens"]
    fused = f"{name} is given too" if wants_blocks else releases.fused_loss_obstacle()
    if not fused:
        return FusedLoss()
    by_blocks = loss_obstacle(model) if block_tokens else f"{name} is 0"
    if by_blocks:
        raise EppError(
            f"--cross-entropy-fusion-impl linear is not possible: {fused}; nor are blocks of tokens in its place: {by_blocks}. "
            "Leave one of the flags out"
        )
    logger.warning("--cross-entropy-fusion-impl linear: the loss goes by blocks of tokens in its place: %s", fused)
    return _told(BlockLoss(model, block_tokens))


def _told(loss: BlockLoss) -> BlockLoss:
    if not mpu.model_parallel_is_initialized() or mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
        how = f"in plain torch, not {loss.passed_over}" if loss.kernel is None else f"by {loss.kernel.name}"
        logger.info("loss by blocks of %d tokens: %s", loss.block_tokens, how)
    return loss


def block_tokens_of(args: argparse.Namespace, *, always: bool = False) -> int:
    """Return the tokens of a block, equal on all ranks; 0 for the logits of a whole chunk at once.

    With ``auto``, `always` means blocks even where a sequence has few logits.
    """
    longest = sys.maxsize if always else max(args.seq_length, args.epp_chunk_tokens or 0) // args.context_parallel_size
    return loss_block_tokens(args.epp_loss_block_tokens, args.padded_vocab_size // args.tensor_model_parallel_size, longest)


def loss_obstacle(model: Any) -> str:
    """Return the reason why a model's output layer and loss cannot be replaced; empty if they can."""
    layer: Any = getattr(model, "output_layer", None)
    if type(layer) not in releases.multiplying_output_layers():
        return f"the output layer is a {type(layer).__name__}"
    if layer.bias is not None:
        return "the output layer has a bias"
    if model.config.enable_autocast:
        return "autocast chooses the type of the logits"
    if releases.gathers_output_weight(layer):
        return "ranks share the output layer's weight and gather it"
    if hook := next(attached(layer, HOOKS - {BEFORE}), ""):
        return f"the output layer has a {hook}, which is of logits"
    own = own_functions(model)
    return f"{type(model).__name__} has its own {', '.join(own)}" if own else ""


def shard_logits(model: torch.nn.Module) -> None:
    """Make a last stage's output layer return its rank's shard of the logits where Megatron's loss takes it.

    That loss always treats its logits as a rank's shard. A model built with ``parallel_output=False`` gathers them, so every
    entry would count once for each tensor-parallel rank. Raises `EppError` if such logits are not from Megatron's layer and
    function.
    """
    bare: Any = unwrap_model(model)
    layer: Any = getattr(bare, "output_layer", None)
    if not getattr(layer, "gather_output", False) or layer.tp_group.size() == 1:
        return
    own = own_functions(bare)
    if LOSS in own:
        return
    own += attached(layer, HOOKS - {BEFORE})  # of whole logits
    if type(layer) not in releases.multiplying_output_layers() or own:
        owner = f"{type(bare).__name__} has its own {', '.join(own)}" if own else f"a {type(layer).__name__}"
        raise EppError(
            f"the output layer gathers its logits (parallel_output=False; {owner}), and Megatron's loss takes them for a shard "
            f"of {layer.tp_group.size()} tensor-parallel ranks: build the model with parallel_output=True, or give it a "
            "loss of its own"
        )
    layer.gather_output = False


def all_tokens(x: Tensor, sequence_parallel: bool, group: Any) -> Tensor:
    """Return the input of a product on tensor-parallel ranks: of all tokens, with its gradient summed over ranks."""
    if sequence_parallel:
        return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
    return copy_to_tensor_model_parallel_region(x, group=group)


def weight_gradient(weight: Any, gather_over: Any, accumulate: bool, x: Tensor, grad: Tensor) -> Tensor:
    """Compute a weight's gradient, ``[out, in]``, as Megatron does, from ``[tokens, 1, in]`` and ``[tokens, 1, out]``.

    Args:
        gather_over: with sequence parallelism the tensor-parallel group, whose ranks each hold a part of the tokens of `x`.
        accumulate: add it to the weight's `main_grad` with the fused kernel of `--gradient-accumulation-fusion`, and return a
            placeholder, as elsewhere in Megatron.
    """
    if gather_over is not None:  # again, as in Megatron: between forward and W only this rank's part is kept
        x = gather_from_sequence_parallel_region(x, group=gather_over)
    grad, x = prepare_input_tensors_for_wgrad_compute(grad, x)
    if not accumulate:
        return grad.t().matmul(x)
    import fused_weight_gradient_mlp_cuda as kernels  # type: ignore[import-not-found,unused-ignore]

    in_fp32 = weight.main_grad.dtype == torch.float32
    (kernels.wgrad_gemm_accum_fp32 if in_fp32 else kernels.wgrad_gemm_accum_fp16)(x, grad, weight.main_grad)
    # The hook of data parallelism then adds no gradient, but for a weight that two layers share, where it adds these zeros.
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight, dtype=x.dtype) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _rows(gather_over: Any, x: Tensor) -> Tensor:
    """Reshape ``[tokens, 1, in]`` to ``[tokens, in]``, gathered first from all ranks of `gather_over` if that is given."""
    if gather_over is not None:
        x = gather_from_sequence_parallel_region(x, group=gather_over)
    return x.reshape(-1, x.shape[-1])
