"""A kind of action is added in one file: planned, checked, simulated, lowered, proven, drawn, and run over gloo."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from megatron_epp import planner
from megatron_epp.plan import Action, Copy, Op, PlanError, operations
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.operations import At, Before, Collective, Need, Operation, OperationRows, Presence
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, Options, Problem
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.evaluate import makespan_us as planned_makespan_us
from megatron_epp.planner.tables import tabulate
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from tests.support.plan.added import unregister
from tests.support.plan.queue_machine import makespan_us, stuck
from tests.support.runtime.rank_processes import Ranks

K, SPREAD, SUM = Op.define("K"), Op.define("SPREAD_K"), Op.define("SUM_K")
TIME_US, SPREAD_US, SUM_US, NUM_BYTES = 40.0, 15.0, 25.0, 4096


def rows(costs, sites, work):
    """For planners: every shard takes the same time, and its buffer is gone when it ends."""
    chunks = len(work.tokens)
    times_us, sizes = ([[each] * chunks for _ in sites] for each in (TIME_US, NUM_BYTES))
    return OperationRows(times_us, sizes, sizes, {SPREAD: [SPREAD_US] * chunks, SUM: [SUM_US] * chunks})


@contextmanager
def defined():
    needs = (Need(Op.F, At.LAST, carries=Collective(SPREAD)),)
    before = (Before(Op.B, Need(K, At.EVERY, only=At.LAST, carries=Collective(SUM))),)
    named = {"op": K, "text": "loss shard", "colour": "#123456", "presence": Presence.COMPLETE, "sites": operations.of_ranks}
    yield operations.register(Operation(**named, needs=needs, before=before, rows=rows))
    unregister(K, SPREAD, SUM)


class Shards:
    """The handler: what each rank adds to a chunk's loss, and the sums that all ranks then have."""

    def __init__(self, rank, root):
        self.rank, self.root, self.values, self.sums = rank, root, {}, {}

    def handlers(self):
        return {K: self.run, SPREAD: self.spread, SUM: self.add}

    def spread(self, executor, action):
        self.values[action.chunk] = torch.tensor([100.0 * action.chunk if self.rank == self.root else -1.0])
        dist.broadcast(self.values[action.chunk], self.root)

    def run(self, executor, action):
        with executor.recorder.action(action):
            self.values[action.chunk] += self.rank + 1

    def add(self, executor, action):
        dist.all_reduce(self.values[action.chunk])
        self.sums[action.chunk] = float(self.values[action.chunk])


def run_plan(rank, links, placement):
    """Run a plan with the operation on this rank; the sums, and the gradient sums of its stages."""
    from megatron_epp.contrib.demos.emulate import EmulatedRank, WaitingStage
    from megatron_epp.runtime.lowered import executor_of

    with defined():
        plan = with_shards([1] * len(placement), placement)
        shards = Shards(rank, plan.placement[-1])
        shared = EmulatedRank(plan, rank, 1.0)
        stages = {stage: WaitingStage(stage, shared) for stage, on in enumerate(plan.placement) if on == rank}
        executor_of(plan, rank, stages, links, handlers=shards.handlers()).run()
        return shards.sums, [text for text, _, _ in shared.events]


LENGTHS = (900, 500, 200, 120, 60)


def costs_of(num_layers):
    shape = ModelShape(num_layers=sum(num_layers), hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
    return analytic_costs(shape, CPU, num_layers)


def with_shards(num_layers, placement=None):
    """A greedy plan's order with a shard on every rank ahead of the chunk's first backward there."""
    costs, where = costs_of(num_layers), placement or tuple(range(len(num_layers)))
    problem = Problem(LENGTHS, where, (UNLIMITED_BYTES,) * (max(where) + 1))
    options = Options(slices=3)
    plan = planner.plan(problem, costs, options)
    order = []
    for rank in range(plan.num_ranks):
        row, done = [], set()
        for action in plan.actions(rank):
            if action.op is Op.B and action.chunk not in done:
                done.add(action.chunk)
                row.append(Action(K, rank, action.chunk))
            row.append(action)
        order.append(tuple(row))
    layers = [[0] * len(plan.chunks) for _ in num_layers]
    return build_plan(problem, costs, options, Decisions(plan.chunks, tuple(order), layers))


@pytest.fixture
def plan():
    with defined():
        yield with_shards([1, 1, 1])


def test_planners_time_it_as_the_simulator_does_and_the_plan_is_sound(plan):
    assert check(plan) == []
    line = simulate(plan)
    tables = tabulate(plan.chunks, Problem(LENGTHS, plan.placement, plan.cap_bytes), costs_of([1, 1, 1]))
    order = [plan.actions(rank) for rank in range(plan.num_ranks)]
    assert planned_makespan_us(order, tables, [[0] * len(plan.chunks)] * 3) == line.makespan_us
    actions = [step.action for row in plan.ranks for step in row]
    starts, ends = (dict(zip(actions, chain(*rows), strict=True)) for rows in (line.start_us, line.end_us))
    for chunk in range(len(plan.chunks)):
        shards = [Action(K, rank, chunk) for rank in range(plan.num_ranks)]
        assert min(starts[shard] for shard in shards) >= ends[Action(Op.F, 2, chunk)] + SPREAD_US
        assert starts[Action(Op.B, 2, chunk)] >= max(ends[shard] for shard in shards) + SUM_US
        assert all(ends[shard] - starts[shard] == pytest.approx(TIME_US) for shard in shards)


def test_lowering_puts_each_collective_once_on_every_rank_and_the_proof_holds(plan):
    rows = lower(plan)
    for rank, row in enumerate(rows):
        for op in (SPREAD, SUM):
            assert [a.chunk for a in row if a.op is op] == [a.chunk for a in rows[0] if a.op is op]
            assert sorted(a.chunk for a in row if a.op is op) == list(range(len(plan.chunks)))
            assert {a.stage for a in row if a.op is op} == {rank}
    assert blocked([rows]) == []
    for queues in (1, 8):
        assert stuck(to_json(plan), to_grid(rows), queues, waits=0.1) == []
    assert makespan_us(to_json(plan), to_grid(rows), queues=32) >= plan.predicted.makespan_us * (1 - 1e-9)


@pytest.mark.parametrize("op", [SPREAD, SUM])
def test_a_collective_that_one_rank_never_launches_is_found_by_both(plan, op):
    rows = [list(row) for row in lower(plan)]
    rows[1].remove(next(action for action in rows[1] if action.op is op))
    assert blocked([rows]) != []
    assert stuck(to_json(plan), to_grid(rows)) != []


def test_on_one_rank_a_collective_has_no_partner_to_wait_for():
    with defined():
        alone = with_shards([3])
        assert (check(alone), stuck(to_json(alone), to_grid(lower(alone)))) == ([], [])


def test_a_copy_behind_an_operation_without_a_definition_is_reported(plan):
    after = plan.ranks[0][0].action._replace(op=Op.define("NEVER_DEFINED"))
    copies = ((Copy(Action(Op.O, 0, 0), 1.0, 0, 1, after),), (), ())
    assert any("is issued after" in str(fault) for fault in check(replace(plan, copies=copies)))


@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 1, 0)])
def test_its_handler_runs_over_gloo(placement, tmp_path):
    ranks = max(placement) + 1
    with Ranks(ranks, tmp_path) as running:
        results = running.run(run_plan, placement)
    expected = {chunk: ranks * 100.0 * chunk + sum(range(1, ranks + 1)) for chunk in results[0][0]}
    assert len(expected) > 3
    for sums, events in results:
        assert sums == expected
        assert sum("B" in text for text in events) >= len(expected)


def test_a_runtime_without_its_handler_refuses_the_plan(plan):
    from megatron_epp.runtime.executor import RunError
    from megatron_epp.runtime.lowered import executor_of

    with pytest.raises(RunError, match="this runtime has no handler for the plan's K, SPREAD_K, SUM_K actions"):
        executor_of(plan, 0, {0: None}, links=object())


def test_an_operation_that_is_not_in_the_table_is_reported():
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse("2NN11")
    with defined():
        text = to_json(with_shards([1, 1, 1]))
    plan = from_json(text)  # the name is known, its meaning is not
    assert "operation K has no definition" in str(check(plan)[0])
    with pytest.raises(PlanError, match="K has no definition"):
        simulate(plan)
