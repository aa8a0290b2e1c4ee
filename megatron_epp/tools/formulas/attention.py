"""Published rates of attention kernels by the length of sequences and the width of heads, and what plans make of them.

All are of an H100 SXM5 in bf16 or fp16, from figures 5 and 6 of the FlashAttention-3 paper (Shah et al., arXiv 2407.08608v2):
16K tokens in all, heads that make 2,048 channels. Figure 5 has forwards under a causal mask, figure 6 backwards without one. Of
figure 6 the numbers for heads of 64 and 128 are known here: wider heads have the backward of 128.

A kernel's time is taken to be a line in pairs and tokens, as all times of plans: at a rate of ``r * n / (n + h)`` for n tokens,
every token takes as long as some pairs more. r and h are those of the line through the six lengths of a figure, by least
squares of the relative error. It is within 6 % of each of the published rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    (forward, of_causal), (backward, of_all) = (
        _between(kernel, channels, figures) for figures in (FORWARD_TFLOPS, BACKWARD_TFLOPS)
    )
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
