"""Random plans that run, for the property tests of the plan language."""

import random
from dataclasses import replace

from hypothesis import strategies as st

from megatron_epp.plan import Action, Chunk, Op, Plan, Segment, Step
from megatron_epp.plan.operations import Track, operation
from megatron_epp.plan.relations import deps
from tests.support.plan.small_plans import plan_of


@st.composite
def sound_plans(draw: st.DrawFn, crossed: bool = False, min_time: int = 0, shared: bool = False) -> Plan:
    """Any plan that runs: random chunks, placement, order, split weight gradients, offloads and times.

    Args:
        crossed: let messages of one boundary overtake each other, which `check` refuses and `lower` can still order.
        shared: ranks may share links to the host.
    """
    rng = draw(st.randoms(use_true_random=False))
    chunks = _random_chunks(rng)
    ranks = rng.randint(1, 4)
    placement = tuple(rng.randrange(ranks) for _ in range(rng.randint(1, 5)))
    forward_only = rng.random() < 0.1
    actions = [Action(Op.F, s, c) for s in range(len(placement)) for c in range(len(chunks))]
    if not forward_only:
        moved = [a for a in actions if rng.random() < 0.2]
        split = [a for a in actions if rng.random() < 0.3]
        actions += [a._replace(op=Op.B) for a in actions]
        actions += [a._replace(op=op) for a in moved for op in (Op.O, Op.L)] + [a._replace(op=Op.W) for a in split]
    rows, copies, issued = _random_order(rng, actions, chunks, placement, ranks, crossed)
    shares = {a: rng.choice((0.3, 1.0)) for row in copies for a in row if a.op is Op.O}
    plan = plan_of(rows, chunks, placement, copies, shares, rng.randint(0, 9), forward_only=forward_only)

    def timed(table: tuple[tuple[Step, ...], ...]) -> tuple[tuple[Step, ...], ...]:
        return tuple(tuple(s._replace(time_us=float(rng.randint(min_time, 9))) for s in row) for row in table)

    copied = tuple(
        tuple(s._replace(time_us=float(rng.randint(min_time, 9)), after=issued[s.action]) for s in row) for row in plan.copies
    )
    links = tuple(rng.randrange(ranks) for _ in range(ranks)) if shared else ()
    return replace(plan, ranks=timed(plan.ranks), copies=copied, host_links=links)


def _random_chunks(rng: random.Random) -> tuple[Chunk, ...]:
    """Long sequences cut into slices, some with a short sequence next to; then short ones alone."""
    chunks: list[list[Segment]] = []
    sequence = 0
    for _ in range(rng.randint(0, 2)):
        cuts = sorted(rng.sample(range(1, 12), rng.randint(1, 3)))
        long, sequence = sequence, sequence + 1
        for start, end in zip([0, *cuts], [*cuts, 12], strict=True):
            chunks.append([Segment(long, start, end)])
            if rng.random() < 0.3:
                chunks[-1].append(Segment(sequence, 0, rng.randint(1, 4)))
                sequence += 1
    for _ in range(rng.randint(0 if chunks else 1, 3)):
        chunks.append([Segment(sequence, 0, rng.randint(1, 4))])
        sequence += 1
    rng.shuffle(chunks)
    return tuple(Chunk(tuple(segments)) for segments in chunks)


def _random_order(
    rng: random.Random, actions: list[Action], chunks: tuple[Chunk, ...], placement: tuple[int, ...], ranks: int, crossed: bool
) -> tuple[list[list[Action]], list[list[Action]], dict[Action, Action | None]]:
    """Compute rows, copies, and the compute action that each copy is issued after."""
    needs = deps(chunks, len(placement), [a for a in actions if operation(a.op).track is Track.COPY])
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    copies: list[list[Action]] = [[] for _ in range(ranks)]
    issued: dict[Action, Action | None] = {}
    chunk_order: dict[tuple[Op, int], list[int]] = {}
    left = dict.fromkeys(actions)
    while left:

        def may_run(action: Action) -> bool:
            if any(need in left for need in needs(action)):
                return False
            from_stage = action.stage + {Op.F: -1, Op.B: 1}.get(action.op, 0)
            sent = chunk_order.get((action.op, from_stage))
            if crossed or from_stage == action.stage or sent is None:
                return True
            return sent[len(chunk_order.get((action.op, action.stage), []))] == action.chunk

        action = rng.choice([a for a in left if may_run(a)])
        del left[action]
        chunk_order.setdefault((action.op, action.stage), []).append(action.chunk)
        rank = placement[action.stage]
        if operation(action.op).track is Track.COPY:
            issued[action] = rng.choice([None, *rows[rank]])
        (copies if operation(action.op).track is Track.COPY else rows)[rank].append(action)
    return rows, copies, issued
