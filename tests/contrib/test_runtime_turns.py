"""Two actions of a step take turns at the exchanges of their layers, and give what they give one after the other."""

import contextlib
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_epp.contrib.overlap import turns
from megatron_epp.contrib.overlap.turns import Collective, exchanges_of, run_together
from megatron_epp.plan import Action, check
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.executor import Executor, RunError
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part, whole_run
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
    """Hands over in the middle of every pass."""

    def forward(self, context, hidden):
        output = super().forward(context, hidden)
        turns.hand_over()
        self.calls.append(f"F{context.chunk} ends")
        return output

    def backward(self, context, output, grad, keep_weights):
        super().backward(context, output, grad, keep_weights)
        turns.hand_over()
        self.calls.append(f"B{context.chunk} ends")


def executor_of(plan, exchanges, kind=PausingStage):
    stage = kind(build_part(plan.num_layers, 0), batch_of(plan))
    return Executor(plan, 0, {0: stage}, run_pair=exchanges and partial(run_together, exchanges=exchanges)), stage


def run(plan, exchanges, kind=PausingStage):
    executor, stage = executor_of(plan, exchanges, kind)
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
        executor, _ = executor_of(with_steps(pair), no_exchange)
        executor.run()
        num_turns.append(executor.num_turns)
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

    class CountingStage(PlainStage):
        def forward(self, context, hidden):
            for number in range(3):
                calls.append(f"F{context.chunk}.{number}")
                turns.hand_over()
            return super().forward(context, hidden)

        def weight(self, chunk):
            calls.append(f"W{chunk} with {len(self.weights._deferred[chunk])} layers")
            super().weight(chunk)
            calls.append(f"W{chunk} ends")

    run(with_steps(("0W0", "0F2")), no_exchange, CountingStage)
    begin = next(at for at, call in enumerate(calls) if call.startswith("W0 with"))
    assert calls[begin + 1] == "F2.0"
    assert calls.index("W0 ends") > calls.index("F2.2")


def test_a_failing_action_of_a_step_is_named_like_any_other():
    class FaultyStage(PausingStage):
        def backward(self, context, output, grad, keep_weights):
            raise ValueError("no such word")

    with pytest.raises(RunError, match="step 1, action 0F1 failed: ValueError: no such word"):
        run(with_steps(*PAIRS), no_exchange, FaultyStage)


def test_what_the_second_of_two_forwards_saves_is_counted():
    def peak(exchanges):
        executor, stage = executor_of(with_steps(("0F0", "0F1")), exchanges)
        with SavedTensors(stage.part.parameters(), lambda: stage.kv_cache.num_bytes) as saved:
            executor.run()
        assert saved.live_bytes == 0
        return saved.peak_bytes

    assert peak(no_exchange) == peak(None) > 0
