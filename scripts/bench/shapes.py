"""Counts the distinct shapes for which libraries build kernels on a rank, over plans of random batches.

Nothing runs: caches are stand-ins (`kernel_caches`). Every batch has lengths like Wikipedia's, code's or chats', in turns.
Plans of attention are kept for the thread that asks, so a forward that is recomputed builds them again in autograd's thread,
and for the number of heads of a call. Every figure is of the rank that has most.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_epp.cost import ModelShape
from megatron_epp.plan import Plan
from megatron_epp.plan.shape_classes import CallSize, token_class
from megatron_epp.plan.sizing import heads_at_once, size_class
from megatron_epp.planner import Options, plan
from scripts.bench.frame import Bench, Figures
from scripts.bench.kernel_caches import LIBRARIES, Key, Library, as_they_are, fused_keys
from scripts.bench.planner.suite import DRAWS, Case
from scripts.tables import table

SEQUENCES = {"wikipedia": 64, "code": 32, "chat": 32}
"""Sequences of a batch, by the kind of its lengths."""
MOST = 64
"""Kernel plans that a rank may build."""


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


def random_plans(count: int, context: int, model: str, stages: int, kinds: Iterable[str] = SEQUENCES) -> Iterator[Plan]:
    """Yield plans of random batches of one training, in which kinds of lengths take turns."""
    names = tuple(kinds)
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
    chunks_by_tokens: Counter[int] = field(default_factory=Counter)

    def add(self, call: Call, tokens: int) -> None:
        """Look up what a chunk needs."""
        for caches in (*self.before, *self.after):
            caches.add(call)
        self.fused |= fused_keys(tokens)
        self.chunks_by_tokens[tokens] += 1


def count(plans: Iterable[Plan], shape: ModelShape, stages: int) -> list[CacheKeys]:
    """Return what every rank has looked up in the course of some plans, one stage on each."""
    counts = [CacheKeys() for _ in range(stages)]
    for batch_plan in plans:
        for stage, stage_counts in enumerate(counts):
            for call, tokens in calls(batch_plan, stage, shape):
                stage_counts.add(call, tokens)
    return counts


def figures(counts: Sequence[CacheKeys]) -> Figures:
    """Return the keys of each library on the rank that has most, and the chunks of each token count."""
    libraries = {}
    for number, library in enumerate(LIBRARIES):
        most = max(counts, key=lambda of_rank: of_rank.after[number].total)
        before, after = most.before[number], most.after[number]
        parts = len(after.forward), len(after.again), len(after.backward)
        libraries[library.name] = [before.total, after.total, *parts, after.total + len(most.fused)]
    return {"libraries": libraries, "chunks_by_tokens": counts[0].chunks_by_tokens}


def row(args: Namespace, model: str) -> Figures:
    shape = Case(args.kinds[0], args.context, args.stages, model, 80).shape
    return figures(count(random_plans(args.plans, args.context, model, args.stages, args.kinds), shape, args.stages))


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format the table, and what rounding the token counts of chunks to size classes would change."""
    (row,) = rows
    titles = ["attention", "as it is", "in classes", "forward", "recomputed", "backward", "with fused layers"]
    lines = table(titles, [[name, *keys] for name, keys in row["libraries"].items()])
    chunks_by_tokens = row["chunks_by_tokens"]
    classes = {size_class(count) for count in chunks_by_tokens}
    tokens = sum(count * chunks for count, chunks in chunks_by_tokens.items())
    more = sum(size_class(count) * chunks for count, chunks in chunks_by_tokens.items()) / tokens - 1
    return (
        f"{lines}\n\n{len(chunks_by_tokens):,} token counts of chunks; Transformer Engine's norms keep launch sizes for each, "
        f"and build no kernel.\nRounded to eighths of a power of two they would be {len(classes)}, with {more:.1%} more tokens."
    )


BENCH = Bench(
    about=__doc__,
    cases=lambda args: {args.model: args.model},
    row=row,
    text=text,
    flags={
        "plans": {"type": int, "default": 1000},
        "context": {"type": int, "default": 131072},
        "model": {"default": "llama3-8b"},
        "stages": {"type": int, "default": 8},
        "kinds": {"nargs": "+", "choices": tuple(SEQUENCES), "default": tuple(SEQUENCES)},
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
