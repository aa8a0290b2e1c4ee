"""Samples: sequences with values of every token, such as advantages, from a JSONL file or from memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.reading import naming, parse_json

TOKENS, TRAINED = "tokens", "trained"
"""Keys of a sample that are no columns."""


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence.

    Attributes:
        tokens: ``[tokens]`` integers, at least 2.
        trained: ``[tokens]``, 1 for a token that is trained where it is a label, 0 for others; None if all are.
        columns: values by name: ``[tokens]``, where a token's value is about it as a label, so that the first is not used; or
            one number for all.
    """

    tokens: np.ndarray
    trained: np.ndarray | None
    columns: Mapping[str, np.ndarray]

    @staticmethod
    def of(given: Mapping[str, Any], names: Sequence[str], what: str) -> TokenSample:
        """Check and convert a sample.

        Args:
            given: ``tokens``, ``trained`` if not all are, and columns; sequences of numbers, arrays or tensors.
            names: columns that are needed; others are not read.
            what: the sample in errors.

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
        return TokenSample(tokens.astype(np.int64), None if mask is None else mask.astype(np.uint8), columns)


class Samples:
    """Samples in memory. Implements `ColumnDataset`.

    Args:
        samples: of which each is a sequence.
    """

    def __init__(self, samples: Iterable[TokenSample]) -> None:
        self._samples = tuple(samples)
        self.lengths = np.array([len(sample.tokens) - 1 for sample in self._samples], dtype=np.int32)

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


def read_samples(path: Path, names: Sequence[str], most_tokens: int, vocab_size: int | None = None) -> Samples:
    """Read a JSONL file with one sample in each line: an object with ``tokens``, ``trained`` and columns.

    Args:
        path: of the file.
        names: columns that are needed.
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
            sample = TokenSample.of(given, names, f"line {number}")
            if len(sample.tokens) - 1 > most_tokens:
                positions = len(sample.tokens) - 1
                text = f"line {number} has {positions + 1:,} tokens, {positions:,} positions of {most_tokens:,} at most"
                raise EppError(f"{text}; samples are not cut", Remedy("raise", "context", positions))
            if vocab_size is not None and (sample.tokens.max() >= vocab_size or sample.tokens.min() < 0):
                raise EppError(f"line {number} has token {sample.tokens.max()}, and the vocabulary {vocab_size} entries")
            found.append(sample)
        if not found:
            raise EppError("there is no sample")
    return Samples(found)


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
