"""Stand-ins for the caches of libraries: the keys under which they look up what they have built for a shape.

They follow the sources of Transformer Engine 2.20 (`fused_attn_f16_arbitrary_seqlen.cu`, `utils.cu` and `common.cpp` of its
norms), and what `torch.compile` and Triton do by default. Keys that a run does not change, such as the type, are left out.
Plans of attention are kept for the thread that asks, so a forward that is recomputed builds them again in autograd's thread,
and for the number of heads of a call.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
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


def _batch_bucket(count: int) -> int:
    """Round a batch size as Transformer Engine does: 32, a power of two up to 512, then a multiple of it."""
    power = ceil(log2(count))
    return 32 if power <= 5 else 2**power if power <= 9 else -(-count // 512) * 512


def _token_bucket(count: int) -> int:
    """Round a token count as Transformer Engine does: 1,024, a power of two up to 32,768, then a multiple of it."""
    power = ceil(log2(count))
    return 1024 if power <= 10 else 2**power if power <= 15 else -(-count // 32768) * 32768


Key = tuple[int, ...]


@dataclass(frozen=True)
class Library:
    """Attention library: the keys of its plans, and the sizes with which it is called here.

    Attributes:
        name: for the table.
        forward, backward: key of a call of some size; None if it builds nothing.
        padded: sizes of the call once its shape is in a class.
    """

    name: str
    forward: Callable[[CallSize], Key | None]
    backward: Callable[[CallSize], Key | None]
    padded: Callable[[CallSize], CallSize]


def _in_class(size: CallSize) -> CallSize:
    return size._replace(segments=size.shape_class.segments)


def _bucketed(size: CallSize) -> Key:
    return _batch_bucket(size.segments), _token_bucket(size.queries), _token_bucket(size.keys)


def _exact_segments(size: CallSize) -> Key:
    return size.segments, _token_bucket(size.queries), _token_bucket(size.keys)


def _nothing(size: CallSize) -> None:
    """Return no key: nothing is built."""


LIBRARIES = (
    Library("cuDNN from 9.24, Transformer Engine from 2.18", _exact_segments, _bucketed, _in_class),
    Library("cuDNN from 9.6", _bucketed, _bucketed, _in_class),
    Library("FlashAttention", _nothing, _nothing, lambda size: size),
)


def as_they_are(library: Library) -> Library:
    """Return the library, called with the sizes of chunks as they are."""
    return replace(library, padded=lambda size: size)


def fused_keys(tokens: int) -> set[tuple[str, str]]:
    """Return what is built for fused layers' kernels when they first run on a number of tokens.

    `torch.compile` builds a function for its first size, one for any other, and one for a single token; Triton distinguishes
    multiples of 16; and Transformer Engine's norms have faster kernels for multiples of 4.
    """
    return {
        ("torch.compile", "first size"),
        ("torch.compile", "one token" if tokens == 1 else "any size"),
        ("Triton", "multiple of 16" if tokens % 16 == 0 else "other"),
        ("norm", "multiple of 4" if tokens % 4 == 0 else "other"),
    }


@dataclass(frozen=True)
class Call:
    """Attention call of a chunk on a rank.

    Attributes:
        size: of the call.
        heads: key heads in its backward at a time.
        repeats: its forward runs again in backward.
    """

    size: CallSize
    heads: int
    repeats: bool


@dataclass
class Caches:
    """Keys of a library's plans on a rank: of forwards, of forwards in autograd's thread, and of backwards."""

    library: Library
    forward: set[Key] = field(default_factory=set)
    again: set[Key] = field(default_factory=set)
    backward: set[Key] = field(default_factory=set)

    def add(self, call: Call) -> None:
        """Look up what a call needs."""
        size = self.library.padded(call.size)
        key = self.library.forward(size)
        if key is not None:
            self.forward.add(key)
            if call.repeats:
                self.again.add(key)
        key = self.library.backward(size)
        if key is not None:
            self.backward.add((*key, call.heads))

    @property
    def total(self) -> int:
        return len(self.forward) + len(self.again) + len(self.backward)


def random_plans(count: int, context: int, model: str, stages: int) -> Iterator[Plan]:
    """Yield plans of random batches of one training, in which kinds of lengths take turns."""
    names = tuple(SEQUENCES)
    case = Case(names[0], context, stages, model, 80)
    problem, costs = case.problem, case.costs
    for number in range(count):
        kind = names[number % len(names)]
        lengths = tuple(np.minimum(DRAWS[kind](SEQUENCES[kind], number), context).tolist())
        yield plan(replace(problem, lengths=lengths), costs, Options(context=context))


def calls(plan: Plan, stage: int, shape: ModelShape) -> Iterator[tuple[Call, int]]:
    """Yield the attention call of every chunk on a stage, and the chunk's tokens."""
    channels = shape.kv_channels or shape.hidden_size // shape.num_attention_heads
    bytes_per_key = 2 * channels * shape.bytes_per_value
    for number, chunk in enumerate(plan.chunks):
        tokens, recompute = plan.padded_tokens(number), plan.recompute[stage][number] if plan.recompute else None
        padding = tokens - chunk.num_tokens
        keys = sum(segment.end for segment in chunk.segments) + padding
        size = CallSize(len(chunk.segments) + (padding > 0), tokens, keys)
        keys = token_class(size.keys) * bytes_per_key
        heads = heads_at_once(shape.kv_heads_on_rank, keys, shape.queries_per_key)
        yield Call(size, heads, recompute is not None and recompute.attention_layers > 0), tokens


@dataclass
class CacheKeys:
    """Keys that a rank has looked up: of attention by library, with shapes as they are and in classes, and of fused layers."""

    before: list[Caches] = field(default_factory=lambda: [Caches(as_they_are(library)) for library in LIBRARIES])
    after: list[Caches] = field(default_factory=lambda: [Caches(library) for library in LIBRARIES])
    fused: set[tuple[str, str]] = field(default_factory=set)

    def add(self, call: Call, tokens: int) -> None:
        """Look up what a chunk needs."""
        for caches in (*self.before, *self.after):
            caches.add(call)
        self.fused |= fused_keys(tokens)


def count(plans: Iterable[Plan], shape: ModelShape, stages: int) -> list[CacheKeys]:
    """Return what every rank has looked up in the course of some plans, one stage on each."""
    counts = [CacheKeys() for _ in range(stages)]
    for batch_plan in plans:
        for stage, stage_counts in enumerate(counts):
            for call, tokens in calls(batch_plan, stage, shape):
                stage_counts.add(call, tokens)
    return counts
