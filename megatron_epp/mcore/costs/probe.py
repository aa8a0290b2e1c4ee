"""Small measurements on a rank's own stage: test chunks, their forward and backward, time of its messages and host copies."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost import causal_pairs
from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.mcore.model.stage import ChunkInputs, MegatronStage
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Recompute, Segment
from megatron_epp.runtime.attention.layout import SegmentTable, SliceView
from megatron_epp.runtime.autograd.handles import ReceiveLeaf
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.tools.profiling import Timer, time_host_copies

_VOCABULARY = 32
"""Number of token ids that every model's vocabulary contains."""
_LINK_TOKENS = (64, 1024)
_LINK_REPEATS = 12
_COPIED_BYTES = (1 << 20, 1 << 25)


MULTIPLE = 64
"""Divisor of every token count; replaced by a multiple of it where the ranks that share tokens need that to divide them."""
LONGEST_CONTEXT = 8192
"""Longest context in tokens that is measured by default; longer ones are extrapolated from the fitted line."""

_TOKENS = (128, 512, 1024, 2048)
_PACKED = _SLICES = (128, 512, 1024)
_PREFIX_SHARES = (0.25, 0.5, 0.75)
"""Prefix lengths of the timed slices, as shares of the context."""
_SEGMENTS = 8
_SHORTEST_CONTEXT = 1024


class Case(NamedTuple):
    """A chunk to be timed: one sequence, a slice behind a prefix, or several sequences of equal length."""

    tokens: int
    segments: int = 1
    prefix: int = 0

    @property
    def pairs(self) -> int:
        return self.segments * causal_pairs(self.prefix, self.prefix + self.tokens // self.segments)

    def chunk(self, sequence: int) -> Chunk:
        each = self.tokens // self.segments
        return Chunk(tuple(Segment(sequence + i, self.prefix, self.prefix + each) for i in range(self.segments)))

    def view(self, sequence: int) -> SliceView | None:
        """Return the view of the case as the last slice of a sequence; None where it has no prefix."""
        length = self.prefix + self.tokens
        return SliceView(sequence, self.prefix, length, length, length) if self.prefix else None


def cases_of(
    context: int, multiple: int = MULTIPLE, factor: int = 1, most_tokens: int = 1 << 30, longest: int = LONGEST_CONTEXT
) -> tuple[Case, ...]:
    """Return the chunks to time.

    Args:
        context: tokens of the longest sequence.
        multiple: divisor of every token count.
        factor: multiplies the token count of every case.
        most_tokens: largest number of tokens that fits on the device.
        longest: longest context in tokens that is measured; longer ones are extrapolated from the fitted line.
    """
    context = min(max(context, _SHORTEST_CONTEXT), longest) // multiple * multiple

    def sizes(tokens: Sequence[int], limit: int) -> list[int]:
        return sorted({max(1, min(factor * n, limit, most_tokens) // multiple) * multiple for n in tokens})

    whole = (Case(tokens) for tokens in sizes(_TOKENS, context))
    packed = (Case(tokens, _SEGMENTS) for tokens in sizes(_PACKED, context))
    prefixes = [int(share * context) // multiple * multiple for share in _PREFIX_SHARES]
    slices = (Case(tokens, prefix=prefix) for prefix in prefixes for tokens in sizes(_SLICES, context - prefix))
    return (*whole, *packed, *slices)


class Link(NamedTuple):
    """Costs of a message.

    Attributes:
        latency_us, us_per_byte: transfer time, in microseconds and in microseconds per byte.
        host_us: time of the computing thread, in microseconds, at either end; 0 on a GPU, where the host runs ahead.
    """

    latency_us: float = 0.0
    us_per_byte: float = 0.0
    host_us: float = 0.0


def measure_link(stage: MegatronStage, links: Links, rank: int) -> Link:
    """Measure messages between the first two ranks: half a round trip, the fastest of `_LINK_REPEATS`.

    Every rank of the pipeline may call this; those after the second return zeros at once.
    """
    if rank > 1 or len(links.ranks) < 2:
        return Link()
    points, host_us = [], []
    timer = Timer(stage.message(1)[2], alone=False)
    for tokens in _LINK_TOKENS:
        shape, dtype, device = stage.message(tokens)
        payload, best_us = torch.zeros(shape, dtype=dtype, device=device), math.inf
        for _ in range(_LINK_REPEATS):
            start_us, start_cpu_s = timer.now_us(), time.thread_time()
            if rank == 0:
                links.send(payload, 1, gradient=False)
            receive = links.post_receive(shape, dtype, device, peer=1 - rank, gradient=rank == 0)
            own_s = time.thread_time() - start_cpu_s
            receive.wait()
            start_cpu_s = time.thread_time()
            if rank == 1:
                links.send(payload, 0, gradient=True)
            host_us.append((own_s + time.thread_time() - start_cpu_s) * 1e6 / 2)
            links.finish_sends()
            best_us = min(best_us, (timer.now_us() - start_us) / 2)
        points.append(Point(payload.nbytes, 0, best_us))
    line = fit_line(points, pairs=False).line
    return Link(line.fixed_us, line.per_token_us, 0.0 if torch.cuda.is_initialized() else statistics.median(host_us))


def measure_host_link(device: torch.device) -> tuple[float, float]:
    """Measure copies to the host and back: latency in microseconds, and microseconds per byte. On a CPU, copies within host
    memory are measured instead.
    """
    line = fit_line(time_host_copies(device, _COPIED_BYTES), pairs=False).line
    return line.fixed_us, line.per_token_us


def _inputs(stage: MegatronStage, tokens: int) -> ChunkInputs:
    """Return varied tokens, so that a router spreads them, all at position 0, since a model may have few positions."""
    device, own = stage.message(1)[2], tokens // stage.config.context_parallel_size
    ids = torch.arange(own, device=device)[None] % _VOCABULARY
    return ChunkInputs(ids, torch.zeros_like(ids), ids.clone(), torch.ones(1, own, device=device))


def enter(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute: Recompute = NO_RECOMPUTE
) -> tuple[ChunkContext, Tensor | None]:
    """Return the context of a chunk and its hidden states, which a run has on the device before its forward."""
    tokens = chunk.num_tokens
    ready = [_inputs(stage, tokens)]
    stage.begin(lambda _: ready.pop())  # given away, so that autograd alone holds what is saved of them
    shape, dtype, device = stage.message(tokens)
    hidden = None if stage.is_first else ReceiveLeaf().enter(torch.randn(shape, dtype=dtype, device=device))
    return ChunkContext(0, SegmentTable.build(chunk, tokens), stage.relay, view, recompute), hidden


def forward(
    stage: MegatronStage, chunk: Chunk, view: SliceView | None = None, recompute: Recompute = NO_RECOMPUTE
) -> tuple[Tensor | None, Tensor, ChunkContext]:
    context, hidden = enter(stage, chunk, view, recompute)
    return hidden, stage.forward(context, hidden), context


def backward(stage: MegatronStage, output: Tensor, context: ChunkContext, keep_weights: bool = False) -> None:
    stage.backward(context, output, None if stage.has_loss else torch.ones_like(output), keep_weights)


@contextmanager
def watched(modules: Iterable[torch.nn.Module], note: Callable[[str], None]) -> Iterator[None]:
    """Watch the modules that run hidden states forward in the body, and the backwards of these.

    `note` is called with ``in`` and ``out`` when a forward begins and ends, and with ``gradient in`` and ``gradient out`` when
    the gradients of its output and of its input have been computed.
    """

    def entered(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        note("in")
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        hidden = hidden if isinstance(hidden, Tensor) else getattr(module, "input_tensor", None)
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: note("gradient out"))

    def left(_: torch.nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        note("out")
        (output if isinstance(output, Tensor) else output[0]).register_hook(lambda _: note("gradient in"))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(entered, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(left).remove)
        yield


def layers_of(stage: MegatronStage) -> torch.nn.ModuleList:
    """Return the transformer layers of a stage."""
    layers: Any = stage.decoder.layers
    return layers


def run_weights(stage: MegatronStage) -> Iterator[None]:
    """Compute the deferred weight gradients of a chunk, and yield after those outside of the layers and after the others."""
    assert stage.weights is not None  # they were kept
    inside = {id(weight) for weight in layers_of(stage).parameters()}
    deferred = stage.weights.pop(0)
    for of_layers in (False, True):
        for one in deferred:
            if (id(one.weight) in inside) is of_layers:
                one.run()
        yield
