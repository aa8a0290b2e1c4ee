"""One pipeline stage on a GPU, or a CPU without one, in plain torch, large enough for fused attention. No host waits in it."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.attention.kv_cache import SlicedKVCache
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.recorder import Recorder
from tests.support.runtime.plain_stage import Layer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, CHANNELS = 256, 64
SCALE = CHANNELS**-0.5


class GpuStage:
    """Implements `runtime.executor.Stage`: the only stage of its pipeline. Its input is a fixed row for every token."""

    has_gradient = True

    def __init__(self, plan, dtype, preference="auto"):
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(HIDDEN, CHANNELS, 4) for _ in range(plan.num_layers[0])).to(DEVICE, dtype)
        self.rows = [torch.randn(length, HIDDEN).to(DEVICE, dtype) for length in plan.lengths]
        self.first = nn.Parameter(torch.zeros(HIDDEN, device=DEVICE, dtype=dtype))  # so that the input has a gradient
        self.plan, self.preference, self.kv_cache = plan, preference, SlicedKVCache()

    @property
    def parameters(self):
        return [self.first, *self.layers.parameters()]

    def forward(self, context, hidden):
        segments = self.plan.chunks[context.chunk].segments
        x = torch.cat([self.rows[s.sequence][s.start : s.end] for s in segments]) + self.first
        for number, layer in enumerate(self.layers):

            def attend(q, k, v, number=number):
                return chunk_attention(q, (k, v), context, number, SCALE, preference=self.preference)

            again = number < context.recompute.full
            x = checkpoint(layer, x, attend, use_reentrant=False, preserve_rng_state=False) if again else layer(x, attend)
        return x.float().square().sum()

    def backward(self, context, output, grad):
        torch.autograd.backward(output, grad)

    def before_last_gradient(self):
        """Nothing is reduced."""

    reduce_gradients = before_last_gradient

    def release_output(self, output):
        """It is the loss."""

    def message(self, num_tokens):
        return (num_tokens, HIDDEN), self.rows[0].dtype, DEVICE


def run(plan, dtype=torch.float32, preference="unfused", host=None, times=1, strict=False):
    """Run a plan of one stage. Returns the gradients of its parameters, and the recorder of the last time.

    Args:
        host: where copies go.
        strict: the last time the host may not wait for the device.
    """
    stage, host = GpuStage(plan, dtype, preference), host or HostMemory(DEVICE, 1 << 30)
    for number in range(times):
        for parameter in stage.parameters:
            parameter.grad = None
        if strict and number == times - 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            recorder = Recorder()
            with (
                ActivationOffload(host, stage.parameters, lambda: stage.kv_cache.num_bytes) as saved,
                offload_handlers(plan, 0, {0: stage}, host, saved) as handlers,
            ):
                executor_of(plan, 0, {0: stage}, recorder=recorder, handlers=handlers).run()
        finally:
            if strict:
                torch.cuda.set_sync_debug_mode("default")
    return [parameter.grad.double() for parameter in stage.parameters], recorder


def relative_difference(found, expected):
    """Largest norm of a difference over the norm of what is expected."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
