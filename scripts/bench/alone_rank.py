"""One rank's part of a plan, run by itself with real layers: messages that it would receive are made up, others are dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.plan import Op, Plan
from megatron_epp.runtime.executor import HANDLERS
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.recorder import Recorder

STATE_BYTES, ALLOCATED_BYTES = 18.0, 6.0
"""Bytes of a parameter in training, and here, where master weights and Adam's moments are counted and not allocated."""
_PASSES = {"cuda": 2, "cpu": 3}
"""Passes of a rank, of which the last is timed."""


@dataclass(frozen=True, slots=True)
class Model:
    """Model of which the stages of a plan are parts.

    Attributes:
        flags: Megatron's, with underscores, of a dense model with rotary positions.
        by_engine: layers are Transformer Engine's, with its fused kernels; else Megatron's local ones.
        loss_block_tokens: of the loss by blocks; 0 for a whole one.
        device: of all tensors.
        dtype: of weights and messages.
    """

    flags: Mapping[str, Any]
    by_engine: bool
    loss_block_tokens: int
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ran:
    """Times and memory of a rank by itself.

    Attributes:
        events: action, start and end in microseconds, processor time, as of `Recorder.events`.
        peak_bytes: of the allocator, and what training has besides; on a CPU, of saved tensors and caches, and static memory.
    """

    events: Sequence[tuple[str, float, float, float | None]]
    peak_bytes: int


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """Set up Megatron's groups for one rank, for a block."""
    from megatron.core import mpu
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mpu.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def run(plan: Plan, rank: int, model: Model, host_bytes: int = 0) -> Ran:
    """Run a rank's part of a plan until memory has been met and kernels chosen, and time it once more.

    Args:
        plan: of stages without shards of the vocabulary.
        model: of which the stages are.
    """
    splits = any(step.action.op is Op.W for row in plan.ranks for step in row)
    built = {number: _stage(plan, number, model, splits) for number in plan.stages_of(rank)}
    stages = {number: stage for number, (_, stage) in built.items()}
    inputs, links = _inputs(plan, model), _NoLinks()
    host = HostMemory(model.device, host_bytes)
    own = weight_handlers(plan, stages) if splits else {}
    on_gpu = model.device.type == "cuda"
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters]
    for _ in range(_PASSES[model.device.type]):
        for chunk, stage in built.values():
            chunk.zero_grad_buffer()
            stage.begin(inputs)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        recorder = Recorder()
        with (
            ActivationOffload(host, parameters, lambda: sum(stage.kv_cache.num_bytes for stage in stages.values())) as saved,
            offload_handlers(plan, rank, stages, host, saved, {**HANDLERS, **own}) as handlers,
        ):
            executor_of(plan, rank, stages, links, recorder, handlers=own | handlers).run()  # type: ignore[arg-type]
        events = recorder.events()
        for stage in stages.values():
            stage.end()
    if not on_gpu:
        return Ran(events, plan.static_bytes[rank] + saved.peak_bytes)
    states = int((STATE_BYTES - ALLOCATED_BYTES) * sum(parameter.numel() for parameter in parameters))
    return Ran(events, torch.cuda.max_memory_allocated() + states)


class _NoLinks:
    """Stands for the links of a pipeline, with the methods of `runtime.links.links.Links` that an executor calls."""

    slots_on_cpu = False

    def open_slots(self, slots: Mapping[Any, int], num_bytes: int, device: torch.device) -> None:
        """Take the memory of slots, as in training."""
        self._held = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(sum(slots.values()))]

    def post_receive(self, shape: Any, dtype: torch.dtype, device: torch.device, peer: int, gradient: bool) -> SimpleNamespace:
        scale = 1e-6 if gradient else 1.0
        return SimpleNamespace(wait=lambda: torch.randn(shape, device=device, dtype=dtype) * scale)

    def send(self, tensor: Tensor, peer: int, gradient: bool) -> None:
        """Drop it."""

    def finish_sends(self) -> None:
        """None are under way."""


def _stage(plan: Plan, number: int, model: Model, splits: bool) -> tuple[Any, Any]:
    """Build a stage with weights, gradient buffers and Megatron's hooks."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from megatron_epp.features.split_weights.linear_layers import split_where_possible
    from megatron_epp.mcore.model import rotary
    from megatron_epp.mcore.model.adopt import number_attentions, relayed
    from megatron_epp.mcore.model.block_loss import BlockLoss
    from megatron_epp.mcore.model.stage import MegatronStage

    first, last = number == 0, number == plan.num_stages - 1
    config = _config(model, int(plan.num_layers[number]), splits)
    local = specs.get_gpt_layer_local_spec
    spec = specs.get_gpt_layer_with_transformer_engine_spec() if model.by_engine else local(normalization="RMSNorm")
    bare = GPTModel(
        config,
        relayed(spec),
        model.flags["vocab_size"],
        max(plan.lengths),
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).to(model.device, model.dtype)
    number_attentions(bare)
    rotary.adopt(bare)
    if splits:
        split_where_possible(bare)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), bare)
    loss = BlockLoss(bare, model.loss_block_tokens) if last and model.loss_block_tokens else None
    return chunk, MegatronStage(chunk, config, is_first=first, is_last=last, tp_size=1, block_loss=loss)


def _config(model: Model, num_layers: int, splits: bool) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    widths = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")
    fused = ("apply_rope_fusion", "gradient_accumulation_fusion")
    return TransformerConfig(
        num_layers=num_layers,
        **{name: model.flags[name] for name in widths if model.flags.get(name)},
        **dict.fromkeys(fused, model.by_engine),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        bias_activation_fusion=model.by_engine or not model.flags.get("no_bias_swiglu_fusion"),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        deallocate_pipeline_outputs=True,
        delay_wgrad_compute=splits and model.by_engine,
        bf16=model.dtype is torch.bfloat16,
        params_dtype=model.dtype,
        pipeline_dtype=model.dtype,
    )


def _inputs(plan: Plan, model: Model) -> Callable[[int], Any]:
    """Return what the ends read of each chunk: random tokens and labels at their true positions."""
    from megatron_epp.mcore.model.stage import ChunkInputs

    def of(chunk: int) -> ChunkInputs:
        positions = torch.cat([torch.arange(segment.start, segment.end) for segment in plan.chunks[chunk].segments])
        padded = functional.pad(positions, (0, plan.padded_tokens(chunk) - len(positions)))[None].to(model.device)
        tokens, labels = (torch.randint(model.flags["vocab_size"], padded.shape, device=model.device) for _ in range(2))
        return ChunkInputs(tokens, padded, labels, torch.ones(padded.shape, device=model.device))

    return [of(chunk) for chunk in range(len(plan.chunks))].__getitem__
