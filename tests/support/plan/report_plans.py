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
        forward, backward = [_forward(rank, c, chunks) for c in range(len(chunks))], []
        backward = [_backward(rank, c, chunks, recompute) for c in backward_order]
        order = forward[:warm]
        for i, step in enumerate(backward):
            order += [step, *forward[warm + i : warm + i + 1]]
        ranks.append(tuple(order))
    rows = [[step.action for step in row] for row in ranks]
    plan = plan_of(rows, chunks, tuple(range(num_ranks)), message_us=10.0, cap_bytes=2**24, static_bytes=2**20)
    plan = replace(
        plan,
        recompute=((Recompute(recompute),) * len(chunks),) * num_ranks,
        recompute_us=(tuple(chunk.num_tokens * recompute / LAYERS for chunk in chunks),) * num_ranks,
        ranks=tuple(ranks),
    )
    return predicted(plan)


def predicted(plan: Plan) -> Plan:
    """The plan with the simulator's numbers, and the busiest rank's time as its lower bound."""
    timeline = simulate(plan)
    bound = max(timeline.busy_us)
    return replace(plan, predicted=Prediction(timeline.makespan_us, bound, timeline.peak_bytes, timeline.bubble_fraction))


def _forward(stage: int, chunk: int, chunks: tuple[Chunk, ...]) -> Step:
    tokens = chunks[chunk].num_tokens
    return Step(Action(Op.F, stage, chunk), float(tokens), 1024 * tokens, 0)


def _backward(stage: int, chunk: int, chunks: tuple[Chunk, ...], recompute: int) -> Step:
    tokens = chunks[chunk].num_tokens
    return Step(Action(Op.B, stage, chunk), tokens * (2.0 + recompute / LAYERS), 0, 1024 * tokens)


def with_offload(plan: Plan, chunk: int) -> Plan:
    """The plan, with all of a chunk's bytes on rank 0 offloaded after its forward and loaded before its backward."""
    num_bytes = 1024 * plan.chunks[chunk].num_tokens
    copies = (Copy(Action(Op.O, 0, chunk), 50.0, 0, num_bytes), Copy(Action(Op.L, 0, chunk), 50.0, num_bytes, 0))
    return predicted(replace(plan, copies=(copies, *((),) * (plan.num_ranks - 1))))


def measured_run(plan: Plan, slowdown: float = 1.25) -> Measured:
    """A run of the plan in which every compute action took `slowdown` times what was planned."""
    slow = replace(plan, ranks=tuple(tuple(s._replace(time_us=s.time_us * slowdown) for s in steps) for steps in plan.ranks))
    timeline = simulate(slow)
    events = [
        tuple(
            Event(step.action, *times)
            for step, *times in zip(steps, timeline.start_us[rank], timeline.end_us[rank], strict=True)
        )
        for rank, steps in enumerate(plan.ranks)
    ]
    return Measured(digest(plan), tuple(events))


def v_shaped_plan() -> Plan:
    """The forward of one chunk through four stages on two ranks: down the ranks and up again."""
    base = sliced_plan(num_ranks=4, slices=1, batched=0)
    steps = [Step(Action(Op.F, stage, 0), 100.0, 0, 0) for stage in range(4)]
    return replace(
        base,
        placement=(0, 1, 1, 0),
        ranks=((steps[0], steps[3]), (steps[1], steps[2])),
        static_bytes=(2**20,) * 2,
        cap_bytes=(2**24,) * 2,
        forward_only=True,
        predicted=Prediction(420.0, 400.0, (2**20,) * 2, 0.5),
    )
