"""Result of a call on samples, put together from the ranks that have the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import mpu

from megatron_epp.data.batch import GlobalBatch
from megatron_epp.losses import Loss
from megatron_epp.plan import Plan
from megatron_epp.runtime.attention.context_parallel import of_group

type Pieces = list[tuple[int, np.ndarray]]
"""Values of a sample's tokens, each piece with its position in the sample."""


class RankReport(NamedTuple):
    sums: list[float]  # the loss, what divides it, and what it logs
    by_sample: dict[int, Pieces]  # log-probabilities or values, if they are wanted
    problems: list[str]


@dataclass(frozen=True, slots=True)
class SampleReport:
    """Result of a call, the same on every rank.

    Attributes:
        means: the loss, and what it logs, by name: sums over the whole batch, divided as its average says.
        divisor: number of tokens, sequences or groups by which they are divided.
        num_chunks: chunks of this replica's plan.
        num_shared_tokens: tokens of this replica's samples that did not run, since another sample's are the same.
        logprobs: of every sample, the log-probabilities of its labels, ``[tokens - 1]`` in fp32, 0 for those that are not
            trained; empty if they were not wanted.
        values: of every sample, the model's values of all its tokens, ``[tokens]`` in fp32; empty if they were not wanted.
    """

    means: Mapping[str, float]
    divisor: float
    num_chunks: int
    logprobs: tuple[np.ndarray, ...] = ()
    values: tuple[np.ndarray, ...] = ()
    num_shared_tokens: int = 0

    @staticmethod
    def of(loss: Loss, plan: Plan, of_ranks: Sequence[RankReport], count: int) -> SampleReport:
        """Make the report of a plan, with log-probabilities or values of so many samples, from the ranks with the loss."""
        sums = np.sum([report.sums for report in of_ranks], axis=0)
        divisor, names = float(sums[1]), (loss.name, *loss.logged)
        means = {name: float(value) / max(divisor, 1.0) for name, value in zip(names, (sums[0], *sums[2:]), strict=True)}
        pieces = ([report.by_sample[at] for report in of_ranks if at in report.by_sample] for at in range(count))
        name = "values" if getattr(loss, "has_values", False) else "logprobs"
        of_samples: dict[str, Any] = {name: tuple(map(_joined, pieces))}
        return SampleReport(means, divisor, len(plan.chunks), num_shared_tokens=plan.num_shared_tokens, **of_samples)


def by_sample(batch: GlobalBatch, values_of_chunks: list[tuple[int, torch.Tensor]]) -> dict[int, Pieces]:
    """Return this rank's log-probabilities by sample: the position of each piece's first label, and its values."""
    shared, pieces = of_group(mpu.get_context_parallel_group()), dict[int, Pieces]()
    layouts = batch.prepared.program.layouts
    for chunk, values in values_of_chunks:
        table, at = layouts[chunk].table, 0
        for piece in table.part(shared.shard(table.num_tokens)):
            if piece.sequence >= 0:
                values_of = values[at : at + piece.num_tokens].float().cpu().numpy()
                pieces.setdefault(batch.indices[piece.sequence], []).append((piece.start, values_of))
            at += piece.num_tokens
    return pieces


def _joined(of_ranks: Sequence[Pieces]) -> np.ndarray:
    pieces = sorted(chain.from_iterable(of_ranks), key=itemgetter(0))
    borrowed = np.zeros(pieces[0][0], dtype=np.float32)  # tokens of another sample, none of which this one trains
    return np.concatenate([borrowed, *(values for _, values in pieces)])
