"""Prefixes of a batch of training: found from its tokens, or claimed by its dataset and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_epp.features.trees.parents import resolved
from megatron_epp.features.trees.prefixes import LEAST_TOKENS, shared_prefixes
from megatron_epp.plan.chunk import Borrowed
from megatron_epp.plan.errors import EppError

if TYPE_CHECKING:
    from megatron_epp.data.batch import SequenceDataset


def borrowed_of(dataset: SequenceDataset, indices: Sequence[int]) -> tuple[Borrowed, ...]:
    """Return what sequences borrow of each other, as their tokens say, or the dataset's method `borrowed`, which returns a
    parent and a number of tokens for each of `indices`, or nothing.

    No token is read unless some sequence begins with `LEAST_TOKENS` that are not trained. Raises `EppError` for a claim that is
    not so.
    """
    claim, lengths = getattr(dataset, "borrowed", None), [int(dataset.lengths[index]) for index in indices]
    masks = [dataset.trained(index, 1, length + 1) for index, length in zip(indices, lengths, strict=True)]
    first = [0 if mask is None else int(np.append(mask, 1).argmax()) for mask in masks]
    if claim is not None:
        return _checked(claim(indices), dataset, indices, lengths, first)
    if max(first, default=0) < LEAST_TOKENS:
        return ()
    return shared_prefixes([dataset.tokens(index) for index in indices], first)


def _checked(
    parents: Sequence[tuple[int, int]],
    dataset: SequenceDataset,
    indices: Sequence[int],
    lengths: Sequence[int],
    first_trained: Sequence[int],
) -> tuple[Borrowed, ...]:
    """Return what a dataset says. Raises `EppError` where tokens differ, or one borrows an input whose label it trains."""
    if not parents:
        return ()
    if len(parents) != len(indices):
        raise EppError(f"the dataset names parents of {len(parents)} sequences of a batch of {len(indices)}")
    for q, (parent, shared) in enumerate(borrowed := resolved(lengths, [Borrowed(*each) for each in parents])):
        own, other = (dataset.tokens(indices[at], 0, shared) for at in (q, parent)) if shared else ((), ())
        names = [f"sequence {at} of the batch ({indices[at]} of the dataset)" for at in (q, parent)]
        if len(differs := np.flatnonzero(np.not_equal(own, other))):
            at = int(differs[0])
            says = f"begins with {shared:,} tokens of {names[1]} by its dataset"
            raise EppError(f"{names[0]} {says}, but token {at} is {own[at]}, and {other[at]} there")
        if shared > first_trained[q]:
            what = (
                f"trains token {first_trained[q] + 1}, and can share the {first_trained[q]:,} before the one that predicts it"
            )
            raise EppError(f"{names[0]} {what}, not {shared:,}")
    return borrowed
