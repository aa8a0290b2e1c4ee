"""Hooks, parametrizations and functions that a program gives to a model's modules act in slices as in Megatron, or are refused."""

import pytest

from tests.support.mcore.forked import job, returned

TOLERANCE = 1e-5
HOOKS = ("forward pre-hook", "forward hook", "backward pre-hook", "backward hook")
ALL = (*HOOKS, "forward")
LAYER = "decoder.layers.1"
GPT = {
    "embedding.word_embeddings": ("forward pre-hook", "forward hook", "forward"),
    "rotary_pos_emb": ("forward pre-hook", "forward hook", "forward"),
    "decoder": ("forward hook", "backward pre-hook"),  # Megatron passes names to it
    LAYER: ("forward hook", "backward pre-hook", "forward"),
    f"{LAYER}.input_layernorm": ALL,
    f"{LAYER}.self_attention": ALL,
    f"{LAYER}.self_attention.linear_qkv": ALL,
    f"{LAYER}.self_attention.core_attention": ALL,
    f"{LAYER}.mlp": ALL,
    "output_layer": ("forward pre-hook", "forward hook", "forward"),  # Megatron's loss takes none in backward
}
"""By module, what is attached. All that is not in `REFUSED` acts."""
REFUSED = {
    "rotary_pos_emb: forward pre-hook": "module.rotary_pos_emb (RotaryEmbedding) has a forward pre-hook attached.<locals>",
    "rotary_pos_emb: forward": "module.rotary_pos_emb (RotaryEmbedding) has another forward than plans have put there",
    f"{LAYER}: forward": f"module.{LAYER} (TransformerLayer) has another forward than",
    f"{LAYER}.input_layernorm: forward": f"module.{LAYER}.input_layernorm (LayerNorm) has another forward than",
    f"{LAYER}.self_attention.core_attention: forward": "core_attention (DotProductAttention) has another forward than",
    "output_layer: forward": "the model has got its own output_layer.forward",
}


def test_x():
    found = [returned(job(1, "attachments:between_calls", cases=GPT, positions="rope", mode=mode)) for mode in (None, "full", "mlp", "selective")]
    import json; open('/tmp/h/found.json','w').write(json.dumps(found, indent=1))
    assert 0
