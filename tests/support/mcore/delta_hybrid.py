"""A hybrid model's layers without Transformer Engine, gated delta nets among them.

For `--spec tests.support.mcore.delta_hybrid stack_spec`, and `two_gpt_layers`.
"""

from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tests.support.mcore import fla_stand_in, local_hybrid

fla_stand_in.install()

_NET = ModuleSpec(
    module=GatedDeltaNet,
    submodules=GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear),
)


def alternating(spec, num_layers):
    delta = replace(spec, submodules=replace(spec.submodules, self_attention=_NET))
    layers = [(delta, spec)[number % 2] for number in range(num_layers)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


two_gpt_layers = alternating(get_gpt_layer_local_spec(), 2)
"""Of every stage of a GPT, where all have two."""

stack_spec = local_hybrid.with_layers(local_hybrid.stack_spec, gdn_layer=local_hybrid.attention_layer(_NET))
