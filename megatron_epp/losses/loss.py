"""A loss as a sum over tokens, sequences or groups of sequences, given log-probabilities of labels and columns of values.

A loss that is written so trains in slices: its sums are over one scope, and no scope needs the values of another. Denominators
do not depend on how a batch is cut, packed, ordered or divided over replicas: they are counted from masks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from megatron_epp.plan.errors import EppError

_ATTRIBUTES = ("name", "scope", "average", "columns", "logged")


class Scope(StrEnum):
    """Tokens whose values a loss needs at once."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GROUP = "group"
    """Sequences of samples with the same group, such as the two of a preference."""


class Average(StrEnum):
    """Divisor of the sum of a batch's losses over all replicas, and how much a trained token counts in that sum.

    A sequence or group without a trained token is not counted.
    """

    TOKENS = "tokens"
    """By trained tokens; each counts 1."""
    SEQUENCES = "sequences"
    """By sequences; each token counts 1."""
    SEQUENCE_MEANS = "sequence means"
    """By sequences; each token counts 1 over the trained tokens of its sequence."""
    GROUPS = "groups"
    """By groups of sequences (`Scope.GROUP`); each token counts 1."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Trained tokens of one or several scopes, in any order: `n` tokens of `num_sequences` sequences.

    Tokens that are not trained are left out, so that no value of theirs can reach a loss or a gradient.

    Attributes:
        logprobs: ``[n]``, logarithm of the probability of every token's label, in fp32. Empty, ``[0]``, for a loss of values.
        weights: ``[n]``, how much a token counts (`Average`); above 0.
        columns: values of every token, ``[n]`` each, in fp32, by the names that the loss asks for; ``[n, k]`` for a column of
            width `k`.
        entropy: ``[n]``, entropy of the distribution that the label is from; None unless the loss asks for it.
        sequence: ``[n]`` int64, the number of every token's sequence; None in `Scope.TOKEN`.
        num_sequences: numbers that `sequence` may have; some have no token here.
        candidate_logprobs: ``[n, k]``, logarithms of the probabilities of `k` given tokens in the place of the label; None
            unless the loss asks for them.
        values: ``[n]``, the model's output for every token that it has read, which may be a sequence's last one; None unless
            the loss asks for it. Weights and columns are of that token then, not of a label.
        group: ``[n]`` int64, the number of every token's group: the least number of its sequences; None but in `Scope.GROUP`.
    """

    logprobs: Tensor
    weights: Tensor
    columns: Mapping[str, Tensor]
    entropy: Tensor | None = None
    sequence: Tensor | None = None
    num_sequences: int = 0
    candidate_logprobs: Tensor | None = None
    values: Tensor | None = None
    group: Tensor | None = None

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` ``[n]`` over the trained tokens of every sequence, each counted as its weight says: ``[sequences]``.

        Raises `EppError` if the loss is over tokens, whose calls may have parts of sequences.
        """
        if self.sequence is None:
            why = "in Scope.TOKEN a loss gets parts of them"
            raise EppError(f"rows.sums, rows.means and rows.trained are of whole sequences and need Scope.SEQUENCE: {why}")
        return values.new_zeros(self.num_sequences).index_add(0, self.sequence, values * self.weights)

    def means(self, values: Tensor) -> Tensor:
        """Average `values` ``[n]`` over the trained tokens of every sequence, 0 where there are none: ``[sequences]``."""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=torch.finfo(values.dtype).tiny)

    def over_groups(self, values: Tensor) -> Tensor:
        """Sum values ``[sequences]`` over every group, at the group's number, 0 at others. Raises `EppError` without groups."""
        if self.group is None or self.sequence is None:
            raise EppError("a loss that adds up over groups of sequences needs Scope.GROUP")
        of_sequence = torch.arange(self.num_sequences, device=values.device).index_copy(0, self.sequence, self.group)
        return torch.zeros_like(values).index_add(0, of_sequence, values)

    @property
    def trained(self) -> Tensor:
        """1 for sequences with a trained token, 0 for others: ``[sequences]``."""
        return (self.sums(torch.ones_like(self.weights)) > 0).to(self.weights.dtype)


class Loss(Protocol):
    """A loss. Called with the rows of complete scopes, it returns their sum and sums to log by name, all scalars.

    The sums to log are divided as the loss is. They are given in every call, by the names in `logged`. It is not called for
    scopes without a trained token, whose loss is 0.

    All from `has_entropy` on is optional. With any of `has_entropy`, `temperature` and `candidates` the output layer and the
    loss go by blocks of tokens.

    Attributes:
        name: in the log.
        scope: tokens whose values it needs at once. In `Scope.SEQUENCE` all trained tokens of a sequence are in one call, in
            `Scope.GROUP` those of all sequences of a group; others, too, may be.
        average: see `Average`. In `Scope.TOKEN` the loss multiplies the value of every token by `Rows.weights`; in others
            `Rows.sums` and `Rows.means` do.
        columns: names of the columns that it reads, any of its own choice: samples bring values under these names.
        logged: names of the sums that it returns to be logged.
        has_entropy: true for a loss that reads `Rows.entropy`.
        temperature: divides logits.
        candidates: name of a column of token numbers, for a loss that reads `Rows.candidate_logprobs`.
        widths: of columns with several values for every token, by name.
        has_values: true for a loss that reads `Rows.values`, of a model with one output and not a vocabulary.
        group_problem: a method that says what is wrong with a group, given the columns of its samples; nothing if it is right.
    """

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def average(self) -> Average: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def logged(self) -> tuple[str, ...]: ...
    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class NextToken:
    """Cross entropy of trained tokens, each times the column `weight_column` if there is one.

    Attributes:
        average: divisor of the batch's sum.
        weight_column: name of a column of weights; None for none.
    """

    name: ClassVar[str] = "next token"
    scope: ClassVar[Scope] = Scope.TOKEN
    logged: ClassVar[tuple[str, ...]] = ()

    average: Average = Average.TOKENS
    weight_column: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.weight_column is None else (self.weight_column,)

    def __call__(self, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        weights = rows.weights if self.weight_column is None else rows.weights * rows.columns[self.weight_column]
        return -(weights * rows.logprobs).sum(), {}


def load_loss(text: str) -> Loss:
    """Import a loss by ``module:name``: an object with the attributes of `Loss`, or a class or function that makes one.

    Raises `EppError` if there is none of this name, or it is no loss.
    """
    try:
        loss = resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise EppError(f"there is no loss {text} ({type(error).__name__}: {error}): give module:name") from error
    if isinstance(loss, type) or not any(hasattr(loss, name) for name in _ATTRIBUTES):
        make: Callable[[], object] = loss
        try:
            loss = make()
        except TypeError as error:
            raise EppError(f"{text} is called without arguments to make a loss, and cannot be: {error}") from error
    return checked_loss(loss, text)


def checked_loss(candidate: Any, text: str) -> Loss:
    """Return a loss, `text` in errors. Raises `EppError` if it is none, or what it asks for does not go together."""
    missing = [name for name in _ATTRIBUTES if not hasattr(candidate, name)] + ["__call__"] * (not callable(candidate))
    if missing:
        raise EppError(f"{text} is no loss: it has no {', '.join(missing)} (see megatron_epp.losses.Loss)")
    loss: Loss = candidate
    for kind, value in ((Scope, loss.scope), (Average, loss.average)):
        if value not in tuple(kind):
            raise EppError(f"{text} has {kind.__name__.lower()} {value!r}; it must be one of {', '.join(kind)}")
    if loss.average is Average.GROUPS and loss.scope is not Scope.GROUP:
        raise EppError(f"{text} is divided by groups of sequences: its scope must be {Scope.GROUP}")
    widths, candidates = dict(getattr(loss, "widths", {})), getattr(loss, "candidates", None)
    if strange := [name for name, width in widths.items() if name not in loss.columns or width < 1]:
        raise EppError(f"{text} has a width of {', '.join(strange)}: widths are above 0, and of columns that it reads")
    if candidates is not None and candidates not in widths:
        raise EppError(f"{text} has candidates {candidates!r}, which must be one of its columns, with a width")
    check_settings(loss, above={"temperature": 0})
    read = [name for name in ("has_entropy", "candidates") if getattr(loss, name, None)]
    read += ["temperature"] * (getattr(loss, "temperature", 1.0) != 1.0)
    if getattr(loss, "has_values", False) and read:
        raise EppError(f"{text} has values and {read[0]}: a model has one output, or the logits of a vocabulary")
    return loss


def check_settings(loss: object, at_least: Mapping[str, float] | None = None, above: Mapping[str, float] | None = None) -> None:
    """Raise `EppError` if a loss's number is NaN, or too small: `at_least` and `above` give bounds by its name.

    A loss need not have it, and None means that there is none.
    """
    for bounds, words, is_right in ((at_least, "at least", operator.ge), (above, "above", operator.gt)):
        for name, bound in (bounds or {}).items():
            value = getattr(loss, name, None)
            if value is not None and not is_right(value, bound):
                raise EppError(f"{name} of {type(loss).__name__} is {value}; it must be {words} {bound}")
