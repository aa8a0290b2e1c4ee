"""Rates of machines, from which formulas compute costs without measurements; published rates of attention kernels.

Rates of kernels are of an H100 SXM5 in bf16 or fp16, from figures 5 and 6 of the FlashAttention-3 paper (Shah et al., arXiv
2407.08608v2): 16K tokens in all, heads that make 2,048 channels. Figure 5 has forwards under a causal mask, figure 6 backwards
without one. Of figure 6 the numbers for heads of 64 and 128 are known here: wider heads have the backward of 128.

A kernel's time is taken to be a line in pairs and tokens, as all times of plans: at a rate of ``r * n / (n + h)`` for n tokens,
every token takes as long as some pairs more. r and h are those of the line through the six lengths of a figure, by least
squares of the relative error. It is within 6 % of each of the published rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from operator import mul

from megatron_epp.plan.flags import CUDNN, FLASH_2, FLASH_3

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FORWARD_TFLOPS = {
    (FLASH_2, 64): (180, 229, 262, 284, 295, 299),
    (FLASH_2, 128): (191, 260, 298, 319, 333, 335),
    (FLASH_2, 256): (208, 251, 278, 293, 297, 298),
    (CUDNN, 64): (225, 288, 334, 363, 379, 388),
    (CUDNN, 128): (315, 410, 484, 518, 529, 539),
    (CUDNN, 256): (308, 391, 450, 483, 497, 509),
    (FLASH_3, 64): (197, 265, 371, 420, 460, 473),
    (FLASH_3, 128): (292, 423, 521, 579, 602, 616),
    (FLASH_3, 256): (286, 427, 537, 612, 628, 642),
}
"""By kernel and width of heads, at each of `LENGTHS`, with a causal mask."""
BACKWARD_TFLOPS = {
    (FLASH_2, 64): (198, 238, 264, 279, 287, 291),
    (FLASH_2, 128): (214, 260, 291, 310, 318, 322),
    (CUDNN, 64): (266, 348, 395, 417, 432, 433),
    (CUDNN, 128): (305, 408, 465, 499, 518, 516),
    (FLASH_3, 64): (272, 363, 422, 453, 472, 474),
    (FLASH_3, 128): (316, 424, 501, 542, 559, 561),
}
"""The same of backwards without a mask."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Rates of attention for heads of one width."""

    # forward_flops, backward_flops: per second for long sequences, counting the pairs inside the mask
    forward_flops: float
    backward_flops: float
    # forward_pairs, backward_pairs: that take as long as what a token costs beyond its pairs
    forward_pairs: float
    backward_pairs: float


@cache
def speed_of(kernel: str, channels: float) -> Speed:
    """Return a kernel's rates, by a line between the two published widths of heads that are nearest, or of the last one.

    A causal sequence has half as many pairs as one without a mask, so half of the tokens h of its line are pairs of a token,
    and all of them without a mask.
    """
    (forward, of_causal), (backward, of_all) = (_between(kernel, channels, each) for each in (FORWARD_TFLOPS, BACKWARD_TFLOPS))
    return Speed(forward, backward, of_causal / 2, of_all)


def _between(kernel: str, channels: float, figures: Mapping[tuple[str, int], tuple[int, ...]]) -> tuple[float, float]:
    widths = sorted(width for name, width in figures if name == kernel)
    fits = [_fit(figures[kernel, width]) for width in widths]
    channels = min(max(channels, widths[0]), widths[-1])
    for (low, high), (narrow, wide) in zip(pairwise(widths), pairwise(fits), strict=True):
        if channels <= high:
            share = (channels - low) / (high - low)
            return narrow[0] + share * (wide[0] - narrow[0]), narrow[1] + share * (wide[1] - narrow[1])
    return fits[-1]


def _fit(rates: tuple[int, ...]) -> tuple[float, float]:
    """Return r, per second, and h, in tokens, of ``1 / rate = (1 + h / n) / r``; relative errors of rates count alike."""
    # Of rate * (1 / r + h / r / n) = 1, in fractions: the last bits of a library's solution vary with the processor.
    ahead = [Fraction(rate, length) for rate, length in zip(rates, LENGTHS, strict=True)]
    square, mixed, far = sum(rate * rate for rate in rates), sum(map(mul, rates, ahead)), sum(map(mul, ahead, ahead))
    inverse, per_length = far * sum(rates) - mixed * sum(ahead), square * sum(ahead) - mixed * sum(rates)
    return float(10**12 * (square * far - mixed * mixed) / inverse), float(per_length / inverse)


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
