"""Output layer and loss for the trained tokens of a chunk only; no logits are computed for other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_epp.mcore import releases
from megatron_epp.mcore.patches.stock_functions import is_installed
from megatron_epp.plan.attributes import having

LOSS = "compute_language_model_loss"
_OF_THE_LOSS = ("forward", "_postprocess", LOSS)
"""Methods of Megatron's models that compute the loss from the output layer's input."""


class OfRows:
    """Output layer and loss that take the rows of some tokens, None for all."""

    _rows: Tensor | None = None

    @property
    def obstacle(self) -> str:
        """Change of a program since the loss was chosen, with a remedy; empty for none."""
        raise NotImplementedError

    def whole(self) -> AbstractContextManager[None]:
        """Return a context, inside `instead` of a subclass, in which the losses of all tokens are computed."""
        return having(self, _rows=None)


class TrainedRows(OfRows):
    """Replacement of the input of the output layer and loss of an unwrapped model by the rows of tokens that count.

    With sequence parallelism the ranks' parts are gathered before rows are taken, of which ranks have different numbers.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._layer = model, model.output_layer

    @property
    def obstacle(self) -> str:
        own = ", ".join(own_functions(self._model))
        return own and f"the model has got its own {own}, which plans would not run: assign it before the first call"

    @contextmanager
    def instead(self, rows: Tensor | None = None) -> Iterator[None]:
        """Return a context in which the model runs a chunk with labels; `rows` are as `rows_to_compute` returns them."""
        if rows is None:
            yield
            return
        model, layer, self._rows = self._model, self._layer, rows
        output, losses, shares_tokens = layer.forward, model.compute_language_model_loss, layer.sequence_parallel

        def output_of_rows(input_: Tensor, *rest: Any, **named: Any) -> Any:
            if shares_tokens:  # the layer itself adds up the ranks' gradients of its input
                input_ = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False, group=layer.tp_group)
            return output(input_ if self._rows is None else input_.index_select(0, self._rows), *rest, **named)

        def losses_of_rows(labels: Tensor, logits: Tensor) -> Tensor:
            """Return the losses of all tokens, ``[batch, tokens]``, given the logits ``[rows, batch, entries]``."""
            if self._rows is None:
                return losses(labels, logits)
            row_losses = losses(labels.index_select(1, self._rows), logits)
            return row_losses.new_zeros(labels.shape).index_copy(1, self._rows, row_losses)

        # On the objects, and only for this forward. Without sequence parallelism: the rows are gathered already, and the layer
        # would gather them again.
        layer.forward, model.compute_language_model_loss, layer.sequence_parallel = output_of_rows, losses_of_rows, False
        try:
            yield
        finally:
            del layer.forward, model.compute_language_model_loss
            layer.sequence_parallel, self._rows = shares_tokens, None


def trained_rows(model: torch.nn.Module) -> TrainedRows | None:
    """Return how a last stage computes the loss of trained tokens only; None for a model whose loss is not Megatron's."""
    bare: Any = unwrap_model(model)
    if type(getattr(bare, "output_layer", None)) not in releases.multiplying_output_layers():
        return None
    if releases.fuses_output_with_loss(bare) or own_functions(bare):
        return None
    return TrainedRows(bare)


def own_functions(model: Any) -> list[str]:
    """Return the names of the functions between the output layer's input and the loss that are not Megatron's own.

    A script's class may define them. If they are assigned to the object, they would also be lost when a replacement ends.
    """
    functions = {name: vars(model).get(name, getattr(type(model), name, None)) for name in _OF_THE_LOSS}
    own = [name for name, function in functions.items() if not is_installed(getattr(function, "__func__", function))]
    return [*own, *["output_layer.forward"] * ("forward" in vars(getattr(model, "output_layer", None) or model))]


def rows_to_compute(loss_mask: Tensor, entries: int, width: int) -> Tensor | None:
    """Return the indices of the tokens that count in a mask on the CPU, rising; None if it is best to compute all.

    If none counts there is one, since all ranks, whose mask is the same, launch the same kernels and collectives; the mask
    leaves its loss out. The rows are a copy that is kept for the weight's gradient, so all tokens are computed if that copy is
    larger than the logits that are not computed.
    """
    rows = loss_mask.reshape(-1).nonzero().squeeze(1)
    if len(rows) == 0:
        rows = torch.zeros(1, dtype=torch.int64)
    return rows if len(rows) * (entries + width) <= loss_mask.numel() * entries else None
