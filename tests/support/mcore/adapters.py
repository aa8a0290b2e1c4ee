"""Adapters beside frozen weights, and models of which only a part trains.

`--spec tests.support.mcore.adapters NAME` trains such a part of a GPT, a key of `PARTS`. Imports Megatron.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel as tp
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

RANK = 8


class Adapted(nn.Module):
    """A linear layer of Megatron's that does not train, and two small ones beside it that do."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape
        self.to_wrap, self.down, self.up = layer, nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = self.to_wrap(x, *rest, **named)
        in_shards = getattr(self.to_wrap, "sequence_parallel", False)
        if not isinstance(self.to_wrap, tp.RowParallelLinear):
            return output + self.up(self.down(tp.gather_from_sequence_parallel_region(x) if in_shards else x)), bias
        add_up = tp.reduce_scatter_to_sequence_parallel_region if in_shards else tp.reduce_from_tensor_model_parallel_region
        return output + add_up(self.up(self.down(x))), bias


def adapt(layer: Any) -> None:
    layer.requires_grad_(False)
    for part in (layer.self_attention, layer.mlp):
        for name, module in list(part.named_children()):
            if name.startswith("linear_"):
                setattr(part, name, Adapted(module))


PARTS: dict[str, Callable[[int, int], str]] = {
    "adapters": lambda number, count: "adapted",
    "some": lambda number, count: "frozen" if number % 2 else "adapted",
    "last": lambda number, count: "frozen" if number <= count // 2 else "adapted",
    "first": lambda number, count: "adapted" if number == 1 else "frozen",
    "later": lambda number, count: "frozen" if number <= count // 2 else "trained",
    "layers": lambda number, count: "trained",
    "head": lambda number, count: "frozen",
}
"""What is done with a layer, given its number from 1 and the number of all. The embedding is frozen; output layer and final
norm are too, but for ``layers`` and ``head``."""


def freeze(model: Any, part: str) -> None:
    """Freeze all of a model chunk but a part, with adapters where that says so."""
    for layer in model.decoder.layers:
        what = PARTS[part](layer.layer_number, model.config.num_layers)
        if what == "adapted":
            adapt(layer)
        elif what == "frozen":
            layer.requires_grad_(False)
    ends = [getattr(model, "embedding", None)]
    if part not in ("layers", "head"):
        ends += [getattr(model, "output_layer", None), getattr(model.decoder, "final_layernorm", None)]
    for end in filter(None, ends):
        end.requires_grad_(False)


class _Layer(TransformerLayer):
    part: str


def _freeze_when_built(model: nn.Module, name: str, module: Any) -> None:
    """Freeze a model of `_Layer`, which torch calls this with when the last of its modules is about to be there."""
    if not isinstance(model, GPTModel):
        return
    last = "output_layer" if model.post_process else "decoder"
    if name == last and module is not None:
        layers = module.layers if last == "decoder" else model.decoder.layers
        parts = {layer.part for layer in layers if isinstance(layer, _Layer)}
        if parts:
            vars(model)["_modules"][name] = module
            freeze(model, parts.pop())


torch.nn.modules.module.register_module_module_registration_hook(_freeze_when_built)


def _specs(layers: Any) -> Iterator[Any]:
    for part in PARTS:
        yield replace(layers, module=type("Layer", (_Layer,), {"part": part}))


adapters, some, last, first, later, layers, head = _specs(gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"))
if gpt_layer_specs.HAVE_TE:
    engine_adapters, *_, engine_layers, _ = _specs(gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec())
