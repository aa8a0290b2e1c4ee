"""A hybrid model's layers without Transformer Engine, layers of latent attention among them (from Megatron 0.19 on).

For `--spec tests.support.mcore.latent_hybrid stack_spec`. Core attention is what `stand_ins.plain_attention` says when a
process imports this first.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from tests.support.mcore import local_hybrid

_ATTENTION = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
stack_spec = local_hybrid.with_layers(local_hybrid.stack_spec, mla_layer=local_hybrid.attention_layer(_ATTENTION))
