"""Counts the distinct shapes for which libraries build kernels on a rank, over plans of random batches.

Nothing runs: caches are stand-ins (`caches`). Every batch has lengths like Wikipedia's, code's or chats', in turns. Plans of
attention are kept for the thread that asks, so a forward that is recomputed builds them again in autograd's thread, and for the
number of heads of a call. Every figure is of the rank that has most.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_epp.cost import ModelShape
from megatron_epp.plan import Plan
from megatron_epp.plan.shape_classes import CallSize, token_class
from megatron_epp.plan.sizing import heads_at_once, size_class
from megatron_epp.planner import Options, plan
from megatron_epp.report.text import table
from scripts.bench.planner.suite import DRAWS, Case
from scripts.bench.shapes.caches import LIBRARIES, Key, Library, as_they_are, fused_keys

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


def report(counts: list[CacheKeys]) -> str:
    """Return the table, each row of the rank that has most."""
    rows = []
    for number, library in enumerate(LIBRARIES):
        most = max(counts, key=lambda stage_counts: stage_counts.after[number].total)
        before, after = most.before[number], most.after[number]
        parts = len(after.forward), len(after.again), len(after.backward)
        rows.append([library.name, str(before.total), str(after.total), *map(str, parts), str(after.total + len(most.fused))])
    header = ["attention", "as it is", "in classes", "forward", "recomputed", "backward", "with fused layers"]
    return "\n".join([*table(header, rows), "", of_tokens(counts[0].chunks_by_tokens)])


def of_tokens(chunks_by_tokens: Counter[int]) -> str:
    """Describe the token counts of chunks, and what rounding them to size classes would change."""
    counts = sorted(chunks_by_tokens)
    rounded = {count: size_class(count) for count in counts}
    tokens = sum(count * chunks for count, chunks in chunks_by_tokens.items())
    more = sum(rounded[count] * chunks for count, chunks in chunks_by_tokens.items()) / tokens - 1
    return (
        f"{len(counts):,} token counts of chunks; Transformer Engine's norms keep launch sizes for each, and build no kernel.\n"
        f"Rounded to eighths of a power of two they would be {len(set(rounded.values()))}, with {more:.1%} more tokens."
    )


def main(arguments: list[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.shapes", description=__doc__)
    parser.add_argument("--plans", type=int, default=1000)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=tuple(SEQUENCES), default=tuple(SEQUENCES))
    args = parser.parse_args(arguments)
    shape = Case(args.kinds[0], args.context, args.stages, args.model, 80).shape
    counts = count(random_plans(args.plans, args.context, args.model, args.stages, args.kinds), shape, args.stages)
    sys.stdout.write(report(counts) + "\n")
