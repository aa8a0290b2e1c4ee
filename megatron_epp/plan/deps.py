"""Dependencies between actions, defined only here for `check`, `simulate`, lowering and the planners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, Neighbours, slice_neighbours

Needs = Callable[[Action], list[Action]]


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts about a plan that the rules use."""

    num_stages: int
    neighbours: Neighbours
    optional: frozenset[Action]


def _forward(a: Action, facts: _Facts) -> Iterator[Action]:
    if a.stage > 0:
        yield Action(Op.F, a.stage - 1, a.chunk)
    before = facts.neighbours.previous[a.chunk]
    if before is not None:  # its keys and values
        yield Action(Op.F, a.stage, before)


def _backward(a: Action, facts: _Facts) -> Iterator[Action]:
    yield Action(Op.F, a.stage, a.chunk)
    if a.stage < facts.num_stages - 1:
        yield Action(Op.B, a.stage + 1, a.chunk)
    after = facts.neighbours.following[a.chunk]
    if after is not None:  # the gradient of its keys and values
        yield Action(Op.B, a.stage, after)
    if facts.optional:
        for op in (Op.R, Op.L):
            if (prepared := Action(op, a.stage, a.chunk)) in facts.optional:
                yield prepared


def _same_stage(op: Op, step: int = 0) -> Callable[[Action, _Facts], Iterator[Action]]:
    def rule(a: Action, _: _Facts) -> Iterator[Action]:
        yield Action(op, a.stage + step, a.chunk)

    return rule


_RULES: dict[Op, Callable[[Action, _Facts], Iterator[Action]]] = {
    Op.F: _forward,
    Op.B: _backward,
    Op.W: _same_stage(Op.B),
    Op.R: _same_stage(Op.F),
    Op.O: _same_stage(Op.F),
    Op.L: _same_stage(Op.O),
    Op.FREE: _same_stage(Op.O),
    Op.SEND_F: _same_stage(Op.F),
    Op.RECV_F: _same_stage(Op.SEND_F, step=-1),
    Op.SEND_B: _same_stage(Op.B),
    Op.RECV_B: _same_stage(Op.SEND_B, step=1),
    Op.REDUCE: _same_stage(Op.B),
}


def deps(chunks: Sequence[Chunk], num_stages: int, optional: Collection[Action] = ()) -> Needs:
    """Build the function from an action to the actions it waits for.

    Args:
        chunks: the chunk table.
        num_stages: stages of the pipeline.
        optional: the `R`, `O` and `L` actions the plan contains; a backward waits for those of its own stage and chunk.

    Returns:
        ``needs(action)``: the actions that must have ended before it starts. If the two are on neighbouring stages, the message
        between them must have arrived as well.
    """
    facts = _Facts(num_stages, slice_neighbours(chunks), frozenset(optional))

    def needs(action: Action) -> list[Action]:
        return list(_RULES[action.op](action, facts))

    return needs
