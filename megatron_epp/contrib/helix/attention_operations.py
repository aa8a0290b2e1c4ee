"""Operations of attention that runs separately from its layer, on any rank (HelixPipe, arXiv 2507.00394, section 3).

Core attention has no weights, so a layer's attention of different chunks can run on different ranks at the same time. Stages
are then cut inside attention: each begins with a layer's output projection and MLP and ends with the queries, keys and values
of the next layer. `A` of site ``s`` attends between stages ``s`` and ``s + 1``, and `G` is its backward, on the rank of `A`,
which keeps queries, keys, values and output. The residual goes from stage to stage as without separate attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_epp.plan.action import Op
from megatron_epp.plan.operations import ANYWHERE, Before, MessageKind, Need, Of, Operation, OperationRows, Presence, register

A, G = Op.define("A"), Op.define("G")

INPUTS = MessageKind("queries, keys and values", Op.define("SEND_QKV"), Op.define("RECV_QKV"))
RESULT = MessageKind("attention's output", Op.define("SEND_A"), Op.define("RECV_A"))
RESULT_GRADIENT = MessageKind("the gradient of attention's output", Op.define("SEND_DA"), Op.define("RECV_DA"))
INPUTS_GRADIENT = MessageKind("the gradient of queries, keys and values", Op.define("SEND_DQKV"), Op.define("RECV_DQKV"))

_BOTH = (A, G)


def between_stages(placement: Sequence[int]) -> Sequence[int]:
    """Sites of attention: one between every two stages, each of its actions on any rank."""
    return (ANYWHERE,) * (len(placement) - 1)


def _rows(op: Op) -> Callable[[Any, Sequence[int], Any], OperationRows | None]:
    """Times and bytes of an operation: none if the costs have attention in its stage."""

    def rows(costs: Any, sites: Sequence[int], work: Any) -> OperationRows | None:
        return costs.attention_rows(op, sites, work) if hasattr(costs, "attention_rows") else None

    return rows


register(
    Operation(
        op=A,
        text="attention",
        colour="#E69F00",
        presence=Presence.COMPLETE_ALWAYS,
        together=_BOTH,
        sites=between_stages,
        needs=(Need(Op.F, 0, carries=INPUTS), Need(A, chunk=Of.PREVIOUS)),  # the latter's keys and values
        before=(Before(Op.F, Need(A, -1, carries=RESULT)),),
        rows=_rows(A),
    )
)
register(
    Operation(
        op=G,
        text="attention backward",
        colour="#6A3D9A",
        presence=Presence.COMPLETE,
        together=_BOTH,
        sites=between_stages,
        needs=(Need(A), Need(Op.B, 1, carries=RESULT_GRADIENT), Need(G, chunk=Of.FOLLOWING)),
        before=(Before(Op.B, Need(G, 0, carries=INPUTS_GRADIENT)),),
        rows=_rows(G),
    )
)
