"""Several plans for the same batch in one table."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulate import simulate
from megatron_epp.report import facts
from megatron_epp.report.boxes import COMPUTE, measured_boxes, planned_boxes
from megatron_epp.report.measured import Measured
from megatron_epp.report.table import format_bytes, format_cap, format_us, table


def comparison(plans: Sequence[tuple[str, Plan | None]]) -> str:
    """Table with one line per plan: makespan, ratio to the shortest, bubble, highest peak and its cap, recompute, chunks.

    Args:
        plans: name and plan, in the order to print; None if there is no plan, which the line states. Recompute is the share
            of all ranks' compute time.
    """
    if not plans:
        return "no plans to compare"
    header = ("plan", "makespan", "x best", "bubble", "peak", "cap", "recompute", "chunks")
    best_us = min((plan.predicted.makespan_us for _, plan in plans if plan is not None), default=0.0)
    rows = []
    for name, plan in plans:
        if plan is None:
            rows.append([name, "no plan", *["-"] * (len(header) - 2)])
            continue
        predicted = plan.predicted
        peak, cap = max(zip(predicted.peak_bytes, plan.cap_bytes, strict=True))
        ratio = predicted.makespan_us / best_us if best_us else 1.0
        figures = [format_us(predicted.makespan_us), f"{ratio:.3f}", f"{predicted.bubble_fraction:.1%}"]
        memory = [format_bytes(peak), format_cap(cap), f"{facts.recompute_share(plan):.1%}"]
        rows.append([name, *figures, *memory, str(len(plan.chunks))])
    return "\n".join(table(header, rows))


def against(plan: Plan, measured: Measured) -> str:
    """Table that compares a plan with a run of it: makespan, bubble, and compute time of each operation over all ranks.

    Raises:
        PlanError: the measurement is of another plan, or the order deadlocks.
    """
    timeline = simulate(plan)
    totals: list[dict[str, float]] = []
    for boxes in (planned_boxes(timeline), measured_boxes(plan, measured)):
        total: dict[str, float] = {}
        for box in boxes:
            if box.stream == COMPUTE:
                total[box.action.op] = total.get(box.action.op, 0.0) + box.end_us - box.start_us
        totals.append(total)
    times = [("makespan", timeline.makespan_us, measured.makespan_us)]
    times += [(f"all {op}", totals[0][op], totals[1].get(op, 0.0)) for op in totals[0]]
    rows = [[name, format_us(a), format_us(b), f"{b / a:.3f}" if a else ""] for name, a, b in times]
    rows.insert(1, ["bubble", f"{timeline.bubble_fraction:.1%}", f"{measured.bubble_fraction:.1%}", ""])
    return "\n".join(table(("", "planned", "measured", "ratio"), rows))
