"""Job of `test_experts.py`: buffers for a layer of experts, over two ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import fused_a2a

from megatron_epp.features.exchanges.exchange_buffer import ExchangeBuffer
from tests.support.mcore import deep_ep_stand_in


def buffers(sizes: Sequence[Sequence[int]], spare: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return what each dispatcher allocates for chunks of so many tokens and so many spare bytes, by iteration and rank."""
    mpu.initialize_model_parallel(expert_model_parallel_size=2)
    cpu = torch.device("cpu")
    with deep_ep_stand_in.installed():
        layer = _layer("flex", "deepep")
        deep = ExchangeBuffer([layer], cpu)
        deep.allocate()
        allocated = fused_a2a._buffer
        layer(torch.randn(3 + dist.get_rank(), 1, 16))
        of_deep = {"num_bytes": allocated.num_nvl_bytes, "is taken": fused_a2a._buffer is allocated}
        of_deep["reserves"] = deep.follows_chunks
        fused_a2a._buffer = None
        hybrid, made = ExchangeBuffer([_layer("flex", "hybridep")], cpu), []
        hybrid.allocate()
        for tokens, spare_bytes in zip(sizes, spare, strict=True):
            hybrid.reserve(tokens[dist.get_rank()], spare_bytes[dist.get_rank()])
            made.append(fused_a2a._hybrid_ep_buffer)
        of_hybrid = {"sizes": [buffer.most for buffer in made], "num buffers": len(dict.fromkeys(map(id, made)))}
        of_hybrid["allocates"] = fused_a2a._buffer is not None
        fused_a2a.reset_hybrid_ep_buffer()
        plain = ExchangeBuffer([_layer("alltoall", "deepep")], cpu)
        plain.allocate()
        return {"deepep": of_deep, "hybridep": of_hybrid, "alltoall": fused_a2a._buffer is not None or plain.follows_chunks}


def _layer(dispatcher: str, backend: str) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=4,
        moe_router_topk=2,
        add_bias_linear=False,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type=dispatcher,
        moe_flex_dispatcher_backend=backend,
        use_cpu_initialization=True,
    )
    return specs.get_gpt_layer_local_spec(num_experts=4).submodules.mlp(config)
