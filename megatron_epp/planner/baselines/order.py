"""1F1B over slices with one window throughout, as Seq1F1B runs it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan import Action, Op
from megatron_epp.planner.orders.warm_up import Order


def seq1f1b_order(groups: Sequence[Sequence[int]], num_stages: int, forward_only: bool = False) -> Order:
    """Seq1F1B's order: ``num_stages - rank - 2 + n`` warm-up forwards, then one forward, one backward, then what is left.

    With one chunk per group this is 1F1B. Most chunks alive on a rank: ``num_stages - rank - 1 + n``.

    Args:
        groups: for each sequence, its chunks in token order; n is the most chunks of any. Batched chunks stand alone.
        num_stages: of the pipeline, one per rank.
        forward_only: leave the backwards out.

    Returns:
        The actions of every rank: forwards group by group, ascending in it; backwards group by group, descending in it.
    """
    forward = [c for group in groups for c in group]
    backward = [c for group in groups for c in reversed(group)]
    window = max(map(len, groups))
    orders = []
    for stage in range(num_stages):
        actions: list[Action] = []
        run = len(forward) if forward_only else min(len(forward), num_stages - stage - 2 + window)
        actions += (Action(Op.F, stage, c) for c in forward[:run])
        for done, c in enumerate(() if forward_only else backward):
            if run + done < len(forward):
                actions.append(Action(Op.F, stage, forward[run + done]))
            actions.append(Action(Op.B, stage, c))
        orders.append(tuple(actions))
    return tuple(orders)
