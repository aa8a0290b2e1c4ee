"""Sequences held in memory, for tests of the data path."""

import numpy as np

from megatron_epp.plan import NO_RECOMPUTE, Action, Chunk, Messages, Op, Plan, Prediction, Segment, Step


class MemoryDataset:
    """Token t of sequence i is ``1000 * i + t``, so that every token tells where it came from.

    `masks` has by sequence which of its tokens are trained; all are of a sequence without.
    """

    def __init__(self, lengths, dtype=np.uint16, masks=None):
        self.lengths = np.asarray(lengths)
        self._dtype = dtype
        self._masks = masks or {}

    def __len__(self):
        return len(self.lengths)

    def tokens(self, index, start=0, end=None):
        whole = 1000 * index + np.arange(self.lengths[index] + 1)
        return whole[start:end].astype(self._dtype)

    def trained(self, index, start, end):
        return self._masks[index][start:end] if index in self._masks else None


def plan_of(lengths, chunks, token_multiple=1):
    """A plan of forwards of these chunks and nothing else of interest; `chunks` are lists of (sequence, start, end)."""
    return Plan(
        lengths=tuple(lengths),
        chunks=tuple(Chunk(tuple(Segment(*segment) for segment in chunk)) for chunk in chunks),
        num_layers=(1,),
        placement=(0,),
        recompute=((NO_RECOMPUTE,) * len(chunks),),
        recompute_us=((0.0,) * len(chunks),),
        offload_share=((0.0,) * len(chunks),),
        ranks=(tuple(Step(Action(Op.F, 0, c), 1.0, 0, 0) for c in range(len(chunks))),),
        messages=Messages((), ()),
        static_bytes=(0,),
        cap_bytes=(1,),
        predicted=Prediction.none(1),
        token_multiple=token_multiple,
    )
