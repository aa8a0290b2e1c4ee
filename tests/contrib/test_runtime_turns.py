"""Two actions of a step take turns at the exchanges of their layers: when, their results, time, bytes, and what is refused."""

import contextlib
import logging
import threading
from argparse import Namespace
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings

from megatron_epp.contrib.overlap import exchanges, turns
from megatron_epp.contrib.overlap.joined import Passing, joined_us
from megatron_epp.contrib.overlap.turns import Collective, PairRunner, StepsOfTwo, Turns, exchanges_of, run_together
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.work import LinearTime
from megatron_epp.features.slow_stages.stage_watch import ITERATIONS, SlowStages
from megatron_epp.features.split_weights.deferred_gradients import handlers
from megatron_epp.plan import Action, Op, PlanError, Step
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.other_planners import plan_of_decisions
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.executor import HANDLERS, RunError
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.tools.formulas import H100, analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_flags, shape_of
from scripts.bench.orders.unit import TOKENS, Unit
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.plain_stage import NotedGradients, PlainStage, batch_of, build_part, whole_run
from tests.support.runtime.rank_processes import Ranks
from tests.support.runtime.runtime_plans import by_hand

LAYERS = 3


class Reduced(torch.autograd.Function):
    """Sum over the ranks in the forward, and in the backward too, which waits for it later."""

    @staticmethod
    def forward(ctx, x, group, launched):
        ctx.group, ctx.launched = group, launched
        total = x.clone()
        launched.append("forward")
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        ctx.launched.append("backward")
        dist.all_reduce(total, group=ctx.group, async_op=True).wait()
        return total, None, None


def layers(x, group, launched):
    for number in range(LAYERS):
        x = Reduced.apply(torch.tanh(x * (number + 1)), group, launched)
    return x


def forward_with_backward(rank, links, together):
    """Return the order of launches, the forward's result and the backward's gradient, together or one after the other."""
    group, launched, outputs = dist.new_group([0, 1]), [], []
    kept = torch.linspace(-1.0, 1.0, 5).mul(rank + 1).requires_grad_()
    output = layers(kept, group, launched)
    launched.clear()

    def forward():
        outputs.append(layers(torch.full((4,), 0.3 + rank), group, launched))

    def backward():
        output.backward(torch.ones_like(output))

    if together:
        original = dist.all_reduce
        run_together(forward, backward, exchanges_of([Collective(dist, "all_reduce")], group))
        assert dist.all_reduce is original
    else:
        forward()
        backward()
    assert threading.current_thread() is threading.main_thread()
    return launched, outputs[0].tolist(), kept.grad.tolist()


WHOLE = ([(0, 0, 5)], [(1, 0, 3)], [(2, 0, 6)])


def no_exchange(_):
    """Exchanges of a model that has none: its actions hand over by themselves."""
    return contextlib.nullcontext()


def with_steps(*pairs):
    """A plan of one stage in which some neighbouring actions run in one step."""
    plan = by_hand(["0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2"], WHOLE)
    seconds = {second: first for first, second in pairs}
    row = [step for step in plan.ranks[0] if str(step.action) not in seconds]
    joined = {first: Action.parse(second) for second, first in seconds.items()}
    row = [step._replace(also=(joined[str(step.action)],)) if str(step.action) in joined else step for step in row]
    made = replace(plan, ranks=(tuple(row),))
    assert check(made) == []
    return made


class PausingStage(PlainStage):
    def forward(self, context, hidden):
        output = super().forward(context, hidden)
        turns.hand_over()
        self.calls.append(f"F{context.chunk} ends")
        return output

    def backward(self, context, output, grad):
        super().backward(context, output, grad)
        turns.hand_over()
        self.calls.append(f"B{context.chunk} ends")


def executor_with(plan, exchanges, kind=PausingStage):
    stage = kind(build_part(plan.num_layers, 0), batch_of(plan))
    own = handlers(plan, {0: stage})
    steps = StepsOfTwo(plan, 0, partial(run_together, exchanges=exchanges), {**HANDLERS, **own})
    return executor_of(plan, 0, {0: stage}, handlers=own | (steps.handlers() if exchanges else {})), stage, steps


def run(plan, exchanges, kind=PausingStage):
    executor, stage, _ = executor_with(plan, exchanges, kind)
    executor.run()
    return stage


def test_parts_of_two_actions_alternate_and_the_first_begins():
    said = []

    def counting(name, count):
        def body():
            for number in range(count):
                said.append(f"{name}{number}")
                turns.hand_over()

        return body

    run_together(counting("a", 4), counting("b", 2), no_exchange)
    assert said == ["a0", "b0", "a1", "b1", "a2", "a3"]
    turns.hand_over()  # outside a step there is no one to hand over to


def test_second_actions_of_all_steps_run_in_one_thread():
    threads = []
    for _ in range(3):
        run_together(lambda: threads.append(threading.get_ident()), lambda: threads.append(threading.get_ident()), no_exchange)
    assert set(threads[::2]) == {threading.get_ident()}
    (second,) = set(threads[1::2])
    assert second != threading.get_ident()


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_fails_the_other_ends_at_its_next_exchange_and_the_failure_is_raised(failing):
    reached = []

    def fails():
        turns.hand_over()
        raise ValueError("no such word")

    def goes_on():
        turns.hand_over()
        turns.hand_over()
        turns.hand_over()
        reached.append("end")

    both = (fails, goes_on) if failing == 0 else (goes_on, fails)
    with pytest.raises(ValueError, match="no such word"):
        run_together(*both, no_exchange)
    assert reached == []


def test_exchanges_of_two_ranks_alternate_between_the_actions_and_change_no_result(tmp_path):
    with Ranks(2, tmp_path) as ranks:
        together, alone = (ranks.run(forward_with_backward, each) for each in (True, False))
    for (launched, *results), (launched_alone, *results_alone) in zip(together, alone, strict=True):
        assert launched == ["forward", "backward"] * LAYERS
        assert launched_alone == ["forward"] * LAYERS + ["backward"] * LAYERS
        assert results == results_alone


PAIRS = (("0F1", "0B0"), ("0F2", "0B1"))


def test_the_two_actions_of_a_step_take_turns_where_the_model_has_exchanges():
    joined = with_steps(*PAIRS)
    calls = [call for call in run(joined, no_exchange).calls if call not in ("last", "reduce")]
    assert calls[2:6] == ["F1", "B0", "F1 ends", "B0 ends"]
    assert run(joined, None).calls[2:6] == ["F1", "F1 ends", "B0", "B0 ends"]


def test_two_backwards_of_a_step_run_one_after_the_other():
    """Autograd has one thread for a device, so the second would wait for the first, which waits for its turn."""
    num_turns = []
    for pair in (("0W0", "0F2"), ("0W1", "0B2")):
        executor, _, steps = executor_with(with_steps(pair), no_exchange)
        executor.run()
        num_turns.append(steps.num_turns)
    assert num_turns[0] > num_turns[1] == 0


@pytest.mark.parametrize("pairs", [PAIRS, (("0F0", "0F1"),), (("0W0", "0F2"),)], ids=["F B", "F F", "W F"])
def test_gradients_are_those_of_whole_sequences(pairs):
    plan = with_steps(*pairs)
    stage = run(plan, no_exchange)
    loss, (expected,) = whole_run(plan, plan.num_layers)
    assert stage.loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in stage.gradients().items():
        assert relative_difference(gradient, expected[name]) < 1e-4, name


def test_a_weight_gradient_hands_over_between_two_layers():
    calls = []

    class CountingGradients(NotedGradients):
        def run(self, chunk):
            calls.append(f"W{chunk} with {len(self._deferred[chunk])} layers")
            super().run(chunk)
            calls.append(f"W{chunk} ends")

    class CountingStage(PlainStage):
        gradients_kind = CountingGradients

        def forward(self, context, hidden):
            for number in range(3):
                calls.append(f"F{context.chunk}.{number}")
                turns.hand_over()
            return super().forward(context, hidden)

    run(with_steps(("0W0", "0F2")), no_exchange, CountingStage)
    begin = next(at for at, call in enumerate(calls) if call.startswith("W0 with"))
    assert calls[begin + 1] == "F2.0"
    assert calls.index("W0 ends") > calls.index("F2.2")


def test_a_failing_action_of_a_step_is_named_like_any_other():
    class FaultyStage(PausingStage):
        def backward(self, context, output, grad):
            raise ValueError("no such word")

    with pytest.raises(RunError, match="step 1, action 0F1 failed: ValueError: no such word"):
        run(with_steps(*PAIRS), no_exchange, FaultyStage)


def test_what_the_second_of_two_forwards_saves_is_counted():
    def peak(exchanges):
        executor, stage, _ = executor_with(with_steps(("0F0", "0F1")), exchanges)
        with SavedTensors(stage.part.parameters(), lambda: stage.kv_cache.num_bytes) as saved:
            executor.run()
        assert saved.live_bytes == 0
        return saved.peak_bytes

    assert peak(no_exchange) == peak(None) > 0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Passing(10.0, 0.0), Passing(7.0, 0.0), 17.0),  # nothing is exchanged
        (Passing(10.0, 4.0), Passing(7.0, 2.0), 11.0),  # every exchange is behind the other's compute
        (Passing(10.0, 4.0), Passing(3.0, 0.0), 10.0),  # a second of exchange is left
        (Passing(10.0, 8.0), Passing(10.0, 8.0), 16.0),  # the exchanges take longest
        (Passing(10.0, 12.0), Passing(7.0, 0.0), 10.0),  # no action takes less than nothing
    ],
)
def test_the_exchange_of_each_is_behind_the_compute_of_the_other(one: Passing, other: Passing, expected: float):
    assert joined_us(one, other) == joined_us(other, one) == expected


def exchanging_plan(options: Options):
    shape = shape_of(load_flags("llama3-8b") | {"tensor_model_parallel_size": 8})
    costs = on_device(analytic_profile(shape, H100).costs([4] * 8, state_bytes_per_parameter=7.5))
    lengths = (30000, 28000, 9000, 5000, 3000, 2000) * 3
    problem = Problem(lengths, Placement("v", 4, 2).rank_of, (UNLIMITED_BYTES,) * 4)
    return plan(problem, costs, replace(options, planner="stp")), costs


def steps_of(**changes: float) -> dict[str, Step]:
    """The steps of two actions of a small plan by their kinds, with unit costs and these fields of a stage's, per token."""
    unit = Unit("stp", 4, 11)
    exchange, working = LinearTime(0.0, changes.get("exchange", 0.0)), changes.get("working", 0.0)
    stages = tuple(stage.changed(LAYER, exchange=exchange, working_bytes_per_token=working) for stage in unit.costs.stages)
    made = build_plan(unit.problem, replace(unit.costs, stages=stages), Options(), unit.of_paper())
    split = {(stage, chunk) for row in made.ranks for step in row for op, stage, chunk in step.actions if op is Op.W}
    joined = [step for row in made.ranks for step in row if step.also]
    return {"".join(a.op + "*" * (a.op is Op.B and a[1:] in split) for a in step.actions): step for step in joined}


def test_a_step_takes_as_long_as_both_actions_less_the_exchange_that_is_hidden():
    """F takes half a unit on a stage, B and W as much, and a token's exchange a tenth of a unit."""
    plain, exchanging = steps_of(), steps_of(exchange=0.1)
    taken = {kind: (plain[kind].time_us - exchanging[kind].time_us) / TOKENS for kind in plain}
    assert taken == pytest.approx({"FF": 0.2, "FB": 0.2, "FB*": 0.2, "FW": 0.1})
    assert {kind: step.time_us / TOKENS for kind, step in plain.items()} == {"FF": 1.0, "FB": 1.5, "FB*": 1.0, "FW": 1.0}


def test_a_step_needs_the_working_memory_of_both_actions():
    plain, working = steps_of(), steps_of(working=0.5)
    for kind, step in working.items():
        assert step.alloc_bytes - plain[kind].alloc_bytes == step.free_bytes - plain[kind].free_bytes == TOKENS / 2


@pytest.mark.parametrize("options", [Options(), Options(split_weight=True), Options(recompute=2)])
def test_bytes_by_item_add_up_to_those_of_the_steps(options: Options):
    made, costs = exchanging_plan(options)
    breakdown = memory_breakdown(made, costs)
    for step in (step for row in made.ranks for step in row):
        assert sum(breakdown.takes[step.action].values()) == step.alloc_bytes
        assert sum(breakdown.gives[step.action].values()) == step.free_bytes


def decisions():
    unit = Unit("stp", 2, 5)
    return unit, unit.of_paper()


def test_pairs_that_are_not_neighbours_or_share_an_action_are_refused():
    unit, made = decisions()
    strange = (Action(Op.F, 0, 0), Action(Op.B, 0, 4))
    with pytest.raises(PlanError, match="joined has 0F0 and 0B4, which no rank runs one after the other"):
        plan_of_decisions(unit.problem, unit.costs, Options(), replace(made, joined=frozenset({strange})))
    row = made.order[0]
    with pytest.raises(PlanError, match=f"joined has {row[1]} in two pairs"):
        plan_of_decisions(unit.problem, unit.costs, Options(), replace(made, joined=frozenset({row[:2], row[1:3]})))


def test_actions_that_take_turns_last_longer_and_make_no_stage_slow():
    made = Unit("stp", 2, 5).plan()
    alone, slow = ((step.action, step.time_us) for step in made.ranks[0] if not step.also), SlowStages()
    times = [*alone, *((action, 9 * step.time_us) for step in made.ranks[0] if step.also for action in step.actions)]
    for _ in range(ITERATIONS):
        slow.add(made, 0, times)
    assert slow.slow == {}
    for _ in range(ITERATIONS):
        slow.add(made, 0, [(action, 2 * time_us) for action, time_us in times])
    assert slow.slow == {0: 2.0, 3: 2.0}


ARGUMENTS = {
    "tensor_model_parallel_size": 2, "num_experts": None, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "tp_comm_overlap": False, "timing_log_level": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def shared_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges._say.cache_clear()
    monkeypatch.setattr(exchanges.mpu, "get_tensor_model_parallel_group", lambda: "group")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


def found(name: str = "stp", **changes: Any) -> PairRunner | None:
    run = Namespace(rank=0, args=Namespace(**(ARGUMENTS | changes)))
    with exchanges.Overlap(run).running(Unit(name, 2, 5).plan(), None, None, {}) as handlers:
        return next((handler.__self__._run_pair for handler in handlers.values()), None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensor_model_parallel_size": 1}, "no exchange"),
        ({"num_experts": 4}, "layers with experts"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1"),
        ({"attention_dropout": 0.2}, "--attention-dropout 0.2"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"timing_log_level": 2}, "--timing-log-level 2"),
        ({"nvtx_ranges": True}, "--nvtx-ranges"),
    ],
)
def test_where_two_actions_cannot_take_turns_the_reason_is_logged_once(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert [found(**changes), found(**changes)] == [None, None]
    (record,) = caplog.records
    assert "run one after the other" in record.message
    assert reason in record.message


def test_plans_without_steps_of_two_actions_have_nothing_to_take_turns_at(caplog: pytest.LogCaptureFixture) -> None:
    assert found("zb-v") is None
    assert caplog.records == []


def test_torch_and_megatron_are_as_they_were_after_a_step() -> None:
    runner, before = found(), (dist.all_reduce, mappings.dist_all_gather_func)
    assert isinstance(runner, partial)
    with runner.keywords["exchanges"](Turns()):
        assert dist.all_reduce is not before[0]
        assert mappings.dist_all_gather_func is not before[1]
        with get_cuda_rng_tracker().fork("no such state"):
            pass
    assert (dist.all_reduce, mappings.dist_all_gather_func) == before
    assert "fork" not in vars(get_cuda_rng_tracker())
