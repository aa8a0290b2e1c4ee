"""Plans made by hand for the tests of reports, small enough to check with pencil and paper."""

from dataclasses import replace

from megatron_epp.plan.action import Action, Op
from megatron_epp.plan.chunk import Chunk, Segment
from megatron_epp.plan.document import digest
from megatron_epp.plan.measured import Event, Measured
from megatron_epp.plan.plan import Copy, Plan, Prediction, Step
from megatron_epp.plan.recompute import Recompute
from megatron_epp.plan.simulation import simulate
from tests.support.plan.small_plans import plan_of

LAYERS = 4


def sliced_plan(num_ranks: int = 2, slices: int = 2, batched: int = 2, recompute: int = 1, tokens: int = 1000) -> Plan:
    """1F1B over the slices of sequence 0 and then `batched` chunks of two sequences each; the last slice is hybrid.

    A token takes 1 us forward and 2 us backward per stage, and 1024 bytes; `recompute` of 4 layers run their forward again.
    """
    segments = [[Segment(0, s * tokens, (s + 1) * tokens)] for s in range(slices)]
    segments[-1].append(Segment(1, 0, tokens // 2))
    segments += [[Segment(2 + 2 * b, 0, tokens // 2), Segment(3 + 2 * b, 0, tokens // 2)] for b in range(batched)]
    chunks = tuple(Chunk(tuple(s)) for s in segments)
    backward_order = [*reversed(range(slices)), *range(slices, len(chunks))]
    ranks = []
    for rank in range(num_ranks):
        warm = min(num_ranks - rank - 1 + slices, len(chunks))
        forward = [_step(Op.F, rank, c, chunks, 1.0) for c in range(len(chunks))]
        order = forward[:warm]
        for i, c in enumerate(backward_order):
            order += [_step(Op.B, rank, c, chunks, 2.0 + recompute / LAYERS), *forward[warm + i : warm + i + 1]]
        ranks.append(tuple(order))
    rows = [[step.action for step in row] for row in ranks]
    plan = plan_of(rows, chunks, tuple(range(num_ranks)), message_us=10.0, cap_bytes=2**24, static_bytes=2**20)
    modes = ((Recompute(recompute),) * len(chunks),) * num_ranks
    times_us = (tuple(chunk.num_tokens * recompute / LAYERS for chunk in chunks),) * num_ranks
    return predicted(replace(plan, recompute=modes, recompute_us=times_us, ranks=tuple(ranks)))


def predicted(plan: Plan) -> Plan:
    """The plan with the simulator's numbers, and the busiest rank's time as its lower bound."""
    timeline = simulate(plan)
    bound = max(timeline.busy_us)
    return replace(plan, predicted=Prediction(timeline.makespan_us, bound, timeline.peak_bytes, timeline.bubble_fraction))


def _step(op: Op, stage: int, chunk: int, chunks: tuple[Chunk, ...], us: float) -> Step:
    tokens = chunks[chunk].num_tokens
    return Step(Action(op, stage, chunk), tokens * us, *((1024 * tokens, 0) if op is Op.F else (0, 1024 * tokens)))


def with_offload(plan: Plan, chunk: int) -> Plan:
    """The plan, with all of a chunk's bytes on rank 0 offloaded after its forward and loaded before its backward."""
    num_bytes = 1024 * plan.chunks[chunk].num_tokens
    copies = (Copy(Action(Op.O, 0, chunk), 50.0, 0, num_bytes), Copy(Action(Op.L, 0, chunk), 50.0, num_bytes, 0))
    return predicted(replace(plan, copies=(copies, *((),) * (plan.num_ranks - 1))))


def measured_run(plan: Plan, slowdown: float = 1.25) -> Measured:
    """A run of the plan in which every compute action took `slowdown` times what was planned."""
    slow = replace(plan, ranks=tuple(tuple(s._replace(time_us=s.time_us * slowdown) for s in steps) for steps in plan.ranks))
    timeline = simulate(slow)
    rows = zip(plan.ranks, timeline.start_us, timeline.end_us, strict=True)
    events = (tuple(Event(step.action, *times) for step, *times in zip(*row, strict=True)) for row in rows)
    return Measured(digest(plan), tuple(events))


def v_shaped_plan() -> Plan:
    """The forward of one chunk through four stages on two ranks: down the ranks and up again."""
    steps = [Step(Action(Op.F, stage, 0), 100.0, 0, 0) for stage in range(4)]
    ranks, sizes = ((steps[0], steps[3]), (steps[1], steps[2])), {"static_bytes": (2**20,) * 2, "cap_bytes": (2**24,) * 2}
    predicted = Prediction(420.0, 400.0, (2**20,) * 2, 0.5)
    base = sliced_plan(num_ranks=4, slices=1, batched=0)
    return replace(base, placement=(0, 1, 1, 0), ranks=ranks, forward_only=True, predicted=predicted, **sizes)
