"""Plans for the tests of the plan language, made by hand or at random, with numbers one can check with a pencil.

Times: F 10, B 20 (10 when a W is split off), W 10, R 10, O and L 5, messages 1. Bytes per stage: a chunk keeps 10 per token
from F to B; a long sequence keeps 5 per token of all its tokens (keys and values) from F to B of its first slice, and as much
again (their gradients) from B of its last slice to B of its first. With a W, 4 of the 10 wait for it. An offload moves its
share.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_epp.plan import NO_RECOMPUTE, Action, Chunk, Copy, Messages, Op, Plan, Prediction, Segment, Step
from megatron_epp.plan.grid import from_grid
from megatron_epp.plan.proof import check

BIG = 10**9
TIMES = {Op.F: 10.0, Op.B: 20.0, Op.W: 10.0, Op.R: 10.0, Op.O: 5.0, Op.L: 5.0}


def whole(*tokens: int) -> tuple[Chunk, ...]:
    return tuple(Chunk((Segment(i, 0, n),)) for i, n in enumerate(tokens))


def chunk(*segments: tuple[int, int, int]) -> Chunk:
    return Chunk(tuple(Segment(*segment) for segment in segments))


def make_plan(
    rows: Sequence[str],
    chunks: Sequence[Chunk],
    placement: Sequence[int] | None = None,
    copies: Sequence[str] = (),
    offload_share: float = 0.0,
    **rest: Any,
) -> Plan:
    """A plan from its rows, ``["0F0 0B0", "1F0 1B0"]``; stage i runs on rank i unless `placement` says otherwise.

    Args:
        rest: as `plan_of` takes it.
    """
    ranks = from_grid("\n".join(f"rank {i} | {row}" for i, row in enumerate(rows)))
    moved = from_grid("\n".join(f"copy {i} | {row}" for i, row in enumerate(copies)), block="copy")
    shares = {action: offload_share for row in moved for action in row if action.op is Op.O}
    return plan_of(ranks, tuple(chunks), tuple(range(len(rows)) if placement is None else placement), moved, shares, **rest)


def plan_of(
    ranks: Sequence[Sequence[Action]],
    chunks: tuple[Chunk, ...],
    placement: tuple[int, ...],
    copies: Sequence[Sequence[Action]] = (),
    shares: dict[Action, float] | None = None,
    message_us: float = 1.0,
    cap_bytes: int = BIG,
    static_bytes: int = 100,
    forward_only: bool = False,
) -> Plan:
    shares = shares or {}
    stages = len(placement)
    ends: dict[int, int] = {}
    for segment in (s for c in chunks for s in c.segments):
        ends[segment.sequence] = max(ends.get(segment.sequence, 0), segment.end)
    lengths = tuple(ends[i] for i in range(len(ends)))
    split = {action for row in ranks for action in row if action.op is Op.W}
    table = tuple(tuple(shares.get(Action(Op.O, s, c), 0.0) for c in range(len(chunks))) for s in range(stages))

    def step(action: Action) -> Step:
        op, stage, c = action
        slices = [part for part in (chunks[c].slice_of(lengths), chunks[c].begun_of(lengths)) if part is not None]
        opened = 5 * sum(lengths[part.sequence] for part in slices if part.start == 0)
        closed = 5 * sum(lengths[part.sequence] for part in slices if part.end == lengths[part.sequence])
        kept, of_w = 0 if forward_only else 10 * chunks[c].num_tokens, 4 * chunks[c].num_tokens
        has_w, away = action._replace(op=Op.W) in split, int(kept * table[stage][c])
        alloc, free = {
            Op.F: (kept + opened, closed * forward_only),
            Op.B: (closed, kept - of_w * has_w + 2 * opened),
            Op.W: (0, of_w),
            Op.O: (0, away),
            Op.L: (away, 0),
        }.get(op, (0, 0))
        return Step(action, TIMES[op] - 10.0 * (op is Op.B and has_w), alloc, free)

    message = ((message_us,) * len(chunks),) * (stages - 1)
    return Plan(
        lengths=lengths,
        chunks=chunks,
        num_layers=(4,) * stages,
        placement=placement,
        recompute=((NO_RECOMPUTE,) * len(chunks),) * stages,
        recompute_us=((0.0,) * len(chunks),) * stages,
        offload_share=table,
        ranks=tuple(tuple(map(step, row)) for row in ranks),
        copies=tuple(tuple(Copy(*step(action)[:4]) for action in row) for row in copies),
        messages=Messages(message, message),
        static_bytes=(static_bytes,) * len(ranks),
        cap_bytes=(cap_bytes,) * len(ranks),
        predicted=Prediction.none(len(ranks)),
        forward_only=forward_only,
    )


def with_rows(plan: Plan, *rows: str) -> Plan:
    """The same plan in another order; every action keeps its costs, one it did not have costs nothing."""
    known = {step.action: step for row in plan.ranks for step in row}
    grid = from_grid("\n".join(f"rank {i} | {row}" for i, row in enumerate(rows)))
    return replace(plan, ranks=tuple(tuple(known.get(a, Step(a, 1.0, 0, 0)) for a in row) for row in grid))


def with_step(plan: Plan, text: str, **changes: object) -> Plan:
    """The same plan with the costs of one action changed, wherever it stands."""

    def change(rows: tuple[tuple[Step, ...], ...]) -> tuple[tuple[Step, ...], ...]:
        return tuple(tuple(s._replace(**changes) if str(s.action) == text else s for s in row) for row in rows)  # type: ignore[arg-type]

    return replace(plan, ranks=change(plan.ranks), copies=change(plan.copies))


def one_f_one_b() -> Plan:
    return make_plan(["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], whole(4, 4, 2))


def sliced() -> Plan:
    """Sequence 0 in two slices, then sequence 1: the backward of slice 1 comes before that of slice 0."""
    chunks = chunk((0, 0, 5)), chunk((0, 5, 8)), chunk((1, 0, 4))
    return make_plan(["0F0 0F1 0F2 0B1 0B0 0B2", "1F0 1F1 1B1 1F2 1B0 1B2"], chunks)


def hybrid() -> Plan:
    """The tail of sequence 0 runs with two short sequences; so does a slice in the middle, which is allowed."""
    chunks = chunk((0, 0, 6)), chunk((0, 6, 9), (1, 0, 2)), chunk((0, 9, 11), (2, 0, 1), (3, 0, 3))
    return make_plan(["0F0 0F1 0F2 0B2 0B1 0B0", "1F0 1F1 1F2 1B2 1B1 1B0"], chunks)


def looped() -> Plan:
    """Four stages on two ranks, twice around."""
    rows = ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]
    return make_plan(rows, whole(3, 3), placement=(0, 1, 0, 1))


def v_shape() -> Plan:
    """Four stages on two ranks, there and back, with the weight gradient split off: stages 1 and 2 exchange no messages."""
    rows = ["0F0 0F1 3F0 3B0 3F1 3B1 3W0 0B0 3W1 0B1 0W0 0W1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 2W0 1W0 2W1 1W1"]
    return make_plan(rows, whole(3, 3), placement=(0, 1, 1, 0))


def offload() -> Plan:
    """Half of what stage 0 keeps of chunk 0 leaves the device and returns while others compute."""
    rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]
    return make_plan(rows, whole(4, 4, 2), copies=["0O0 0L0", ""], offload_share=0.5)


def shared_link() -> Plan:
    """Both ranks copy over one link: rank 1 waits its turn, and the two directions do not mind each other."""
    rows, copies = ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], ["0O0 0L0 0O1 0L1", "1O0 1L0 1O1 1L1"]
    plan = make_plan(rows, whole(4, 4), copies=copies, offload_share=0.5)
    return replace(with_step(with_step(plan, "0O1", time_us=8.0), "1L0", time_us=8.0), host_links=(0, 0))


def evaluation() -> Plan:
    chunks = chunk((0, 0, 5)), chunk((0, 5, 8)), chunk((1, 0, 4))
    return make_plan(["0F0 0F1 0F2", "1F0 1F1 1F2"], chunks, forward_only=True)


def two_by_two() -> Plan:
    return make_plan(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], whole(2, 2))


EXAMPLES = {f.__name__: f for f in (one_f_one_b, sliced, hybrid, looped, v_shape, offload, shared_link, evaluation)}


def faults(plan: Plan) -> list[str]:
    return [str(fault) for fault in check(plan)]


def only_fault(plan: Plan) -> str:
    (found,) = faults(plan)
    return found
