"""Plans for the tests of the runtime: by the real planner, and by hand where the planner has no such plan."""

from dataclasses import replace

from megatron_epp import planner
from megatron_epp.plan import Copy, KVOffload, Op, Prediction, Recompute, Step
from megatron_epp.plan.kv_offload import slices_of
from megatron_epp.plan.proof import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem
from megatron_epp.planner.result import plan_or_refuse
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from tests.support.plan.small_plans import chunk, make_plan


def planned(lengths, num_layers, token_multiple=1, forward_only=False, placement=None, borrowed=(), **options):
    """Plan a batch for stages of `num_layers` layers, one on each rank if not placed otherwise."""
    shape = ModelShape(num_layers=sum(num_layers), hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
    placement = tuple(range(len(num_layers))) if placement is None else placement
    problem = Problem(tuple(lengths), placement, (UNLIMITED_BYTES,) * (max(placement) + 1), token_multiple, forward_only)
    if borrowed:  # also where it does not pay
        return plan_or_refuse(
            (replace(problem, borrowed=borrowed),), analytic_costs(shape, CPU, num_layers), Options(**options)
        )[0]
    return planner.plan(problem, analytic_costs(shape, CPU, num_layers), Options(**options))


def by_hand(rows, chunks, placement=None, recompute_layers=0, num_layers=2, forward_only=False, token_multiple=1):
    """A plan from its rows, ``["0F0 0B0", "1F0 1B0"]``, and chunks of ``(sequence, start, end)``, without costs."""
    table = [chunk(*segments) for segments in chunks]
    plan = make_plan(rows, table, placement, message_us=0.0, cap_bytes=1, static_bytes=0, forward_only=forward_only)
    plan = replace(
        plan,
        num_layers=(num_layers,) * plan.num_stages,
        recompute=((Recompute(recompute_layers),) * len(table),) * plan.num_stages,
        ranks=tuple(tuple(Step(step.action, 1.0, 0, 0) for step in row) for row in plan.ranks),
        token_multiple=token_multiple,
    )
    assert check(plan) == []
    return plan


SLICED_THEN_WHOLE = ([(0, 0, 9)], [(0, 9, 14), (1, 0, 3)], [(2, 0, 6)])
"""Two slices, the second with a short sequence next to it, and a sequence of its own."""


def offloading(plan, share):
    """The plan with that share of every chunk copied away and back; it predicts nothing."""
    copy_of = {Op.F: Op.O, Op.B: Op.L}
    rows = [[a._replace(op=copy_of[a.op]) for a in plan.actions(r) if a.op in copy_of] for r in range(plan.num_ranks)]
    copies = tuple(tuple(Copy(action, 0.5, 0, 0) for action in row) for row in rows)
    shares = ((share,) * len(plan.chunks),) * plan.num_stages
    plan = replace(plan, copies=copies, offload_share=shares, predicted=Prediction.none(plan.num_ranks))
    assert check(plan) == []
    return plan


def offloading_kv(plan, stages=None):
    """The plan with keys and values of all slices in host memory, of all stages or some."""
    stages = range(plan.num_stages) if stages is None else stages
    plan = replace(plan, kv_offload=tuple(KVOffload(stage, sequence, 0, 0) for stage in stages for sequence in slices_of(plan)))
    assert check(plan) == []
    return plan


def one_rank(**changes):
    return by_hand(["0F0 0F1 0F2 0B1 0B0 0B2"], SLICED_THEN_WHOLE, **changes)


def one_rank_split(**changes):
    return by_hand(["0F0 0F1 0F2 0B1 0B0 0W1 0B2 0W0"], SLICED_THEN_WHOLE, **changes)


def one_rank_two_stages(**changes):
    return by_hand(["0F0 1F0 0F1 1F1 1B1 0B1 0F2 1F2 1B2 1B0 0B0 0B2"], SLICED_THEN_WHOLE, placement=(0, 0), **changes)


def two_ranks(**changes):
    return by_hand(["0F0 0F1 0F2 0B1 0B0 0B2", "1F0 1F1 1B1 1B0 1F2 1B2"], SLICED_THEN_WHOLE, **changes)


def two_ranks_split(**changes):
    rows = ["0F0 0F1 0F2 0B1 0W1 0B0 0B2 0W0 0W2", "1F0 1F1 1B1 1B0 1F2 1B2 1W1 1W2 1W0"]
    return by_hand(rows, SLICED_THEN_WHOLE, **changes)


def v_shape(**changes):
    """Four stages on two ranks, there and back: stages 1 and 2 share a rank, and so do stages 0 and 3."""
    rows = ["0F0 0F1 0F2 3F0 3F1 3B1 3B0 3F2 3B2 0B1 0B0 0B2", "1F0 2F0 1F1 2F1 1F2 2F2 2B1 1B1 2B0 1B0 2B2 1B2"]
    return by_hand(rows, SLICED_THEN_WHOLE, placement=(0, 1, 1, 0), **changes)


def v_shape_split(**changes):
    rows = [
        "0F0 0F1 0F2 3F0 3F1 3B1 3B0 3F2 3B2 0B1 0B0 3W1 0B2 0W1 3W0 3W2 0W0",
        "1F0 2F0 1F1 2F1 1F2 2F2 2B1 1B1 2W1 2B0 1B0 2B2 2W0 1B2 1W1 1W0 1W2 2W2",
    ]
    return by_hand(rows, SLICED_THEN_WHOLE, placement=(0, 1, 1, 0), **changes)


def looped(**changes):
    """Four stages on two ranks, twice around: two boundaries share each link."""
    rows = ["0F0 0F1 0F2 2F0 2F1 2F2 2B1 2B0 2B2 0B1 0B0 0B2", "1F0 1F1 1F2 3F0 3F1 3B1 3B0 3F2 3B2 1B1 1B0 1B2"]
    return by_hand(rows, SLICED_THEN_WHOLE, placement=(0, 1, 0, 1), **changes)
