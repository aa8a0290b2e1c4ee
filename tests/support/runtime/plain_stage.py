"""A small transformer in plain torch, cut into pipeline stages that run by plan, and the same model run whole."""

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.split_weights.deferred_gradients import Linear, WeightGradients
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.plan import Segment
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.out_of_memory import OutOfMemoryReport
from tests.support.runtime.dense_attention import dense_attention
from tests.support.runtime.synthetic_sequences import MemoryDataset

VOCAB, HIDDEN, QUERY_HEADS, KV_HEADS, CHANNELS, LONGEST = 29, 16, 4, 2, 4, 128
SCALE = CHANNELS**-0.5


class RandomText(MemoryDataset):
    def tokens(self, index, start=0, end=None):
        return np.random.default_rng(index).integers(VOCAB, size=self.lengths[index] + 1)[start:end]


def batch_of(plan):
    indices = tuple(range(len(plan.lengths)))
    return GlobalBatch(indices=indices, lengths=plan.lengths, plan=plan, dataset=RandomText(plan.lengths))


class Layer(nn.Module):
    """A layer of attention and an MLP that is `widening` times as wide."""

    def __init__(self, hidden=HIDDEN, channels=CHANNELS, widening=2):
        super().__init__()
        self.channels = channels
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, (QUERY_HEADS + 2 * KV_HEADS) * channels)
        self.out = nn.Linear(QUERY_HEADS * channels, hidden)
        self.up, self.down = nn.Linear(hidden, widening * hidden), nn.Linear(widening * hidden, hidden)

    def forward(self, x, attend):
        heads = self.qkv(self.norm1(x)).unflatten(1, (-1, self.channels))
        x = x + self.out(attend(*heads.split([QUERY_HEADS, KV_HEADS, KV_HEADS], dim=1)).flatten(1))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Part(nn.Module):
    """The layers of one stage, with the embedding before the first and the logits after the last."""

    def __init__(self, num_layers, is_first, is_last, layer=Layer):
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN) if is_first else None
        self.places = nn.Embedding(LONGEST, HIDDEN) if is_first else None
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.logits = nn.Linear(HIDDEN, VOCAB) if is_last else None

    def forward(self, x, arrays, run_layer):
        """Hidden states [tokens, HIDDEN], on the last stage the summed loss; `run_layer` takes a layer's number and input."""
        if self.words is not None:
            x = self.words(arrays.tokens) + self.places(arrays.position_ids)
        for number in range(len(self.layers)):
            x = run_layer(number, x)
        if self.logits is None:
            return x
        return (functional.cross_entropy(self.logits(x), arrays.labels, reduction="none") * arrays.loss_mask).sum()


def build_part(num_layers, stage, dtype=torch.float32, layer=Layer):
    """Stage `stage` of a model with `num_layers[s]` layers in stage s; its weights depend on nothing else but their kind."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stage)
        return Part(num_layers[stage], stage == 0, stage == len(num_layers) - 1, layer).to(dtype)


def linear(module, gradients, x):
    if not (torch.is_grad_enabled() and x.requires_grad):
        return functional.linear(x, module.weight, module.bias)
    return gradients.linear(x, x, Linear(module.weight, lambda x, grad: grad.t() @ x)) + module.bias


class NotedGradients(WeightGradients):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def run(self, chunk):
        self.calls.append(f"W{chunk}")
        super().run(chunk)


class PlainStage:
    """Implements `runtime.executor.Stage`."""

    has_gradient = True
    gradients_kind = NotedGradients

    def __init__(self, part, batch, reentrant=False):
        self.part, self.batch, self.reentrant = part, batch, reentrant
        self.kv_cache, self.calls = SlicedKVCache(), []
        self.weights = self.gradients_kind(self.calls)
        for module in part.modules():
            if isinstance(module, nn.Linear):
                module.forward = functools.partial(linear, module, self.weights)
        self.loss = 0.0
        self.dtype = next(part.parameters()).dtype

    def forward(self, context, hidden):
        self.calls.append(f"F{context.chunk}")

        def run_layer(number, x):
            if number < context.recompute.full:
                return checkpoint(self.run, number, x, context, use_reentrant=self.reentrant)
            return self.run(number, x, context)

        output = self.part(hidden, self.batch.chunk(context.chunk), run_layer)
        if self.part.logits is not None:
            self.loss += output.item()
        return output

    def run(self, number, x, context):
        return self.part.layers[number](x, lambda q, *cached: chunk_attention(q, cached, context, number, SCALE))

    def backward(self, context, output, grad):
        self.calls.append(f"B{context.chunk}")
        with self.weights.backward_of(context.chunk):
            torch.autograd.backward(output, grad)

    def before_last_gradient(self):
        self.calls.append("last")

    def reduce_gradients(self):
        self.calls.append("reduce")

    def release_output(self, output):
        """Nothing to do: the graph holds it anyway."""

    def message(self, num_tokens):
        return (num_tokens, HIDDEN), self.dtype, torch.device("cpu")

    def gradients(self):
        return {name: p.grad for name, p in self.part.named_parameters()}

    def arrays(self):
        return {name: None if grad is None else grad.numpy() for name, grad in self.gradients().items()}


def stages_of(plan, rank=0, kind=PlainStage, dtype=torch.float32, **options):
    """Stages of a rank by their numbers."""
    batch, here = batch_of(plan), [stage for stage, where in enumerate(plan.placement) if where == rank]
    return {stage: kind(build_part(plan.num_layers, stage, dtype), batch, **options) for stage in here}


def parameters_of(stages):
    return [parameter for stage in stages.values() for parameter in stage.part.parameters()]


def whole_run(plan, num_layers, dtype=torch.float32):
    """Every sequence whole, one after the other, through all stages in one process.

    Returns the loss and, per stage, the gradients by parameter name.
    """
    parts = [build_part(num_layers, stage, dtype) for stage in range(len(num_layers))]
    batch, total = batch_of(plan), 0.0
    for sequence, length in enumerate(plan.lengths):
        arrays, x = batch.chunk_of([Segment(sequence, 0, length)]), None
        for part in parts:
            x = part(x, arrays, lambda number, x, part=part: part.layers[number](x, lambda *qkv: dense_attention(*qkv, SCALE)))
        x.backward()
        total += x.item()
    return total, [{name: p.grad for name, p in part.named_parameters()} for part in parts]


@dataclass(frozen=True)
class StageResult:
    gradients: dict[str, np.ndarray | None]
    loss: float
    calls: list[str]
    live_bytes: int
    peak_bytes: int
    host_peak_bytes: int


def run_plan(rank, links, plan, dtype=torch.float32, reentrant=False, host=None):
    """Run this rank's part of a plan, with copies to and from a host. Returns {stage: StageResult}."""
    stages, host = stages_of(plan, rank, dtype=dtype, reentrant=reentrant), host or HostMemory(torch.device("cpu"), 1 << 30)

    def cached():
        return sum(stage.kv_cache.num_bytes for stage in stages.values())

    with (
        ActivationOffload(host, parameters_of(stages), cached) as saved,
        offload_handlers(plan, rank, stages, host, saved) as handlers,
    ):
        own = weight_handlers(plan, stages) | handlers
        executor_of(plan, rank, stages, links, handlers=own, out_of_memory=OutOfMemoryReport().text).run()
    bytes_of = saved.live_bytes + cached() + host.held_bytes, saved.peak_bytes, host.held_peak_bytes
    return {s: StageResult(stage.arrays(), stage.loss, stage.calls, *bytes_of) for s, stage in stages.items()}
