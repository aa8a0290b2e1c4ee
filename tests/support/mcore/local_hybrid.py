"""A hybrid model's layers without Transformer Engine: layers of attention, an MLP or four experts.

For `--spec tests.support.mcore.local_hybrid stack_spec`.
"""

from dataclasses import replace
from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid import hybrid_block as block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as prediction
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_OF = {"linear_qkv": ColumnParallelLinear, "core_attention": DotProductAttention, "linear_proj": RowParallelLinear}
_CAUSAL = {"attn_mask_type": AttnMaskType.causal}
_ATTENTION = ModuleSpec(module=SelfAttention, params=_CAUSAL, submodules=SelfAttentionSubmodules(**_OF))
_PARTS = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
_MLP = partial(MLP.as_mlp_submodule, submodules=_PARTS)


def attention_layer(attention):
    """Return a layer that is this attention, of any kind, behind a norm."""
    parts = {"input_layernorm": WrappedTorchNorm, "self_attention": attention, "self_attn_bda": get_bias_dropout_add}
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(**parts))


def mamba_layer(mixer):
    """Return a layer that is this state-space mixer behind a norm."""
    parts = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=parts)


def with_layers(spec, **layers):
    return ModuleSpec(module=spec.module, submodules=replace(spec.submodules, **layers))


def _behind_a_norm(module, mlp):
    parts = TransformerLayerSubmodules(pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add)
    return ModuleSpec(module=module, submodules=parts)


_EXPERTS = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=4)
_PREDICTOR = prediction.get_mtp_layer_spec(None, use_transformer_engine=False)
_PREDICTIONS = prediction.MultiTokenPredictionBlockSubmodules([_PREDICTOR])
_LAYERS = HybridStackSubmodules(
    attention_layer=attention_layer(_ATTENTION),
    mlp_layer=_behind_a_norm(MLPLayer, _MLP),
    moe_layer=_behind_a_norm(TransformerLayer, _EXPERTS),
    mtp_block_spec=ModuleSpec(module=prediction.MultiTokenPredictionBlock, submodules=_PREDICTIONS),
)
stack_spec = ModuleSpec(module=HybridStack, submodules=_LAYERS)


def use_torch_norms() -> None:
    """The norm behind the last layer is no part of a spec."""
    block.TENorm = WrappedTorchNorm
