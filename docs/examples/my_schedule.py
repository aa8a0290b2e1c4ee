"""A schedule of one's own: GPipe over slices. All forwards run, then all backwards."""

from megatron_epp.cost import Costs
from megatron_epp.plan import Action, Chunk, Op, Segment, check, save, simulate, to_grid
from megatron_epp.planner import PLANNERS, UNLIMITED_BYTES, Decisions, Options, Problem, plan
from megatron_epp.tools.formulas import H100, analytic_costs
from megatron_epp.tools.formulas.library import load_flags, shape_of
from megatron_epp.tools.report.gantt import save_gantt


def gpipe(problem: Problem, costs: Costs, options: Options) -> Decisions:
    size = options.chunk_tokens or 4096 * problem.token_multiple
    slices = [(q, start, min(start + size, n)) for q, n in enumerate(problem.lengths) for start in range(0, n, size)]
    chunks = tuple(Chunk((Segment(*segment),)) for segment in slices)  # one slice each: nothing is packed
    stages, table = range(problem.num_stages), range(len(chunks))
    forward = [[Action(Op.F, stage, c) for c in table] for stage in stages]
    backward = [[Action(Op.B, stage, c) for c in reversed(table)] for stage in stages]
    order = tuple((*f, *([] if problem.forward_only else b)) for f, b in zip(forward, backward, strict=True))
    return Decisions(chunks, order, recompute_steps=[[0] * len(chunks) for _ in stages])  # nothing recomputes


PLANNERS["my_gpipe"] = gpipe

if __name__ == "__main__":
    costs = analytic_costs(shape_of(load_flags("llama3-8b")), H100, [8, 8, 8, 8])
    batch = Problem(lengths=(9000, 700, 5200, 88), placement=(0, 1, 2, 3), cap_bytes=(UNLIMITED_BYTES,) * 4)
    gpipe_plan = plan(batch, costs, Options(planner="my_gpipe"))  # proven: `plan` raises where `check` finds a fault
    timeline = simulate(gpipe_plan)
    print(to_grid(gpipe_plan), end="")
    print(f"{len(check(gpipe_plan))} violations, {timeline.makespan_us / 1e3:.1f} ms, bubble {timeline.bubble_fraction:.1%}")
    save(gpipe_plan, "gpipe.json")
    save_gantt(gpipe_plan, "gpipe.png")
