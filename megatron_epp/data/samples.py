"""Samples: sequences with values of every token, such as advantages, from a JSONL file or from memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.losses.loss import Scope
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.reading import naming, parse_json

TOKENS, TRAINED, GROUP = "tokens", "trained", "group"
"""Keys of a sample that are no columns."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence.

    Attributes:
        tokens: ``[tokens]`` integers, at least 2.
        trained: ``[tokens]``, 1 for a token that is trained where it is a label, 0 for others; None if all are.
        columns: values by name: ``[tokens]``, where a token's value is about it as a label, so that the first is not used; or
            one number for all.
        group: an integer or a text that samples of one group share; None where losses are not over groups.
    """

    tokens: np.ndarray
    trained: np.ndarray | None
    columns: Mapping[str, np.ndarray]
    group: int | str | None = None

    @staticmethod
    def of(given: Mapping[str, Any], names: Sequence[str], what: str, scope: Scope = Scope.TOKEN) -> TokenSample:
        """Check and convert a sample.

        Args:
            given: ``tokens``, ``trained`` if not all are, and columns; sequences of numbers, arrays or tensors.
            names: columns that are needed; others are not read.
            what: the sample in errors.
            scope: of the loss; the sample's ``group`` is needed and read in `Scope.GROUP` alone.

        Raises:
            EppError: a column is missing, or of another length than the tokens, or no number.
        """
        if TOKENS not in given:
            raise EppError(f"{what} has no {TOKENS}")
        tokens = _numbers(given[TOKENS], f"{what}: {TOKENS}")
        if tokens.ndim != 1 or len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise EppError(f"{what}: {TOKENS} must be a list of at least 2 integers")
        trained = given.get(TRAINED)
        columns = {}
        for name in names:
            if name not in given:
                raise EppError(f"{what} has no {name}, which the loss reads; it has {', '.join(given)}")
            columns[name] = _column(given[name], len(tokens), f"{what}: {name}")
        mask = None if trained is None else _column(trained, len(tokens), f"{what}: {TRAINED}")
        if mask is not None and not np.isin(mask, (0, 1)).all():
            raise EppError(f"{what}: {TRAINED} must be 0 or 1")
        group = given.get(GROUP) if scope is Scope.GROUP else None
        group = group.item() if isinstance(group, (np.generic, torch.Tensor)) else group
        if scope is Scope.GROUP and (isinstance(group, bool) or not isinstance(group, (int, str))):
            raise EppError(f"{what}: {GROUP} must be an integer or a text, the same for samples with one loss; it is {group!r}")
        return TokenSample(tokens.astype(np.int64), None if mask is None else mask.astype(np.uint8), columns, group)


class Samples:
    """Samples in memory. Implements `ColumnDataset`.

    Args:
        samples: of which each is a sequence.
        scope: of the loss.

    Attributes:
        groups: sequences with one loss, each in one of them, for losses over sequences or groups; empty for losses over tokens.
    """

    def __init__(self, samples: Iterable[TokenSample], scope: Scope = Scope.TOKEN) -> None:
        self._samples = tuple(samples)
        self.lengths = np.array([len(sample.tokens) - 1 for sample in self._samples], dtype=np.int32)
        found: dict[int | str, list[int]] = {}
        for index, sample in enumerate(self._samples):
            found.setdefault(sample.group if scope is Scope.GROUP and sample.group is not None else index, []).append(index)
        self.groups = () if scope is Scope.TOKEN else tuple(map(tuple, found.values()))
        self._group_of = {index: number for number, group in enumerate(self.groups) for index in group}

    def group_of(self, index: int) -> int:
        """Return the number of a sequence's group; its own number where losses are over tokens."""
        return self._group_of.get(index, index)

    def __len__(self) -> int:
        return len(self._samples)

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Return tokens ``[start, end)`` of a sequence."""
        return self._samples[index].tokens[start:end]

    def trained(self, index: int, start: int, end: int) -> np.ndarray | None:
        """Return the mask of tokens ``[start, end)`` of a sequence; None if all tokens are trained."""
        mask = self._samples[index].trained
        return None if mask is None else mask[start:end]

    def column(self, name: str, index: int, start: int, end: int) -> np.ndarray:
        """Return the values of tokens ``[start, end)`` of a sequence as labels."""
        values = self._samples[index].columns[name]
        return np.broadcast_to(values, end - start) if values.ndim == 0 else values[start:end]


def read_samples(
    path: Path, names: Sequence[str], most_tokens: int, vocab_size: int | None = None, scope: Scope = Scope.TOKEN
) -> Samples:
    """Read a JSONL file with one sample in each line: an object with ``tokens``, ``trained``, columns, and its ``group``.

    Args:
        path: of the file.
        names, scope: columns that are needed, and scope of the loss.
        most_tokens: of a sequence.
        vocab_size: tokens must be below it; None for no check.

    Raises:
        EppError: the file cannot be read, a sample is not one, or is longer than `most_tokens`; the message names the line.
    """
    found = []
    with naming(path), open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            given = parse_json(line, f"line {number}", with_nan=True)
            if not isinstance(given, dict):
                raise EppError(f"line {number} is no object with {TOKENS}")
            sample = TokenSample.of(given, names, f"line {number}", scope)
            if len(sample.tokens) - 1 > most_tokens:
                positions = len(sample.tokens) - 1
                text = f"line {number} has {positions + 1:,} tokens, {positions:,} positions of {most_tokens:,} at most"
                raise EppError(f"{text}; samples are not cut", Remedy("raise", "context", positions))
            if vocab_size is not None and (sample.tokens.max() >= vocab_size or sample.tokens.min() < 0):
                raise EppError(f"line {number} has token {sample.tokens.max()}, and the vocabulary {vocab_size} entries")
            found.append(sample)
        if not found:
            raise EppError("there is no sample")
    return Samples(found, scope)


def _numbers(given: Any, what: str) -> np.ndarray:
    try:
        found = np.asarray(given.tolist() if hasattr(given, "tolist") else given)
    except ValueError as error:
        raise EppError(f"{what}: {error}") from error
    if not np.issubdtype(found.dtype, np.number) and found.dtype != np.bool_:
        raise EppError(f"{what} must be numbers")
    return found


def _column(given: Any, num_tokens: int, what: str) -> np.ndarray:
    found = _numbers(given, what).astype(np.float32)
    if found.ndim > 1 or (found.ndim == 1 and len(found) != num_tokens):
        raise EppError(f"{what} has {found.size} values for {num_tokens} tokens: give as many, or one number for all")
    if not np.isfinite(found).all():
        raise EppError(f"{what} has a value that is not finite")
    return found
