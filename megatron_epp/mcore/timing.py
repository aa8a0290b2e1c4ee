"""How long chunks take on a rank's own stage, whole, packed and sliced, as lines of the cost model."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_epp.cost import Line, StageCosts, causal_pairs
from megatron_epp.cost.fit import Point, fit_line
from megatron_epp.mcore.core_attention import RelayAttention
from megatron_epp.mcore.probe import backward, forward
from megatron_epp.mcore.stage import MegatronStage
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.relay import SliceView
from megatron_epp.schedule import Chunk, Segment

_REPEATS = 7
_ALIVE = 4
"""Cases between forward and backward."""
_TOKENS = (128, 512, 1024, 2048)
_SLICES = (128, 512, 1024)
_PREFIX_SHARES = (0.25, 0.5, 0.75)
"""Of the context: what lies before a slice."""
_SEGMENTS = 8
_SHORTEST_CONTEXT, _LONGEST_CONTEXT = 1024, 8192
_GPU_FACTOR = 2
"""Tokens on a GPU, whose small kernels cost what larger ones do."""
_GPU_LONGEST_CONTEXT = 131072
_MULTIPLE = 64
"""Of all numbers of tokens, so that ranks can share them."""
_HEAD = _MULTIPLE
"""Tokens whose real keys and values stand for those of a prefix."""


def measure_times(stage: MegatronStage, costs: StageCosts, context: int) -> StageCosts:
    """Fit the stage's lines to whole, packed and sliced sequences; what is not the layers' own goes to the stage's extras.

    A kernel's time is not quite a line in tokens and pairs, so what is measured is what batches are made of: slices all
    along a sequence of the context length.

    Args:
        stage: to run.
        costs: with the bytes that a token takes.
        context: tokens of the longest sequence (--seq-length).
    """
    cases = cases_of(context, *_limits(costs))
    rounds = [_round(stage, cases) for _ in range(_REPEATS + 1)]  # so that drift of the machine's speed hits all alike
    times = [Times(*map(statistics.median, zip(*seen, strict=True))) for seen in zip(*rounds[1:], strict=True)]

    def fit(pick: Callable[[Times], float], pairs: bool) -> Line:
        points = [Point(c.tokens, c.pairs, max(0.0, pick(t))) for c, t in zip(cases, times, strict=True)]
        return fit_line(points, pairs).line

    layers = max(1, stage.num_layers)
    return replace(
        costs,
        forward=fit(lambda t: t.layers_forward, True).scaled(1 / layers),
        backward=fit(lambda t: t.layers_backward, True).scaled(1 / layers),
        extra_forward=fit(lambda t: t.forward - t.layers_forward, False),
        extra_backward=fit(lambda t: t.backward - t.layers_backward, False),
    )


class Case(NamedTuple):
    """One sequence, a slice behind a prefix, or several sequences of one length."""

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
        """As the last slice of a sequence."""
        length = self.prefix + self.tokens
        return SliceView(sequence, self.prefix, length, length, length) if self.prefix else None


class Times(NamedTuple):
    """Microseconds of a pass of the whole stage, and of its layers alone."""

    forward: float
    backward: float
    layers_forward: float
    layers_backward: float


def cases_of(context: int, factor: int = 1, most_tokens: int = 1 << 30, longest: int = _LONGEST_CONTEXT) -> tuple[Case, ...]:
    """What to time.

    Args:
        context: tokens of the longest sequence.
        factor: on the tokens of every case.
        most_tokens: that the device has room for.
        longest: context that is measured; what is longer is left to the line.
    """
    context = min(max(context, _SHORTEST_CONTEXT), longest) // _MULTIPLE * _MULTIPLE

    def sizes(tokens: Sequence[int], limit: int) -> list[int]:
        return sorted({max(1, min(factor * n, limit, most_tokens) // _MULTIPLE) * _MULTIPLE for n in tokens})

    whole = (Case(tokens, segments) for tokens in sizes(_TOKENS, context) for segments in (1, _SEGMENTS))
    prefixes = [int(share * context) // _MULTIPLE * _MULTIPLE for share in _PREFIX_SHARES]
    slices = (Case(tokens, prefix=prefix) for prefix in prefixes for tokens in sizes(_SLICES, context - prefix))
    return (*whole, *slices)


def _limits(costs: StageCosts) -> tuple[int, int, int]:
    """Of the device: the factor, the tokens that a tenth of its memory holds, and the longest context.

    Not of its free memory: that differs from rank to rank, and ranks that share a layer must run the same.
    """
    if not torch.cuda.is_initialized():
        return 1, 1 << 30, _LONGEST_CONTEXT
    per_token = (costs.num_layers + 1) * costs.layer_bytes_per_token + costs.extra_bytes_per_token + costs.head_bytes_per_token
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return _GPU_FACTOR, int(memory / 10 / per_token), _GPU_LONGEST_CONTEXT


@dataclass(slots=True)
class _Alive:
    """A case between its forward and its backward."""

    context: ChunkContext
    clock: dict[str, float]
    hidden: Tensor | None
    output: Tensor | None


def _round(stage: MegatronStage, cases: Sequence[Case]) -> list[Times]:
    """Time all cases once, with a few alive at a time as in a pipeline: so what backward needs is no longer in the caches, and
    memory comes and goes as it does in training.
    """
    times: list[Times] = []
    alive: deque[_Alive] = deque()
    for number, case in enumerate(cases):
        alive.append(_begin(stage, number, case))
        if len(alive) > _ALIVE:
            times.append(_end(stage, alive.popleft()))
    return [*times, *(_end(stage, one) for one in alive)]


def _begin(stage: MegatronStage, number: int, case: Case) -> _Alive:
    view = case.view(number)
    if view is not None:
        _fill(stage, view)
    clock: dict[str, float] = {}
    handles = _clock_layers(stage.decoder, lambda name: clock.__setitem__(name, _now_us()))
    try:
        clock["forward"] = _now_us()
        hidden, output, context = forward(stage, case.chunk(number), view)
        clock["forward end"] = _now_us()
    finally:
        for handle in handles:
            handle.remove()
    return _Alive(context, clock, hidden, output)


def _end(stage: MegatronStage, one: _Alive) -> Times:
    assert one.output is not None
    clock = one.clock
    clock["backward"] = _now_us()
    backward(stage, one.output, one.context)
    one.hidden = one.output = None  # takes time too
    clock["backward end"] = _now_us()
    if one.context.view is not None:
        for layer in _layers(stage):
            stage.relay.release(layer, one.context.view)
    block_start = clock.get("block gradient in", clock["backward"])
    block_end = clock.get("block gradient out", clock["backward end"])
    return Times(
        clock["forward end"] - clock["forward"],
        clock["backward end"] - clock["backward"],
        clock["block out"] - clock["block in"],
        block_end - block_start,
    )


def _fill(stage: MegatronStage, view: SliceView) -> None:
    """Put keys and values of what lies before a slice into the relay: those of a few tokens, over and over."""
    head = min(_HEAD, view.start)
    first = replace(view, start=0, end=head)
    with torch.no_grad():
        forward(stage, Chunk((Segment(view.sequence, 0, head),)), first)
        if head == view.start:
            return
        rest = replace(view, start=head, end=view.start)
        for layer in _layers(stage):
            none = torch.empty(0)
            k, v = (
                x.repeat(-(-rest.num_cached // head), 1, 1)[: rest.num_cached]
                for x in stage.relay.keys_and_values(layer, first, none, none)
            )
            stage.relay.append(layer, rest, k, v)


def _layers(stage: MegatronStage) -> list[int]:
    """Numbers that the stage's layers have in the relay."""
    return [part.layer_number for part in stage.decoder.modules() if isinstance(part, RelayAttention)]


def _clock_layers(decoder: torch.nn.Module, note: Callable[[str], None]) -> list[torch.utils.hooks.RemovableHandle]:
    """Note when the block of layers is entered and left, forward and backward."""

    def entered(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        note("block in")
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        hidden = hidden if isinstance(hidden, Tensor) else getattr(decoder, "input_tensor", None)
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: note("block gradient out"))

    def left(_: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: Tensor) -> None:
        note("block out")
        output.register_hook(lambda _: note("block gradient in"))

    return [
        decoder.register_forward_pre_hook(entered, with_kwargs=True),
        decoder.register_forward_hook(left, with_kwargs=True),
    ]


def _now_us() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:  # so that other programs on this machine do not count
        return time.thread_time() * 1e6
    return time.perf_counter() * 1e6
