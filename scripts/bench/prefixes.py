"""Time of a layer on segments behind one prefix, whose rows are gathered for each of them, or read at once for all.

    python -m scripts.bench.prefixes                          on one core of a CPU, in minutes
    python -m scripts.bench.prefixes --only responses --runs 3

The layer is of attention by groups of queries, and an MLP four times as wide, in fp32. Runs of both kinds alternate; a time is
the median of the processor's, since other programs may share it.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.nn import functional

from megatron_epp.features.cascade import common_rows, tree_layouts
from megatron_epp.features.trees.tree_cache import TreeCache, TreeView
from megatron_epp.plan import Chunk, Plan, Segment
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.runtime.attention.core import chunk_attention
from megatron_epp.runtime.context import ChunkContext, ChunkLayout
from scripts.bench.frame import Bench, Figures
from scripts.tables import table

CASES = {
    "responses": (8, 500, 2_000),
    "turns": (16, 200, 16_000),
    "long responses": (4, 2_000, 500),
    "two": (2, 500, 2_000),
    "two long": (2, 2_000, 2_000),
}
"""Segments, tokens of each, and of the prefix."""
CHANNELS = 64


def layouts(members: int, tokens: int, prefix: int) -> tuple[ChunkLayout, ...]:
    """Chunks of the prefix, and of the segments behind it."""
    first = Chunk((Segment(0, 0, prefix),))
    second = Chunk(tuple(Segment(q, prefix, prefix + tokens) for q in range(members)))
    borrowed = (NOTHING_BORROWED, *[Borrowed(0, prefix)] * (members - 1))
    plan = SimpleNamespace(
        chunks=(first, second), borrowed=borrowed, loss_groups=(), padded_tokens=lambda c: (first, second)[c].num_tokens
    )
    return tree_layouts.tree_layouts(cast(Plan, plan))


class Layer(torch.nn.Module):
    def __init__(self, query_heads: int, kv_heads: int) -> None:
        super().__init__()
        hidden = query_heads * CHANNELS
        self.heads = [query_heads, kv_heads, kv_heads]
        self.qkv, self.out = torch.nn.Linear(hidden, sum(self.heads) * CHANNELS), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, context: ChunkContext) -> tuple[torch.Tensor, float]:
        """Return the output, and the seconds of attention."""
        q, k, v = self.qkv(x).unflatten(1, (-1, CHANNELS)).split(self.heads, dim=1)
        begin_s = time.process_time()
        attended = chunk_attention(q, (k, v), context, 0, CHANNELS**-0.5)
        attention_s = time.process_time() - begin_s
        x = x + self.out(attended.flatten(1))
        return x + self.down(functional.gelu(self.up(x))), attention_s


def once(layer: Layer, of: Sequence[ChunkLayout], rows: Sequence[torch.Tensor], x: torch.Tensor) -> dict[str, float]:
    """Seconds of attention's forward, and of the layer's and its backward, behind a prefix with these rows."""
    cache, prefix = TreeCache(), of[0].view
    assert prefix is not None
    cache.append(0, prefix, rows)
    begin_s = time.process_time()
    out, attention_s = layer(x, ChunkContext(1, of[1].table, cache, of[1].view))
    forward_s = time.process_time() - begin_s
    out.sum().backward()
    whole_s = time.process_time() - begin_s
    cache.take_gradient(0, prefix, rows)
    cache.assert_empty()
    return {"attention forward": attention_s, "forward": forward_s, "both": whole_s}


def row(args: Namespace, case: tuple[int, int, int]) -> Figures:
    torch.set_num_threads(1)
    members, tokens, prefix = case
    layer = Layer(args.heads, args.kv_heads)
    rows = [torch.randn(prefix, args.kv_heads, CHANNELS) for _ in "kv"]
    x = torch.randn(members * tokens, args.heads * CHANNELS, requires_grad=True)
    with patch.object(tree_layouts, "common_rows", lambda *_: ()):
        gathered = layouts(*case)
    with patch.multiple(common_rows, LEAST_ROWS=0, ROWS_PER_TOKEN=0):
        joined = layouts(*case)
    figures: Figures = {"ways": {}}
    times: dict[str, list[dict[str, float]]] = {"gathered": [], "at once": []}
    for _ in range(args.runs + 1):
        for name, of in (("gathered", gathered), ("at once", joined)):
            times[name].append(once(layer, of, rows, x))
    for name, of in (("gathered", gathered), ("at once", joined)):
        view = cast(Any, of[1].view)
        keys = cast(TreeView, getattr(view, "joined", view)).num_keys
        medians = {part: statistics.median(each[part] for each in times[name][1:]) for part in times[name][0]}
        figures["ways"][name] = medians | {"keys": keys, "bytes": keys * 2 * args.kv_heads * CHANNELS * 4}
    return figures


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    names = ["case", "rows", "attention forward, s", "layer forward, s", "layer forward and backward, s", "keys", "MiB"]
    lines = [
        [
            each["case"],
            name,
            *(f"{way[part]:.3f}" for part in ("attention forward", "forward", "both")),
            f"{way['keys']:,}",
            f"{way['bytes'] / 2**20:.1f}",
        ]
        for each in rows
        for name, way in each["ways"].items()
    ]
    return table(names, lines)


BENCH = Bench(
    about=__doc__,
    cases=lambda args: CASES,
    row=row,
    text=text,
    flags={
        "heads": {"type": int, "default": 8, "help": "of queries (default: %(default)s)"},
        "kv-heads": {"type": int, "default": 2, "help": "of keys and values (default: %(default)s)"},
        "runs": {"type": int, "default": 5, "help": "of each kind, behind one that does not count (default: %(default)s)"},
    },
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
