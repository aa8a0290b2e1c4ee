"""Results on their way to attention and from it: on one rank, or by messages between any two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_epp.contrib.helix.attention_operations import INPUTS, INPUTS_GRADIENT, RESULT, RESULT_GRADIENT, A
from megatron_epp.plan import Action, Op, Plan
from megatron_epp.plan.communicators import directions
from megatron_epp.plan.operations import MessageKind
from megatron_epp.runtime.executor import Executor, Handler
from megatron_epp.runtime.links.links import Links, Receive

_FROM_STAGES = (INPUTS, RESULT_GRADIENT)
_BEHIND = (RESULT, RESULT_GRADIENT)
"""Kinds between attention and the stage behind it; the others are between attention and the stage ahead."""
_GRADIENTS = (RESULT_GRADIENT, INPUTS_GRADIENT)

Message = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of a message."""


def attention_links(links: Links, new_group: Callable[[], ProcessGroup]) -> tuple[Links, Links]:
    """Return the communicators of attention's inputs, and of its results, with those of their gradients. A collective call."""
    used = directions(*permutations(range(len(links.ranks)), 2))

    def own() -> Links:
        up, down, of_gradients, of_gradients_up = (new_group() for _ in range(4))
        groups = replace(links, activations=up, activations_down=down, gradients=of_gradients, gradients_up=of_gradients_up)
        return replace(groups, directions=used, _in_flight={}, _rings={})

    return own(), own()


class AttentionMessages:
    """Tensors that a plan's attention and stages give to each other; `message` describes that of a kind and a chunk."""

    def __init__(self, plan: Plan, links: tuple[Links, Links] | None, message: Callable[[MessageKind, int], Message]) -> None:
        self._plan, self._links, self._message = plan, links, message
        self._rank_of = {step.action[1:]: rank for rank, row in enumerate(plan.ranks) for step in row if step.action.op is A}
        self._there: dict[tuple[MessageKind, int, int], Tensor | Receive] = {}

    def put(self, kind: MessageKind, site: int, chunk: int, tensor: Tensor) -> None:
        """Keep what an action gives, until it is taken or sent."""
        self._there[kind, site, chunk] = tensor

    def take(self, kind: MessageKind, site: int, chunk: int) -> Tensor:
        """Return what an action needs, from this rank or from another."""
        there = self._there.pop((kind, site, chunk))
        return there.wait() if isinstance(there, Receive) else there

    def ranks(self, kind: MessageKind, site: int, chunk: int) -> tuple[int, int]:
        """Return the ranks that give and take it."""
        of_attention, of_stage = self._rank_of[site, chunk], self._plan.placement[site + (kind in _BEHIND)]
        return (of_stage, of_attention) if kind in _FROM_STAGES else (of_attention, of_stage)

    def handlers(self) -> Mapping[Op, Handler]:
        """Return the handlers of sends and receives."""
        kinds = (INPUTS, RESULT, RESULT_GRADIENT, INPUTS_GRADIENT)
        sends: dict[Op, Handler] = {kind.send: partial(self._send, kind) for kind in kinds}
        return sends | {kind.receive: partial(self._receive, kind) for kind in kinds}

    def assert_empty(self) -> None:
        assert not self._there  # all has been taken

    def _send(self, kind: MessageKind, run: Executor, action: Action) -> None:
        # Sides that stages have count these; those of attention its sites.
        key = kind, action.stage - (kind in _BEHIND and kind in _FROM_STAGES), action.chunk
        self._of(kind).send(self.take(*key), self.ranks(*key)[1], kind in _GRADIENTS)

    def _receive(self, kind: MessageKind, run: Executor, action: Action) -> None:
        key = kind, action.stage - (kind in _BEHIND and kind not in _FROM_STAGES), action.chunk
        message = self._message(kind, action.chunk)
        self._there[key] = self._of(kind).post_receive(*message, self.ranks(*key)[0], kind in _GRADIENTS)

    def _of(self, kind: MessageKind) -> Links:
        assert self._links is not None  # of several ranks
        return self._links[kind in _BEHIND]
