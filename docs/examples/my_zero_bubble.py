"""A schedule of one's own with weight gradients as actions (W), under a memory cap: `fitted` chooses what recomputes."""

from collections import deque
from collections.abc import Iterator, Sequence

from megatron_epp.cost import Costs
from megatron_epp.plan import Action, Op, check, to_grid
from megatron_epp.planner import PLANNERS, Decisions, Options, Problem, chunks_of, elastic_1f1b, plan
from megatron_epp.planner.fitted import fitted
from megatron_epp.tools.formulas import H100, analytic_costs
from megatron_epp.tools.formulas.library import load_flags, shape_of


def zero_bubble(problem: Problem, costs: Costs, options: Options) -> Decisions:
    chunks = chunks_of(problem, costs, options, 2 * problem.num_ranks)  # sliced and packed by time
    order = elastic_1f1b(chunks, problem.num_stages, problem.forward_only)
    split = tuple(tuple(with_weights(row, waiting=rank)) for rank, row in enumerate(order))
    return fitted(split, chunks, problem, costs, options)


def with_weights(row: Sequence[Action], waiting: int) -> Iterator[Action]:
    """Put each weight gradient behind the backwards of the next `waiting` chunks; last ranks have time at the end."""
    left: deque[Action] = deque()
    for action in row:
        yield action
        if action.op is Op.B:
            left.append(Action(Op.W, action.stage, action.chunk))
            if len(left) > waiting:
                yield left.popleft()
    yield from left


PLANNERS["zero_bubble"] = zero_bubble

if __name__ == "__main__":
    costs = analytic_costs(shape_of(load_flags("llama3-8b")), H100, [8, 8, 8, 8])
    batch = Problem(lengths=(9000, 700, 5200, 88), placement=(0, 1, 2, 3), cap_bytes=(54 << 30,) * 4)
    zero_bubble_plan = plan(batch, costs, Options(planner="zero_bubble"))
    print(to_grid(zero_bubble_plan), end="")
    layers = [sum(map(sum, row)) for row in zero_bubble_plan.recompute]  # by stage, of all its chunks
    print(f"{len(check(zero_bubble_plan))} violations; layers that recompute: {layers}")
