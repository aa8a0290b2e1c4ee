"""Bytes that a slice hands over to the next one alone, of states and of windows, by counting them."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor

from megatron_epp.cost.blocks import HANDOVER, BlockCosts
from megatron_epp.mcore.costs.memory_probe import LayerBytes, bytes_chunk
from megatron_epp.mcore.costs.probe import backward, forward, layers_of, watched
from megatron_epp.mcore.model.stage import MegatronStage
from megatron_epp.plan import Chunk, Segment
from megatron_epp.runtime.attention.segments import SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.context import ChunkContext
from megatron_epp.runtime.handover import Handover


def handed_over(stage: MegatronStage) -> tuple[BlockCosts, list[float]]:
    """Return the block of what a slice hands over, and the bytes that each layer keeps besides because of it.

    Three slices of a sequence run without recompute: what the second one keeps is compared with what the first does.
    """
    tokens, handover = bytes_chunk(stage).num_tokens, stage.kv_cache.carried(Handover)
    meter, runs = SavedTensors(stage.parameters, lambda: handover.num_bytes), list[tuple[Tensor, ChunkContext]]()
    layers, after = [LayerBytes(meter) for _ in layers_of(stage)], list[tuple[int, int, int, list[int]]]()
    with meter, ExitStack() as watching:
        for own, layer in zip(layers, layers_of(stage), strict=True):
            watching.enter_context(watched([layer], own.note))
        for start in (0, tokens, 2 * tokens):
            view = SliceView(0, start, start + tokens, 3 * tokens, 3 * tokens, 3)
            _, output, context = forward(stage, Chunk((Segment(0, start, start + tokens),)), view)
            runs.append((output, context))
            after.append((meter.held_bytes, meter.live_bytes, handover.shorter_bytes, [own.kept_bytes for own in layers]))
        while runs:
            backward(stage, *runs.pop())
    (held, live, shorter, first), (held_by_two, _, shorter_second, both), _ = after
    # Slices may be shorter than a window, of which the second hands on more rows. Tails are divided by what layers keep more.
    states, more = held - live, held_by_two - 2 * held - (shorter - shorter_second)
    kept_bytes = [max(0, together - 2 * alone) for alone, together in zip(first, both, strict=True)]
    tails = [max(0, more) * own / max(1, sum(kept_bytes)) for own in kept_bytes]
    return BlockCosts(kind=HANDOVER, state_bytes=states + shorter, state_tokens=handover.most_rows), tails
