"""Rates of devices and of the links between them and to their hosts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_epp.tools.formulas.attention import Speed, speed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of one rank, and the fixed costs that each pass adds.

    Attributes:
        name: for the plan's record.
        linear_flops: per second in the matrix products with weights.
        fp8_speedup: rate of products in FP8 over that, casts included; 1 without such products, or if unknown.
        attention_forward_flops: per second in attention, counting only the pairs inside the mask.
        attention_backward_flops: the same, backward.
        memory_bytes: per second moved by norms, activations and residual additions.
        layer_overhead_us: fixed time of one layer and pass on the device.
        launch_forward_us: time in which the host launches a layer's forward, which takes no less; 0 where the host computes.
        launch_backward_us: the same, backward.
        message_latency_us: of a message between stages.
        message_bytes: per second between stages.
        saturation_tokens: tokens of a chunk whose matrix products run at half of `linear_flops`.
        attention_tile: tokens of a tile of attention's pairs.
        attention_kernel: cudnn, flash-attention-2 or flash-attention-3, whose rates on an H100 replace those of attention.
        exchange_bytes: per second among the ranks that share a layer, inside a node.
        devices_per_node: neighbours that exchange so; with all others a rank exchanges at `message_bytes`. No limit by default.
        host_latency_us: of a copy between device and host.
        host_bytes: per second between device and host, either way; 0 where there is no such link.
        host_sharing: devices in a row of a node that share that link.
    """

    name: str
    linear_flops: float
    attention_forward_flops: float
    attention_backward_flops: float
    memory_bytes: float
    layer_overhead_us: float
    message_latency_us: float
    message_bytes: float
    saturation_tokens: float = 0.0
    attention_tile: float = 0.0
    attention_kernel: str = ""
    launch_forward_us: float = 0.0
    launch_backward_us: float = 0.0
    exchange_bytes: float = math.inf
    devices_per_node: float = math.inf
    host_latency_us: float = 0.0
    host_bytes: float = 0.0
    host_sharing: int = 1
    fp8_speedup: float = 1.0

    def attention_speed(self, channels: float) -> Speed:
        """Rates of attention for heads of so many channels."""
        if self.attention_kernel:
            return speed_of(self.attention_kernel, channels)
        tile = self.attention_tile / 2
        return Speed(self.attention_forward_flops, self.attention_backward_flops, tile, tile)


H100 = Rates(
    name="h100",
    linear_flops=600e12,
    attention_forward_flops=450e12,
    attention_backward_flops=400e12,
    memory_bytes=2.4e12,
    layer_overhead_us=150.0,
    message_latency_us=20.0,
    message_bytes=40e9,
    saturation_tokens=128,
    attention_tile=128,
    exchange_bytes=300e9,
    host_latency_us=20.0,
    host_bytes=40e9,
    fp8_speedup=1.6,
)
"""An H100-like GPU in bf16, one 400 Gb/s link between stages, 16 lanes of PCIe 5 to the host.

Peaks are from NVIDIA's datasheet of the H100 SXM; the shares of them that a training sustains are assumed: 989 TFLOP/s in dense
bf16, of which linear layers have 61 %; attention 45 and 40 % where no kernel is named, between the 35 % of FlashAttention-2 and
the 75 % of FlashAttention-3 (published rates: `attention.py` in this folder; the shipped clusters of H100 and H200 name
cuDNN); 3.35 TB/s of HBM3, 72 %; 450 GB/s of NVLink each way, two thirds; 50 GB/s of the link, 80 %; 64 GB/s of PCIe each way,
63 %. In dense FP8 the peak is twice that of bf16, 1,979 TFLOP/s; by these rates, casts take 4 to 24 % of the time of a product
with 28,672 to 4,096 outputs, and products are assumed to have nine tenths of bf16's share. Latencies, the overhead of a layer
and the half-saturation of matrix products are assumed too. `megatron-epp profile` measures all of them but memory and the
exchange.
"""

H100_NODE = replace(H100, launch_forward_us=600.0, launch_backward_us=850.0)
"""The same with the host that launches its kernels, for Megatron's layers with Transformer Engine's modules: estimates from
the middle of ranges, 200 to 1080 us for a forward and 260 to 1470 us for a backward of a dense layer. Two layers dispatch 56
and 68 operations, of which Transformer Engine's are 20 and 28. Those of torch take 4 us, and 7 with autograd (pytorch/pytorch,
issues 82793, 41383); Transformer Engine's from 13 us, that of torch's linear layer on an H100's host, to 95, of its own
forward on Grace (NVIDIA/TransformerEngine, issues 2053 and 2126). A training that measures its costs measures them.
"""

CPU = Rates(
    name="cpu",
    linear_flops=80e9,
    attention_forward_flops=80e9,
    attention_backward_flops=75e9,
    memory_bytes=10e9,
    layer_overhead_us=500.0,
    message_latency_us=300.0,
    message_bytes=1e9,
    host_latency_us=20.0,
    host_bytes=4e9,
)
"""One core of a server in fp32, and gloo: for tests and laptops. Fitted to times of a GPT of 64 channels, sliced and whole, as
measured costs take them. The device is its own host: offloaded data is copied within the same memory.
"""


def divide(sharing: int, split: int) -> tuple[int, int]:
    """Return the ranks that use a link which `sharing` devices in a row share, and the pipeline ranks that take turns on a
    part.

    Megatron numbers tensor-parallel ranks first, then context-parallel ones, then replicas, then stages: `split` is the product
    of the first three. Ranks that share a stage run the same plan, so they copy at the same times: each has its part of the
    link. Replicas run plans of their own, whose copies are taken to come at the same times too. Stages of one pipeline are
    planned together, so their copies take turns. Where the devices of a link are not whole stages, or only one stage's, no
    ranks take turns.
    """
    return (sharing, 1) if sharing % split else (split, sharing // split)
