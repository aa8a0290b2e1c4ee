"""Output layers with one output in the place of a vocabulary's logits: of value models, for losses that read values."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.losses import Loss, load_loss
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.model.language_model import outputs_of
from megatron_epp.plan import EppError
from megatron_epp.plan.flags import AUTO


class ValueHead(torch.nn.Linear):
    """Output layer with one output and no bias, equal on all tensor-parallel ranks: it has the attribute of Megatron's norms by
    which gradients are added up over the ranks. With sequence parallelism all ranks' values are gathered.
    """

    def __init__(self, config: Any, group: torch.distributed.ProcessGroup) -> None:
        device = "cpu" if config.use_cpu_initialization or not torch.cuda.is_available() else torch.cuda.current_device()
        super().__init__(config.hidden_size, 1, bias=False, device=device, dtype=config.params_dtype)
        config.init_method(self.weight)
        self.sequence_parallel, self._group = config.sequence_parallel, group
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        """Return values ``[tokens, batch, 1]`` in fp32, given ``[tokens / shards, batch, hidden]``, and no bias."""
        values = super().forward(input_).float()
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._group)
        return values, None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the weight for a checkpoint, by a name of its own: in that of a language model's the name has logits."""
        tensors = make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {}, sharded_offsets)
        for tensor in tensors.values():
            tensor.key = tensor.key.replace("output_layer", "value_head")
        return tensors


def put_head(model: Any, args: argparse.Namespace, vp_stage: int | None) -> None:
    """Give a model that Megatron has just built a value head, if the run's loss reads values. Other chunks stay as they are."""
    if getattr(load_loss(args.epp_loss), "has_values", False) and model.post_process:
        model.output_layer = ValueHead(model.config, model.output_layer.tp_group)


def check_head(model: torch.nn.Module, loss: Loss, args: argparse.Namespace) -> None:
    """Raise `EppError` if a loss of values meets an output layer of a vocabulary or settings of logits, or vice versa."""
    bare: Any = unwrap_model(model)
    layer = getattr(bare, "output_layer", None)
    is_head = outputs_of(layer) == 1
    if getattr(loss, "has_values", False):
        if bare.share_embeddings_and_output_weights:
            raise EppError(
                f"{loss.name} reads values, and the embedding is tied to the output layer: build the model with "
                "share_embeddings_and_output_weights=False"
            )
        if not is_head:
            raise EppError(
                f"{loss.name} reads values, and the output layer ({type(layer).__name__}) has {outputs_of(layer)} outputs: put "
                "a layer with one output in its place, model.output_layer"
            )
        if args.epp_loss_block_tokens != AUTO:
            raise EppError(f"{names_of(args)['loss_block_tokens']} is of logits, and {loss.name} reads values: leave it out")
    elif is_head:
        raise EppError(
            f"{loss.name} reads log-probabilities, and the output layer ({type(layer).__name__}) has one output: give a loss "
            "with has_values, or a model with the logits of a vocabulary"
        )
