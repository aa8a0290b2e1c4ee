"""Runs one layer of Megatron forward for each of several sets of flags, and compares what autograd keeps with the formulas; and
what a layer with experts holds besides, on ranks that share these.

Kernels that a CPU lacks have stand-ins that keep what they keep on a GPU: a norm its input and a statistic or two in fp32, a
fused rotation nothing but the angles, which are not the layer's, and attention queries, keys, values, its output and one number
in fp32 of each head. In a gated delta net a convolution keeps its input, the norm of heads its output and a statistic, the rule
its inputs and the pairs of a block, and the gate its two factors. The kernel of Mamba-2 keeps its input and its output ahead of
the gate, and the norm behind it its input and a statistic of every group. All else is Megatron's own code, and this package's.
"""

from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training.arguments import core_transformer_config_from_args

from megatron_epp.features.exchanges.exchange_buffer import ExchangeBuffer
from megatron_epp.mcore import entry
from megatron_epp.mcore.model.core_attention import ChunkParams
from megatron_epp.mcore.model.kinds import KINDS
from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.tools.formulas import CPU
from megatron_epp.tools.formulas.analytic import analytic_profile
from megatron_epp.tools.formulas.layer_sizes import BLOCK_TOKENS
from megatron_epp.tools.formulas.library import shape_of
from megatron_epp.tools.formulas.model_shape import RecurrentShape
from tests.mcore.test_refusals import arguments
from tests.support.mcore import deep_ep_stand_in, fla_stand_in
from tests.support.runtime.allocations import Allocations

ANGLES = {}
"""Storages of rotary angles by address, which layers share and keep beyond a chunk."""


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, statistics):
        x = x.contiguous()
        ctx.save_for_backward(x, *(x.new_zeros(x.shape[:-1], dtype=torch.float32) for _ in range(statistics)))
        return x * weight


class Norm(torch.nn.Module):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.statistics = 1 if config.normalization == "RMSNorm" else 2

    def forward(self, x):
        return _Norm.apply(x, self.weight, self.statistics)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        query, key, value = (one.contiguous() for one in (query, key, value))
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        ctx.save_for_backward(query, key, value, output, query.new_zeros(query.shape[:3], dtype=torch.float32))
        return output.flatten(2)


class Attention(torch.nn.Module):
    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, *_, **__):
        return _Attention.apply(query, key, value)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, angles):
        ANGLES[angles.untyped_storage().data_ptr()] = angles
        ctx.save_for_backward(angles)
        return heads.clone(memory_format=torch.contiguous_format)


def rotated(heads, angles, *_, **__):
    return _Rotation.apply(heads, angles)


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, kept, *_):
        ctx.save_for_backward(*kept)
        return output


def convolved(x, *_, **__):
    return _Keeping.apply(x.detach().clone(), [x], x), None


def normalized(x):
    output = x.detach().clone()
    return _Keeping.apply(output, [output, x.new_zeros(x.shape[:-1], dtype=torch.float32)], x)


def ruled(q, k, v, g, beta, **_):
    pairs, decays = q.new_zeros(*q.shape[:3], BLOCK_TOKENS), torch.zeros_like(g)
    return _Keeping.apply(v.detach().clone(), [q, k, v, decays, beta, pairs], q, k, v, g, beta), None


def _gated(self, x, gate):
    normed = self.out_norm(x.reshape(-1, x.shape[-1]))
    return _Keeping.apply(normed.detach().clone(), [normed, gate], normed, gate)


def scanned(rows, *, A, headdim, **_):
    ungated = rows.new_zeros(*rows.shape[:2], len(A) * headdim)
    return _Keeping.apply(torch.zeros_like(ungated), [rows, ungated], rows)


def group_normed(self, x):
    statistics = x.new_zeros(*x.shape[:-1], x.shape[-1] // self.group_size, dtype=torch.float32)
    return _Keeping.apply(x.detach().clone(), [x, statistics], x)


def _alone(symbol, whole):
    """Return the spec of a hybrid model's layer with one part of a GPT's, or with Mamba-2."""
    if symbol == "M":
        from megatron.core.ssm import mamba_mixer

        from tests.support.mcore import mamba_hybrid, mamba_stand_in

        mamba_mixer.mamba_split_conv1d_scan_combined, mamba_stand_in.RMSNorm.forward = scanned, group_normed
        layer = mamba_hybrid.stack_spec.submodules.mamba_layer
        return replace(layer, submodules=replace(layer.submodules, norm=Norm))
    if symbol in "-E":
        parts = {"pre_mlp_layernorm": Norm, "mlp": whole.mlp, "mlp_bda": whole.mlp_bda}
    else:
        parts = {"input_layernorm": Norm, "self_attention": whole.self_attention, "self_attn_bda": whole.self_attn_bda}
    module = MLPLayer if symbol == "-" else TransformerLayer
    return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**parts))


def _with_delta_net(attention_norm):
    fla_stand_in.install(l2norm=normalized, causal_conv1d=convolved, chunk_gated_delta_rule=ruled)
    GatedDeltaNet._apply_gated_norm = _gated
    submodules = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=attention_norm, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=submodules)


def run(cases):
    """Return for every case its bytes per token by formula and in truth, those of a chunk of any length, and the tensors."""
    entry.prepare()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return [_compared(flags, rope_utils, rope_utils._apply_rotary_pos_emb_bshd) for flags in cases]


def _compared(flags, rope_utils, unfused):
    args = arguments(*flags)
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    shape = shape_of({**vars(args), "vocab_size": 128})
    planned = analytic_profile(shape, CPU).layer.bytes_per_token if shape.is_hybrid else None
    shape = shape if shape.delta is None else RecurrentShape.of(shape, "G")
    rope_utils._apply_rotary_pos_emb_bshd = rotated if args.apply_rope_fusion else unfused
    args.apply_rope_fusion = args.moe_grouped_gemm = False  # both need Transformer Engine
    try:
        few, many = (_kept(args, tokens) for tokens in (64, 128))
    except RuntimeError as error:
        return {"error": str(error), "flags": flags}
    finally:
        rope_utils._apply_rotary_pos_emb_bshd = unfused
    small, large = (sum(size for size, _ in kept) for kept in (few, many))
    return {
        "flags": flags,
        "planned": shape.layer_bytes_per_token if planned is None else planned,
        "attended": shape.attended_bytes_per_token,
        "measured": (large - small) / 64,
        "constant": 2 * small - large,
        "tensors": [f"{size} bytes: {what}" for size, what in many],
    }


def built(args, tokens):
    """Return one layer of Megatron, its config, and rotary angles of the tokens or None."""
    config = core_transformer_config_from_args(args)
    latent = args.multi_latent_attention
    spec = get_gpt_layer_local_spec(args.num_experts, False, args.qk_layernorm, latent, normalization=args.normalization)
    whole, attention = spec.submodules, spec.submodules.self_attention.submodules
    names = ["q_layernorm", "kv_layernorm" if latent else "k_layernorm"] if args.qk_layernorm else []
    for module, name in [(whole, "input_layernorm"), (whole, "pre_mlp_layernorm"), *((attention, name) for name in names)]:
        setattr(module, name, Norm)
    if latent and args.q_lora_rank is None:
        attention.q_layernorm = IdentityOp
    attention.core_attention = Attention
    pattern = args.hybrid_layer_pattern
    if args.experimental_attention_variant or pattern == "G":
        whole.self_attention = _with_delta_net(Norm)
    spec = _alone(pattern, whole) if pattern else spec
    groups = {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()} if pattern == "M" else {}
    layer = build_module(spec, config=config, layer_number=2, **groups).to(args.params_dtype)
    for kind in KINDS:
        if kind.mixes_tokens:
            resolve_name(kind.adopt)(layer, args)
    angles = None
    if args.position_embedding_type == "rope" and not latent:
        angles = RotaryEmbedding(config.kv_channels, args.rotary_percent)(tokens)
        ANGLES[angles.untyped_storage().data_ptr()] = angles
    return layer, config, angles


def _kept(args, tokens):
    """Return bytes and description of every storage that autograd keeps of a layer's forward, but for parameters and angles."""
    ANGLES.clear()
    layer, config, angles = built(args, tokens)
    pattern = args.hybrid_layer_pattern
    has_recurrence = bool(args.experimental_attention_variant or pattern in ("G", "M"))
    weights, found = {one.untyped_storage().data_ptr() for one in layer.parameters()}, {}

    def keep(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            found.setdefault(memory.data_ptr(), (memory, tensor.dtype, tuple(tensor.shape)))
        return tensor

    params = None
    if has_recurrence:
        table = SegmentTable.build(Chunk((Segment(0, 0, tokens),)), tokens)
        params = ChunkParams(ChunkContext(0, table, SlicedKVCache()))
    x = torch.randn(tokens, 1, config.hidden_size, dtype=args.params_dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, attention_mask=None, packed_seq_params=params, **({} if pattern == "-" else {"rotary_pos_emb": angles}))
    return [(memory.nbytes(), f"{dtype} {shape}") for at, (memory, dtype, shape) in found.items() if at not in ANGLES]


TOKENS = 512


def dispatched(cases):
    """Return for every case, of sizes and flags, the bytes per token by formula and in truth."""
    entry.prepare()
    torch.distributed.init_process_group("gloo")
    return [_dispatched(sizes, flags) for sizes, flags in cases]


def _dispatched(sizes, flags):
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    args = arguments(*flags, *(f"--{name.replace('_', '-')}={size}" for name, size in sizes.items()))
    args.params_dtype = torch.bfloat16
    args.apply_rope_fusion = args.moe_grouped_gemm = False  # both need Transformer Engine
    mean = torch.tensor(_held(args, TOKENS) / TOKENS)  # of the ranks, which get different numbers of copies
    parallel_state.destroy_model_parallel()
    torch.distributed.all_reduce(mean)
    planned = shape_of({**vars(args), "vocab_size": 128}).dispatched_bytes_per_token
    return planned, mean.item() / torch.distributed.get_world_size()


def _held(args, tokens):
    """Return the peak bytes of a forward above those that it keeps for its backward."""
    layer, config, angles = built(args, tokens)
    own = tokens // args.tensor_model_parallel_size
    with Allocations() as allocated:
        x = torch.randn(own, 1, config.hidden_size, dtype=args.params_dtype, requires_grad=True)
        output, _ = layer(x, attention_mask=None, rotary_pos_emb=angles)
        torch.distributed.barrier()  # or the group's thread may hold a tensor yet
        return allocated.peak - (allocated.live - output.nbytes)


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
