"""Times the parts of a GPT on the machine at hand: matrix products, attention by slice and prefix, loss, link, host copy.

The layer is plain torch with this package's attention kernels, so it needs no Megatron. With tensor parallelism the share of
one rank is timed, and what it exchanges with the others is left to formulas, as is all memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_epp.cost.line_fits import Point
from megatron_epp.cost.work import causal_pairs
from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention import kernels
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.loss.token_blocks import Head, block_losses
from megatron_epp.runtime.timer import Timer, time_host_copies
from megatron_epp.tools.formulas import ModelShape

Points = dict[str, list[Point]]

_ROUNDS = 3
"""Times that everything is measured, one kind after the other, so that a machine that slows down does so for all kinds."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes at which to measure: tokens of chunks and slices, tokens before a slice, and bytes of host copies."""

    tokens: tuple[int, ...]
    prefixes: tuple[int, ...]
    copy_bytes: tuple[int, ...] = (1 << 20, 1 << 22, 1 << 24, 1 << 26)

    @staticmethod
    def of(device: torch.device) -> Grid:
        """Return sizes that a device can measure in about a minute."""
        if device.type == "cuda":
            return Grid((256, 1024, 4096, 16384), (0, 16384, 65536, 131072))
        return Grid((64, 128, 256, 512, 1024), (0, 512, 2048))


def measure(shape: ModelShape, device: torch.device, grid: Grid, note: Callable[[str], object]) -> Points:
    """Measure the parts of a model at the sizes of a grid; `note` is called with the kind of each. Returns points by kind.

    Kinds are ``linear``, ``attention``, ``loss`` and ``embedding``, each ``forward`` and so on, and ``host copy``.
    """
    bench = _Bench(shape, device, torch.bfloat16 if shape.bytes_per_value == 2 else torch.float32, max(grid.tokens))
    times_us: dict[str, dict[tuple[float, float], list[float]]] = {}
    for _ in range(_ROUNDS):
        for kind, measurer, argument_rows in (
            ("linear", bench.linear, [(n,) for n in grid.tokens]),
            ("attention", bench.attention, [(n, prefix) for n in grid.tokens for prefix in grid.prefixes]),
            ("loss", bench.loss, [(n,) for n in grid.tokens]),
            ("embedding", bench.embedding, [(n,) for n in grid.tokens]),
        ):
            note(kind)
            for arguments in argument_rows:
                for name, point in measurer(*arguments):
                    rounds = times_us.setdefault(f"{kind} {name}", {}).setdefault((point.tokens, point.pairs), [])
                    rounds.append(point.time_us)
    kinds = times_us.items()
    points = {kind: [Point(*at, statistics.median(rounds)) for at, rounds in some.items()] for kind, some in kinds}
    note("host copy")
    return points | {"host copy": time_host_copies(device, grid.copy_bytes)}


class _Bench:
    """One rank's share of one layer, of the embedding and of the head, in memory."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype, most_tokens: int) -> None:
        self.device, self.dtype, self.timer = device, dtype, Timer(device)
        ranks = shape.tensor_parallel
        self.hidden, self.vocab = shape.hidden_size, shape.vocab_size // ranks
        self.loss_block_tokens = shape.loss_block_tokens
        self.channels = shape.query_width // shape.num_attention_heads
        self.heads = max(1, shape.num_attention_heads // ranks)
        self.kv_heads = max(1, shape.kv_width // self.channels // ranks)
        self.gated, self.rotates, self.qk_norm = shape.gated_mlp, shape.rotates, shape.qk_norm and shape.latent_rank is None
        self.query = self.heads * self.channels
        ffn = shape.ffn_hidden_size * shape.experts_per_token // ranks
        self.qkv = self._weight(self.query + 2 * self.kv_heads * self.channels, self.hidden)
        self.out = self._weight(self.hidden, self.query)
        self.up = self._weight(ffn * (2 if self.gated else 1), self.hidden)
        self.down = self._weight(self.hidden, ffn)
        self.norm = torch.ones(self.hidden, device=device, dtype=dtype, requires_grad=True)
        self.words = self._weight(self.vocab, self.hidden)
        self.angles = torch.arange(most_tokens, device=device)[:, None, None] * torch.rand(self.channels, device=device)

    def _weight(self, outputs: int, inputs: int) -> Tensor:
        weight = self._random(outputs, inputs).mul_(inputs**-0.5).requires_grad_()
        weight.grad = torch.zeros_like(weight)
        return weight

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def _input(self, tokens: int) -> Tensor:
        return self._random(tokens, self.hidden).requires_grad_()

    def linear(self, tokens: int) -> Iterator[tuple[str, Point]]:
        x, grad = self._input(tokens), self._random(tokens, self.hidden)

        def run() -> Tensor:
            middle = self._projected(x)
            inner = functional.linear(functional.rms_norm(middle, (self.hidden,), self.norm), self.up)
            if self.gated:
                gate, value = inner.chunk(2, dim=1)
                inner = functional.silu(gate) * value
            else:
                inner = functional.gelu(inner)
            return middle + functional.linear(inner, self.down)

        yield from self._passes(tokens, run, grad)
        yield "weight", self._weight_gradients(tokens, (self.qkv, self.out, self.up, self.down))

    def _projected(self, x: Tensor) -> Tensor:
        qkv = functional.linear(functional.rms_norm(x, (self.hidden,), self.norm), self.qkv)
        cached = self.kv_heads * self.channels
        query, key, value = qkv.split((self.query, cached, cached), dim=1)
        if self.qk_norm:
            query, key = self._normed(query), self._normed(key)
        if self.rotates:
            query, key = self._rotated(query), self._rotated(key)
        return x + functional.linear(_Attended.apply(query, key, value), self.out)

    def _normed(self, x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], -1, self.channels)
        return functional.rms_norm(heads, (self.channels,), self.norm[: self.channels]).flatten(1)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate the channels of every head by angles that grow with the position, one torch function after the other."""
        heads = x.view(x.shape[0], -1, self.channels)
        angles = self.angles[: len(heads)]
        first, second = heads.chunk(2, dim=2)
        turned = torch.cat((-second, first), dim=2)
        return (heads * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)).flatten(1)

    def loss(self, tokens: int) -> Iterator[tuple[str, Point]]:
        x = self._input(tokens)
        labels = torch.zeros(tokens, dtype=torch.long, device=self.device)

        def run() -> Tensor:
            normed = functional.rms_norm(x, (self.hidden,), self.norm)
            if self.loss_block_tokens:
                return block_losses(normed, normed, self.words, labels, Head(self.loss_block_tokens)).sum()
            return functional.cross_entropy(functional.linear(normed, self.words).float(), labels, reduction="sum")

        yield from self._passes(tokens, run, None)
        yield "weight", self._weight_gradients(tokens, (self.words,))

    def embedding(self, tokens: int) -> Iterator[tuple[str, Point]]:
        ids = torch.arange(tokens, device=self.device) % self.vocab
        yield from self._passes(tokens, lambda: functional.embedding(ids, self.words), self._random(tokens, self.hidden))

    def attention(self, tokens: int, prefix: int) -> Iterator[tuple[str, Point]]:
        """Time attention of one slice to its prefix and itself, with the kernel that this package chooses."""
        table = SegmentTable.build(Chunk((Segment(0, prefix, prefix + tokens),)), tokens)
        pairs = causal_pairs(prefix, prefix + tokens)
        q = self._random(tokens, self.heads, self.channels)
        k, v = (self._random(prefix + tokens, self.kv_heads, self.channels) for _ in range(2))
        scale, kernel = self.channels**-0.5, kernels.choose(q, k, v)
        yield "forward", Point(tokens, pairs, self.timer.median_us(lambda: kernel.forward(q, k, v, table, scale)))
        out, saved = kernel.forward(q, k, v, table, scale)
        backward_us = self.timer.median_us(lambda: kernel.backward(q, q, k, v, out, saved, table, scale))
        yield "backward", Point(tokens, pairs, backward_us)

    def _passes(self, tokens: int, run: Callable[[], Tensor], grad: Tensor | None) -> Iterator[tuple[str, Point]]:
        yield "forward", Point(tokens, 0, self.timer.median_us(run))
        yield "backward", Point(tokens, 0, self.timer.median_us(lambda output: output.backward(grad), run))

    def _weight_gradients(self, tokens: int, weights: Sequence[Tensor]) -> Point:
        pairs = [(self._random(tokens, w.shape[0]), self._random(tokens, w.shape[1]), w.grad) for w in weights]

        def run() -> None:
            for grad, gradient, total in pairs:
                assert total is not None
                total.addmm_(grad.t(), gradient)

        return Point(tokens, 0, self.timer.median_us(run))


class _Attended(torch.autograd.Function):
    """Stand-in for core attention, which takes no time: it hands queries on, and their gradient to all three inputs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.cached = key.shape[1]
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        return grad, grad[:, : ctx.cached], grad[:, : ctx.cached]
