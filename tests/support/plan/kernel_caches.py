"""Stand-ins for the caches of libraries: the keys under which they look up what they have built for a shape.

They follow the sources of Transformer Engine 2.20 (`fused_attn_f16_arbitrary_seqlen.cu`, `utils.cu` and `common.cpp` of its
norms), and what `torch.compile` and Triton do by default. Keys that a run does not change, such as the type, are left out.
Plans of attention are kept for the thread that asks, so a forward that is recomputed builds them again in autograd's thread,
and for the number of heads of a call.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from megatron_epp.plan import Plan
from megatron_epp.plan.shape_classes import CallSize, token_class
from megatron_epp.plan.sizing import heads_at_once
from megatron_epp.planner import Options, plan
from megatron_epp.tools.formulas import ModelShape
from scripts.bench.planner.suite import DRAWS, Case

SEQUENCES = {"wikipedia": 64, "code": 32, "agents": 32}
"""Sequences of a batch, by the kind of its lengths."""


def _bucket(count: int, least: int, most: int) -> int:
    """Round as Transformer Engine does: to the least, a power of two up to the most, then a multiple of that."""
    return max(least, 2 ** ceil(log2(count))) if count <= most else -(-count // most) * most


def _tokens(size: CallSize) -> tuple[int, int]:
    return _bucket(size.queries, 1024, 32768), _bucket(size.keys, 1024, 32768)


@dataclass(frozen=True)
class Library:
    """Attention library: the keys of its plans for a call's forward and backward."""

    name: str
    forward: Callable[[CallSize], object]
    backward: Callable[[CallSize], object]


def in_class(size: CallSize) -> CallSize:
    """Return the size with which a library is called: its segments are those of its class."""
    return size._replace(segments=size.shape_class.segments)


def _bucketed(size: CallSize) -> object:
    return _bucket(size.segments, 32, 512), _tokens(size)


LIBRARIES = (
    Library("cuDNN from 9.24, Transformer Engine from 2.18", lambda size: (size.segments, _tokens(size)), _bucketed),
    Library("cuDNN from 9.6", _bucketed, _bucketed),
)


def random_plans(count: int, context: int, model: str, stages: int) -> Iterator[Plan]:
    """Yield plans of random batches of one training, in which kinds of lengths take turns."""
    names = tuple(SEQUENCES)
    case = Case(names[0], context, stages, model, 80)
    problem, costs = case.problem, case.costs
    for number in range(count):
        kind = names[number % len(names)]
        lengths = tuple(np.minimum(DRAWS[kind](SEQUENCES[kind], number), context).tolist())
        yield plan(replace(problem, lengths=lengths), costs, Options(context=context))


def keys(
    plan: Plan, stage: int, shape: ModelShape, library: Library, called: Callable[[CallSize], CallSize] = in_class
) -> Iterator[object]:
    """Yield what a stage's chunks look up, of the attention library and of fused layers.

    `torch.compile` builds a function for its first size, one for any other, and one for a single token; Triton distinguishes
    multiples of 16; and Transformer Engine's norms have faster kernels for multiples of 4.
    """
    channels = shape.kv_channels or shape.hidden_size // shape.num_attention_heads
    bytes_per_key = 2 * channels * shape.bytes_per_value
    yield "torch.compile", "first size"
    for number, chunk in enumerate(plan.chunks):
        tokens, recompute = plan.padded_tokens(number), plan.recompute[stage][number] if plan.recompute else None
        padding = tokens - chunk.num_tokens
        prefixed = sum(segment.end for segment in chunk.segments) + padding
        size = called(CallSize(len(chunk.segments) + (padding > 0), tokens, prefixed))
        heads = heads_at_once(shape.kv_heads_on_rank, token_class(prefixed) * bytes_per_key, shape.queries_per_key)
        yield "forward", library.forward(size)
        if recompute is not None and recompute.attention_layers:
            yield "forward again", library.forward(size)
        yield "backward", library.backward(size), heads
        yield from (("torch.compile", tokens == 1), ("Triton", tokens % 16 == 0), ("norm", tokens % 4 == 0))
