"""What must precede what: the one statement of it. `check`, `simulate`, lowering and the planners all ask here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from megatron_epp.schedule.action import Action, Op
from megatron_epp.schedule.chunk import Chunk, slice_neighbours

Needs = Callable[[Action], list[Action]]


def deps(chunks: Sequence[Chunk], num_stages: int, optional: Collection[Action] = ()) -> Needs:
    """Build the function from an action to the actions it waits for.

    Args:
        chunks: the chunk table.
        num_stages: stages of the pipeline.
        optional: the `R`, `O` and `L` actions the plan contains; a backward waits for those of its own stage and chunk.

    Returns:
        ``needs(action)``: the actions that must have ended before it starts. An action of the neighbouring stage also needs
        its message to arrive; which message follows from the two actions (see `message_us`).
    """
    neighbours = slice_neighbours(chunks)
    present = frozenset(optional)

    def needs(action: Action) -> list[Action]:
        op, stage, chunk = action
        found: list[Action] = []
        if op is Op.F:
            if stage > 0:
                found.append(Action(Op.F, stage - 1, chunk))
            before = neighbours.previous[chunk]
            if before is not None:
                found.append(Action(Op.F, stage, before))
        elif op is Op.B:
            found.append(Action(Op.F, stage, chunk))
            if stage < num_stages - 1:
                found.append(Action(Op.B, stage + 1, chunk))
            after = neighbours.following[chunk]
            if after is not None:
                found.append(Action(Op.B, stage, after))
            if present:
                found.extend(a for a in (Action(Op.R, stage, chunk), Action(Op.L, stage, chunk)) if a in present)
        elif op is Op.W:
            found.append(Action(Op.B, stage, chunk))
        elif op is Op.R or op is Op.O:
            found.append(Action(Op.F, stage, chunk))
        elif op is Op.L:
            found.append(Action(Op.O, stage, chunk))
        elif op is Op.SEND_F:
            found.append(Action(Op.F, stage, chunk))
        elif op is Op.RECV_F:
            found.append(Action(Op.SEND_F, stage - 1, chunk))
        elif op is Op.SEND_B:
            found.append(Action(Op.B, stage, chunk))
        elif op is Op.RECV_B:
            found.append(Action(Op.SEND_B, stage + 1, chunk))
        return found

    return needs
