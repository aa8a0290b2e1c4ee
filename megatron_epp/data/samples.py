"""Samples: sequences with values of every token, such as advantages, from files or from memory."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_epp.data.batch import OF_TOKENS, PADDING_TOKEN, InputColumns, LossColumns
from megatron_epp.data.records import records
from megatron_epp.data.routes import ROUTES, Routing, read_routes
from megatron_epp.plan.errors import EppError, Remedy
from megatron_epp.plan.problem import TokenSpan
from megatron_epp.plan.reading import naming_file

if TYPE_CHECKING:
    from megatron_epp.losses import Loss

TOKENS, TRAINED, GROUP, SPANS, POSITIONS = "tokens", "trained", "group", "spans", "positions"
"""Keys of a sample that are no columns."""
_EXACT = 1 << 24  # whole numbers below it are exact in fp32, in which columns travel


def columns_of(loss: Loss) -> LossColumns:
    optional = getattr(loss, "widths", {}), getattr(loss, "candidates", None), bool(getattr(loss, "has_values", False))
    return LossColumns(loss.columns, loss.average, *optional, loss.scope, getattr(loss, "group_problem", None))


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One sequence. `columns` and `inputs` have values by name, ``[tokens]`` or ``[tokens, width]``."""

    tokens: np.ndarray  # ``[tokens]`` integers, at least 2; for a loss of values one more than the sample has
    trained: np.ndarray | None  # ``[tokens]``, 1 for a token that is trained where it is a label, 0 for others; None if all are
    # A token's value is about it as a label, so that the first is not used; or it is one number for all
    columns: Mapping[str, np.ndarray]
    group: int | str | None = None  # samples that have it in common share one loss; None where losses are not over groups
    spans: tuple[TokenSpan, ...] = ()  # tokens that are not cut, with their work
    payloads: tuple[Any, ...] = ()  # of every span, as it was given
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)  # a token's value is about it as an input
    positions: np.ndarray | None = None  # int64 ``[tokens, axes]``; None for places in the sequence
    # int16 ``[inputs, experts per token]`` by number of layer; empty where routers choose
    routes: Mapping[int, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(
        record: Mapping[str, Any],
        asks: LossColumns,
        what: str,
        vocab_size: int | None = None,
        of_inputs: InputColumns = OF_TOKENS,
    ) -> TokenSample:
        """Check and convert a sample: ``tokens``, ``trained`` if not all are, and columns; numbers, arrays or tensors.

        For a loss of values ``trained`` and columns are of the token that has been read. A token is put behind the last one
        then, so that all are inputs, and what is of a token is in the place of its successor.

        Raises `EppError` if a column is missing, or of another length or width than it must be, or no number; a token (without
        `vocab_size`, any is right) or an expert is unknown; or spans overlap, reach beyond the inputs, or no function of
        `of_inputs` reads them.
        """
        if TOKENS not in record:
            raise EppError(f"{what} has no {TOKENS}")
        tokens = _numbers(record[TOKENS], f"{what}: {TOKENS}")
        least = 1 if asks.has_values else 2
        if tokens.ndim != 1 or len(tokens) < least or not np.issubdtype(tokens.dtype, np.integer):
            raise EppError(f"{what}: {TOKENS} must be a list of at least {least} integer{'s' * (least > 1)}")
        trained, columns = record.get(TRAINED), {}
        for name in asks.names:
            if name not in record:
                raise EppError(f"{what} has no {name}, which the loss reads; it has {', '.join(record)}")
            columns[name] = _column(record[name], len(tokens), f"{what}: {name}", asks.widths.get(name))
        mask = None if trained is None else _column(trained, len(tokens), f"{what}: {TRAINED}")
        if mask is not None and not np.isin(mask, (0, 1)).all():
            raise EppError(f"{what}: {TRAINED} must be 0 or 1")
        mask = None if mask is None else np.broadcast_to(mask, len(tokens)).astype(np.uint8)
        is_read = np.ones(len(tokens), dtype=np.bool_) if mask is None else mask == 1
        is_read[0] &= asks.has_values  # the first token is no label
        for name, values in columns.items():
            _check_finite(np.broadcast_to(values, (*is_read.shape, *values.shape[1:])), is_read, f"{what}: {name}")
        if vocab_size is not None:
            _check_tokens(tokens, vocab_size, f"{what} has token")
        if asks.candidates is not None:
            rows = _numbers(record[asks.candidates], what)[1:]  # as they were given, before rounding
            rows = rows if mask is None else rows[mask[1:] == 1]
            if (rows % 1 != 0).any():
                raise EppError(f"{what}: {asks.candidates} must be numbers of tokens")
            _check_tokens(rows, min(_EXACT, vocab_size or _EXACT), f"{what}: {asks.candidates} has token")
        group = _group(record, what) if asks.scope == "group" else None
        num_inputs = len(tokens) - (not asks.has_values)
        spans, payloads = _spans(record, what, num_inputs, of_inputs)
        inputs = {name: _input_column(record, name, len(tokens), what) for name in of_inputs.names or ()}
        positions = _positions(record, what, len(tokens), of_inputs.axes)
        routes = read_routes(record, what, len(tokens), num_inputs, of_inputs.routing)
        sample = TokenSample(tokens.astype(np.int64), mask, columns, group, spans, payloads, inputs, positions, routes)
        return sample._of_inputs() if asks.has_values else sample

    def _of_inputs(self) -> TokenSample:
        tokens = np.append(self.tokens, PADDING_TOKEN)
        mask = None if self.trained is None else np.insert(self.trained, 0, 0)
        columns = {name: x if x.ndim == 0 else np.concatenate([x[:1], x]) for name, x in self.columns.items()}
        return replace(self, tokens=tokens, trained=mask, columns=columns)


class Samples:
    """Samples in memory, a `SequenceDataset`, with `names` for errors, `groups` of sequences with one loss, and their routes.

    Raises `EppError` if a group is not as the loss needs it, or only some samples have routes.
    """

    def __init__(
        self, samples: Iterable[TokenSample], asks: LossColumns | None = None, names: Sequence[str] | None = None
    ) -> None:
        self._samples = tuple(samples)
        self.names = [f"sample {index}" for index in range(len(self._samples))] if names is None else names
        self.lengths = np.array([len(sample.tokens) - 1 for sample in self._samples], dtype=np.int32)
        for column in self._samples[0].inputs if self._samples else ():
            if len(shapes := {sample.inputs[column].shape[1:]: None for sample in self._samples}) > 1:
                widths = " and ".join(str(shape[0]) if shape else "1" for shape in shapes)
                raise EppError(f"{column} has {widths} values for a token: give all samples as many")
        self.has_routes = any(sample.routes for sample in self._samples)
        without = [name for name, sample in zip(self.names, self._samples, strict=True) if not sample.routes]
        if self.has_routes and without:
            raise EppError(f"{without[0]} has no {ROUTES}, and others have: give them to all samples, or to none")
        by_group: dict[int | str, list[int]] = {}
        for index, sample in enumerate(self._samples):
            by_group.setdefault(index if sample.group is None else sample.group, []).append(index)
        self.groups = () if asks is None or asks.scope == "token" else tuple(map(tuple, by_group.values()))
        if asks is not None and asks.group_problem is not None:
            for name, group in by_group.items():
                if problem := asks.group_problem([self._samples[index].columns for index in group]):
                    raise EppError(f"group {name!r} {problem}")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> TokenSample:
        return self._samples[index]

    def spans(self, index: int) -> tuple[TokenSpan, ...]:
        return self._samples[index].spans

    def num_trained(self) -> list[int]:
        return [len(sample.tokens) - 1 if sample.trained is None else int(sample.trained[1:].sum()) for sample in self._samples]

    def tokens(self, index: int, start: int = 0, end: int | None = None) -> np.ndarray:
        return self._samples[index].tokens[start:end]

    def trained(self, index: int, start: int, end: int) -> np.ndarray | None:
        mask = self._samples[index].trained
        return None if mask is None else mask[start:end]

    def column(self, name: str, index: int, start: int, end: int) -> np.ndarray:
        """Values of tokens ``[start, end)`` of a sequence as labels, ``[tokens]`` or ``[tokens, width]``."""
        values = self._samples[index].columns[name]
        return np.broadcast_to(values, end - start) if values.ndim == 0 else values[start:end]

    def take_payloads(self, other: Samples) -> None:
        self._samples = other._samples


def read_samples(
    path: Path, asks: LossColumns, most_tokens: int, vocab_size: int | None = None, routing: Routing | None = None
) -> Samples:
    """Read a file with a sample in each record. Raises `EppError`, which names the line, also for more than `most_tokens`."""
    samples, names = [], []
    for where, record in records(path):
        if not isinstance(record, dict):
            raise EppError(f"{where} is no object with {TOKENS}")
        sample = TokenSample.of(record, asks, where, vocab_size, InputColumns(routing=routing))
        if (positions := len(sample.tokens) - 1) > most_tokens:
            has = f"{len(record[TOKENS]):,} tokens, {positions:,} positions of {most_tokens:,} at most"
            raise EppError(f"{where} has {has}; samples are not cut", Remedy("raise", "context", positions))
        samples.append(sample)
        names.append(where)
    with naming_file(path):
        if not samples:
            raise EppError("there is no sample")
        return Samples(samples, asks, names)


def _numbers(values: Any, what: str) -> np.ndarray:
    try:
        numbers = np.asarray(values.tolist() if hasattr(values, "tolist") else values)
    except ValueError as error:
        raise EppError(f"{what}: {error}") from error
    if numbers.dtype == np.object_:
        with contextlib.suppress(TypeError, ValueError):
            numbers = numbers.astype(np.float64)  # None, which engines give where there is no value, becomes NaN
    if not np.issubdtype(numbers.dtype, np.number) and numbers.dtype != np.bool_:
        raise EppError(f"{what} must be numbers")
    return numbers


def _group(sample: Mapping[str, Any], what: str) -> int | str:
    group: Any = sample.get(GROUP)
    group = group.item() if hasattr(group, "item") else group
    if isinstance(group, bool) or not isinstance(group, int | str):
        raise EppError(f"{what}: {GROUP} must be an integer or a text, the same for samples with one loss; it is {group!r}")
    return group


def _check_tokens(numbers: np.ndarray, vocab_size: int, what: str) -> None:
    if numbers.size and (numbers.max() >= vocab_size or numbers.min() < 0):
        strange = numbers.max() if numbers.max() >= vocab_size else numbers.min()
        raise EppError(f"{what} {int(strange)}, and the vocabulary {vocab_size} entries")


def _column(values: Any, num_tokens: int, what: str, width: int | None = None) -> np.ndarray:
    column = _numbers(values, what).astype(np.float32)
    if width is not None and column.shape != (num_tokens, width):
        shape = " x ".join(map(str, column.shape)) or "one number"
        raise EppError(f"{what} is {shape}; the loss reads {width} values for each of {num_tokens} tokens")
    if width is None and (column.ndim > 1 or (column.ndim == 1 and len(column) != num_tokens)):
        raise EppError(f"{what} has {column.size} values for {num_tokens} tokens: give as many, or one number for all")
    return column


def _spans(
    record: Mapping[str, Any], what: str, num_inputs: int, asked: InputColumns
) -> tuple[tuple[TokenSpan, ...], tuple[Any, ...]]:
    if not (listed := record.get(SPANS)):
        return (), ()
    if asked.names is None:
        raise EppError(f"{what} has {len(listed)} {SPANS}, and no function makes their rows: pass inputs=")
    pairs = sorted((_span(span, f"{what}: span {number}", num_inputs), number) for number, span in enumerate(listed))
    for (before, first), (after, second) in pairwise(pairs):
        if after.start < before.end:
            tokens = f"tokens {before.start} to {before.end} and {after.start} to {after.end}"
            raise EppError(f"{what}: spans {first} and {second} overlap: {tokens}")
    return tuple(span for span, _ in pairs), tuple(listed[number].get("payload") for _, number in pairs)


def _span(fields: Any, what: str, num_inputs: int) -> TokenSpan:
    if not isinstance(fields, Mapping) or (unknown := fields.keys() - {"start", "tokens", "work", "kept", "payload"}):
        named = "" if not isinstance(fields, Mapping) else f"; it has {', '.join(map(str, unknown))}"
        raise EppError(f"{what} must be a dict of start and tokens, with work, kept and payload if there are any{named}")
    try:
        start, tokens = operator.index(fields["start"]), operator.index(fields["tokens"])
        work, kept_tokens = (float(fields.get(name, 0.0)) for name in ("work", "kept"))
    except (KeyError, TypeError, ValueError):
        raise EppError(f"{what} needs start and tokens, two integers, and work and kept as numbers") from None
    if start < 0 or tokens < 1 or start + tokens > num_inputs:
        inputs = f"inputs 0 to {num_inputs}; a last token that is a label alone is none"
        raise EppError(f"{what} has tokens {start} to {start + tokens}, and the sample has {inputs}")
    if not 0 <= work < math.inf:
        raise EppError(f"{what}: work is {work}; it is the number of tokens that takes as long in one layer")
    if work and "kept" not in fields:
        size = "patches x layers x (width / hidden size of the language model)"
        todo = f"add kept, {size} x tensor-parallel ranks x context-parallel ranks, or 0 if the encoder is frozen"
        raise EppError(f"{what} has work and not what its encoder keeps until its backward: {todo}")
    if not 0 <= kept_tokens < math.inf:
        raise EppError(f"{what}: kept is {kept_tokens}; it is the number of tokens of which one layer keeps as much")
    return TokenSpan(start, start + tokens, work, kept_tokens)


def _input_column(record: Mapping[str, Any], name: str, num_tokens: int, what: str) -> np.ndarray:
    if name not in record:
        raise EppError(f"{what} has no {name}, which the inputs read; it has {', '.join(record)}")
    column = _numbers(record[name], f"{what}: {name}").astype(np.float32)
    if column.ndim not in (1, 2) or len(column) != num_tokens:
        shape = " x ".join(map(str, column.shape)) or "one number"
        raise EppError(f"{what}: {name} is {shape}; the inputs read one row for each of {num_tokens} tokens")
    return column


def _positions(record: Mapping[str, Any], what: str, num_tokens: int, axes: int) -> np.ndarray | None:
    if (rows := record.get(POSITIONS)) is None:
        return None
    if axes == 1:
        why = "which a model with position_embedding_type='mrope' alone reads"
        raise EppError(f"{what} has {POSITIONS}, {why}: leave them out")
    positions = _numbers(rows, f"{what}: {POSITIONS}")
    if positions.shape != (num_tokens, axes):
        shape = " x ".join(map(str, positions.shape)) or "one number"
        raise EppError(f"{what}: {POSITIONS} is {shape}; the model reads {axes} for each of {num_tokens} tokens")
    if (positions % 1 != 0).any():
        raise EppError(f"{what}: {POSITIONS} must be whole numbers")
    return positions.astype(np.int64)


def _check_finite(values: np.ndarray, is_read: np.ndarray, what: str) -> None:
    """Raise `EppError` if a value that the loss reads is not finite. Others may be anything, as engines give it for prompts."""
    strange = np.argwhere(~np.isfinite(values) & (is_read if values.ndim == 1 else is_read[:, None]))
    if len(strange):
        token, value = int(strange[0][0]), values[tuple(strange[0])]
        todo = f"it must be finite, or the token left out of {TRAINED}"
        raise EppError(f"{what} is {value} for token {token}, which is trained: {todo}")
