"""A loss over tokens, sequences or groups of them, of the log-probabilities that chunks give, with its gradient for each chunk.

A forward gives log-probabilities of labels, which hold their graph but no logits (`loss.token_blocks`). With the last forward
of the chunks whose loss is computed together (`Plan.loss_groups`, else one chunk), the loss is differentiated by those of
trained tokens, and each chunk's backward begins with its own gradient.

If a loss or gradient is not finite, although what the model gave is, zeros take its place on the device, and `ScopedLoss.end`
names the token. What the model gives is left to Megatron's own checks.
"""

from __future__ import annotations

import bisect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_epp import losses
from megatron_epp.data.batch import TrainedTokens
from megatron_epp.data.samples import columns_of
from megatron_epp.losses import Average, Loss, Rows, Scope
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import one_line
from megatron_epp.runtime.attention.context_parallel import NOT_SHARED, of_group
from megatron_epp.runtime.attention.segments import SegmentTable
from megatron_epp.runtime.context import ChunkContext


class _Part(NamedTuple):
    """Trained tokens of one chunk, among `num_tokens` that the loss gets; `values` are ``[rows, trained]`` without graph."""

    chunk: int
    table: SegmentTable
    num_tokens: int
    values: Tensor
    inputs: TrainedTokens


class _Check(NamedTuple):
    parts: list[tuple[SegmentTable, int]]  # layout of each part's tokens, and how many of them the loss gets on this rank
    # float64 ``[2 + rows + columns]``: 1 if the loss or its gradient is not finite, else 0; the token that it is due to, among
    # those of all parts; and the values and columns of that token
    figures: Tensor


class _Columns(dict[str, Tensor]):
    """Columns by name, which say whose they are where one is missing."""

    def __init__(self, loss: Loss, columns: dict[str, Tensor]) -> None:
        super().__init__(columns)
        self._loss = loss

    def __missing__(self, name: str) -> Tensor:
        raise EppError(
            f"loss {type(self._loss).__name__} reads {name}, which is not in its columns ({', '.join(self) or 'it has none'})"
        )


class ScopedLoss:
    """Loss of the chunks of an iteration. `context_ranks` share the tokens of a chunk; None if this rank has all.

    `scale` multiplies gradients where data parallelism does not divide by the batch's tokens. `keeps`, a list, gets each
    chunk's log-probabilities, 0 for untrained tokens, or the model's values. `name_of` names a sequence of the batch in errors.
    """

    def __init__(self, loss: Loss, context_ranks: dist.ProcessGroup | None = None) -> None:
        self.loss, self.asks, self.scale = loss, columns_of(loss), 1.0
        self._shared = NOT_SHARED if context_ranks is None else of_group(context_ranks)
        self._group = context_ranks if self._shared is not NOT_SHARED and loss.scope != Scope.TOKEN else None
        self.keeps: list[tuple[int, Tensor]] | None = None
        self.name_of: Callable[[int], str] = lambda sequence: f"sequence {sequence} of the batch"
        self._waiting: dict[int, _Part] = {}  # by chunk, while others of its group have not run
        self._gradients: dict[int, Tensor] = {}
        self._checks: list[_Check] = []

    def candidates(self, inputs: TrainedTokens, num_tokens: int) -> Tensor | None:
        """Return the tokens next to labels, ``[tokens, k]``, 0 where untrained, whose log-probabilities are asked for."""
        if self.asks.candidates is None:
            return None
        of_trained = self._by_name(inputs.columns)[self.asks.candidates].long()
        num_seen = num_tokens * (1 if self._group is None else self._group.size())
        of_all = of_trained.new_zeros(num_seen, of_trained.shape[1]).index_copy(0, inputs.rows, of_trained)
        return self._own(of_all.t()).t()

    def forward(self, context: ChunkContext, values: Tensor, inputs: TrainedTokens, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what a chunk's forward completes; raises `EppError` if the loss fails, or does not return what a loss must.

        Returns the chunk's output, which `gradient` belongs to; and this rank's sums to report, without gradients: the loss,
        the number that divides it, and the sums to log.

        Args:
            values: ``[rows, tokens]`` of this rank in fp32: log-probabilities of labels, those of each candidate, and
                entropies, as the loss asks; or the model's values.
            loss_mask: ``[tokens]`` of this rank, 0 for tokens that are not trained.
        """
        own = values.detach()
        if self.keeps is not None:
            self.keeps.append((context.chunk, own[0] if self.asks.has_values else torch.where(loss_mask != 0, own[0], 0.0)))
        seen = own if self._group is None else torch.cat(_gathered(own, self._group), dim=1)
        part = _Part(context.chunk, context.table, seen.shape[1], seen.index_select(1, inputs.rows), inputs)
        self._waiting[context.chunk] = part
        together = context.loss_group or (context.chunk,)
        none = inputs.counted.new_zeros([])
        loss, logged = none, dict.fromkeys(self.loss.logged, none)
        if all(chunk in self._waiting for chunk in together):
            parts = [self._waiting.pop(chunk) for chunk in together]
            if any(len(part.inputs.rows) for part in parts):
                loss, logged, gradient = self._differentiated(parts)
            else:
                gradient = torch.cat([part.values for part in parts], dim=1)  # empty
            if values.requires_grad:
                self._hand_out(parts, gradient)
            if self._group is not None and self._shared.rank:  # all ranks of the group have the same loss
                loss, logged = none, dict.fromkeys(self.loss.logged, none)
        sums = loss, inputs.counted, *(logged[name] for name in self.loss.logged)
        return values, torch.stack([value.detach().float() for value in sums])

    def gradient(self, chunk: int) -> Tensor | None:
        """Return the gradient of a chunk's output, once; None if its output is not this loss's, as when costs are measured."""
        return self._gradients.pop(chunk, None)

    def end(self) -> str:
        """Check that all sequences and groups are complete, and all gradients taken; wait for the device. Returns which token's
        loss or gradient is not finite, with its values; empty if all are.
        """
        assert not self._waiting
        assert not self._gradients
        checks, self._checks = self._checks, []
        is_wrong = torch.stack([check.figures[0] for check in checks]).tolist() if checks else []
        return next((self._problem(check) for check, wrong in zip(checks, is_wrong, strict=True) if wrong), "")

    def _differentiated(self, parts: Sequence[_Part]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        values = torch.cat([part.values for part in parts], dim=1).requires_grad_()
        weights = torch.cat([part.inputs.weights for part in parts]).requires_grad_()
        columns = torch.cat([part.inputs.columns for part in parts], dim=1)
        with torch.enable_grad():  # in an evaluation, too, for the check
            loss, logged = self._called(self._rows(parts, values, weights.clone(), columns), parts)
            gradient, by_weight = torch.autograd.grad(loss, [values, weights], allow_unused=True)
        if gradient is None:
            raise EppError(f"loss {type(self.loss).__name__} does not depend on what the model gives: it trains nothing")
        if by_weight is None and (self.loss.scope, self.loss.average) == (Scope.TOKEN, Average.SEQUENCE_MEANS):
            raise EppError(
                f"loss {type(self.loss).__name__} is averaged by {Average.SEQUENCE_MEANS} and does not depend on "
                "rows.weights: in Scope.TOKEN the loss multiplies every token's value by its weight, 1 over the trained tokens "
                "of its sequence"
            )
        with torch.no_grad():
            is_strange = ~gradient.isfinite().all(0)
            if by_weight is not None:  # a token's own loss, where losses are sums of what is multiplied by weights
                is_strange |= ~by_weight.isfinite()
            is_wrong = values.isfinite().all() & (is_strange.any() | ~loss.isfinite())
            # In one loss over many tokens all of them are strange, of which the one with the largest number is to blame.
            numbers = torch.cat([values, columns])
            worst = torch.where(is_strange | ~is_strange.any(), numbers.abs().amax(0), -1.0).argmax().reshape(1)
            of_worst = numbers.index_select(1, worst)[:, 0]
            starts = accumulate((part.num_tokens for part in parts), initial=0)
            tokens = torch.cat([part.inputs.rows + start for part, start in zip(parts, starts, strict=False)])
            figures = torch.cat([is_wrong.reshape(1).double(), tokens[worst].double(), of_worst.double()])
            self._checks.append(_Check([(part.table, part.num_tokens) for part in parts], figures))
            return loss.masked_fill(is_wrong, 0.0), logged, gradient.masked_fill(is_wrong, 0.0) * self.scale

    def _hand_out(self, parts: Sequence[_Part], gradient: Tensor) -> None:
        """Scatter the gradient of trained tokens to this rank's tokens of each chunk, with 0 for others."""
        for part, of_part in zip(parts, gradient.split([len(part.inputs.rows) for part in parts], dim=1), strict=True):
            of_all = of_part.new_zeros(len(of_part), part.num_tokens).index_copy(1, part.inputs.rows, of_part)
            self._gradients[part.chunk] = self._own(of_all)

    def _own(self, of_all: Tensor) -> Tensor:
        """Return this rank's part of what is of the tokens that the loss gets, ``[rows, tokens]``."""
        return of_all if self._group is None else of_all.chunk(self._group.size(), dim=1)[self._shared.rank]

    def _called(self, rows: Rows, parts: Sequence[_Part]) -> tuple[Tensor, dict[str, Tensor]]:
        name = f"loss {type(self.loss).__name__}"
        try:
            result: Any = self.loss(rows)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = losses.loss.__file__, __file__  # where the user's call of them is what tells more
            frame = next((frame for frame in reversed(frames) if frame.filename not in ours), frames[-1])
            sequences = sorted({piece.sequence for part in parts for piece in part.table.segments if piece.sequence >= 0})
            samples = ", ".join(map(self.name_of, sequences[:3])) + (" and others" if len(sequences) > 3 else "")
            where = f"{frame.filename}:{frame.lineno}, with {rows.weights.numel()} trained tokens of {samples}"
            kind = "" if isinstance(error, EppError) else f"{type(error).__name__}: "
            raise EppError(f"{name} fails at {where}: {kind}{one_line(error)}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise EppError(f"{name} returns a {type(result).__name__}; it must return the sum and a dict of sums to log")
        loss, logged = result
        if missing := [key for key in self.loss.logged if key not in logged]:
            raise EppError(f"{name} does not return {', '.join(missing)}, which its attribute logged has")
        for key, value in {"loss": loss, **{key: logged[key] for key in self.loss.logged}}.items():
            if not isinstance(value, Tensor) or value.ndim:
                what = f"a tensor of shape {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__
                raise EppError(f"{name} returns {what} for {key}; it must be a sum over all rows, a tensor without dimensions")
        if not loss.requires_grad:
            raise EppError(f"{name} returns a loss without a graph: it must be computed from rows, and not detached")
        return loss, logged

    def _rows(self, parts: Sequence[_Part], values: Tensor, weights: Tensor, columns: Tensor) -> Rows:
        scope, by_name = self.loss.scope, _Columns(self.loss, self._by_name(columns))
        if self.asks.has_values:
            rows = Rows(weights.new_empty(0), weights, by_name, values=values[0])
        else:
            num_candidates = 0 if self.asks.candidates is None else self.asks.widths[self.asks.candidates]
            logprobs, of_candidates, entropy = values.split([1, num_candidates, len(values) - 1 - num_candidates])
            rows = Rows(logprobs[0], weights, by_name, entropy[0] if len(entropy) else None)
            rows = replace(rows, candidate_logprobs=of_candidates.t()) if num_candidates else rows
        if scope == Scope.TOKEN:
            return rows
        sequence, group = (torch.cat([getattr(part.inputs, name) for part in parts]) for name in ("sequence", "group"))
        num_sequences = 1 + max(segment.sequence for part in parts for segment in part.table.segments)
        return replace(rows, sequence=sequence, num_sequences=num_sequences, group=group if scope == Scope.GROUP else None)

    def _by_name(self, columns: Tensor) -> dict[str, Tensor]:
        widths = self.asks.widths
        of_names = columns.split([widths.get(name, 1) for name in self.asks.names])
        return {name: x.t() if name in widths else x[0] for name, x in zip(self.asks.names, of_names, strict=True)}

    def _problem(self, check: _Check) -> str:
        _, token, *values = check.figures.tolist()
        part, token = _at(int(token), [num_tokens for _, num_tokens in check.parts])
        table, _ = check.parts[part]
        pieces = table.part(chain.from_iterable(self._shared.shards_of_loss(self.loss.scope, table.num_tokens)))
        at, token = _at(token, [piece.num_tokens for piece in pieces])
        piece = pieces[at]
        position = piece.start + token + (not self.asks.has_values)  # of the label, among the sample's tokens
        of_token = [f"{'value' if self.asks.has_values else 'log-probability'} {values[0]:g}"]
        for name in reversed(self.asks.names):
            width = self.asks.widths.get(name, 1)
            of_column, values = values[-width:], values[:-width]
            of_token.insert(1, f"{name} {min(of_column):g}" + f" to {max(of_column):g}" * (width > 1))
        where = f"token {position} of {self.name_of(piece.sequence)}"
        return f"{self.loss.name}: the loss of {where}, or its gradient, is not finite ({', '.join(of_token)})"


def _at(token: int, sizes: Sequence[int]) -> tuple[int, int]:
    part = bisect.bisect_right([*accumulate(sizes)], token)
    return part, token - sum(sizes[:part])


def _gathered(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    of_ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_ranks, own.contiguous(), group=group)
    return of_ranks
