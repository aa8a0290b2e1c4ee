"""A hybrid model's layers without Transformer Engine, layers of latent attention among them (from Megatron 0.19 on).

For `--spec tests.support.mcore.latent_hybrid stack_spec`. Core attention is what `stand_ins.plain_attention` says when a
process imports this first.
"""

from dataclasses import replace

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tests.support.mcore import local_hybrid

_LAYER = ModuleSpec(
    module=TransformerLayer,
    submodules=TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention,
        self_attn_bda=get_bias_dropout_add,
    ),
)

stack_spec = ModuleSpec(
    module=local_hybrid.stack_spec.module, submodules=replace(local_hybrid.stack_spec.submodules, mla_layer=_LAYER)
)
