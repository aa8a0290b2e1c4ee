"""The breakdown of a plan's memory: its items are the bytes that the planner, `check` and `simulate` count, and no others."""

import random
from dataclasses import replace

import pytest

from megatron_epp.cost import memory as item
from megatron_epp.cost.blocks import StageCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, ModeCosts
from megatron_epp.plan import Op, Plan, Prediction, Step
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.message_slots import message_peaks
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.tools.formulas import on_device
from tests.support.plan.campaign import faults_of_breakdown
from tests.support.plan.planner_cases import problem
from tests.support.plan.stages import stage_of


def random_costs(draw: random.Random, stages: int) -> PipelineCosts:
    def stage(last: bool) -> StageCosts:
        layer, extra, kv = draw.uniform(20, 90), draw.uniform(0, 20), draw.uniform(0, 9)
        return stage_of(
            num_layers=draw.randint(1, 4),
            forward=LinearTime(1.0, draw.random()),
            backward=LinearTime(1.0, 2 * draw.random() + 0.5),
            weight=LinearTime(0.0, 0.2),
            layer_bytes_per_token=layer,
            attended_bytes_per_token=draw.choice([None, draw.uniform(kv, layer)]),
            recomputed_layer_bytes_per_token=draw.uniform(1, 9),
            recompute={
                "selective": ModeCosts(LinearTime(0.5, draw.random()), draw.uniform(9, layer)),
                "mlp": ModeCosts(
                    LinearTime(0.3, draw.random()),
                    mlp := draw.uniform(kv, layer),
                    draw.choice([None, draw.uniform(mlp, layer)]),
                ),
            },
            extra_bytes_per_token=extra,
            head_bytes_per_token=extra / 2 if last else 0.0,
            kv_bytes_per_token=kv,
            kv_gradient_bytes_per_token=draw.choice([None, 2 * kv]),
            weight_bytes_per_token=draw.uniform(0, 90),
            static=Static(weights=draw.randint(0, 99), gradients=draw.randint(0, 99), optimizer=draw.randint(0, 99)),
            workspace_bytes=draw.randint(0, 999) if last else 0,
        )

    made = [stage(s == stages - 1) for s in range(stages)]
    bare = PipelineCosts("random", tuple(made), draw.uniform(1, 9), 1.0, 0.01, 1.0, 0.005)
    share, buffers = draw.choice([0.0, 0.07]), [draw.randint(0, 99)] * stages
    return replace(on_device(bare, share, buffers=buffers), exchange_bytes_per_token=1.5 * (stages % 2))


def steps(made: Plan):
    return [step for _, rows in made.tables for row in rows for step in row]


def recomputed_ahead(made: Plan, share: float) -> Plan:
    """The plan with an action of its own for every recompute, ahead of its backward, which takes a share of its bytes."""

    def parts(step: Step) -> list[Step]:
        op, stage, c = step.action
        if op is not Op.B or not made.recompute[stage][c].num_layers:
            return [step]
        taken, took_us = int(share * step.alloc_bytes), made.recompute_us[stage][c]
        rest = step._replace(time_us=step.time_us - took_us, alloc_bytes=step.alloc_bytes - taken)
        return [Step(step.action._replace(op=Op.R), took_us, taken, 0), rest]

    rows = tuple(tuple(part for step in row for part in parts(step)) for row in made.ranks)
    return replace(made, ranks=rows, predicted=Prediction.none(made.num_ranks))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_recompute_of_its_own_has_what_it_made_until_the_backward_is_done(share: float):
    costs = random_costs(random.Random(6), 2)
    made = recomputed_ahead(plan(problem((900, 60, 300), 2), costs, Options(recompute=1)), share)
    assert check(made) == []
    again = [step.action for step in steps(made) if step.action.op is Op.R]
    assert again
    assert list(faults_of_breakdown(made, costs)) == []
    takes = memory_breakdown(made, costs).takes
    assert all(set(takes[action]) == {item.RECOMPUTED} for action in again)


def test_static_bytes_are_their_items():
    static = Static.of(1000.5, 6 + 12 / 8)
    assert (static.weights, static.gradients, static.optimizer) == (2001, 4002, 1500)
    assert (static.num_bytes, Static.of(10, 3.0)) == (int(1000.5 * 7.5), Static(weights=20, gradients=10))


def test_what_fragments_is_a_share_of_what_comes_and_goes():
    costs = on_device(random_costs(random.Random(1), 2), 0.25)
    moment = memory_breakdown(plan(problem((300, 20), 2), costs), costs).peak(0)
    passing = {name: size for name, size in moment.items.items() if name in item.DYNAMIC}
    assert passing[item.FRAGMENTATION] == pytest.approx(sum(passing.values()) / 5, abs=10)


def test_ranks_need_room_for_the_layer_that_runs_and_for_messages_in_flight():
    """In 1F1B the first rank has up to two payloads of 50 and 7 tokens, 2 bytes each, before a gradient of 50 is received."""
    stage = stage_of(
        num_layers=1, forward=LinearTime(), backward=LinearTime(), layer_bytes_per_token=10, recomputed_layer_bytes_per_token=1,
        kv_bytes_per_token=0,
    )  # fmt: skip
    bare = PipelineCosts("three", (stage,) * 3, hidden_bytes_per_token=2.0)
    made = plan(problem((7, 50, 3), 3), on_device(bare, 0.0), Options(planner="1f1b"))
    assert made.message_bytes == message_peaks(made, lower(made))
    assert made.static_bytes == tuple(50 * 10 + size for size in made.message_bytes)
    assert plan(problem((7, 50, 3), 3), bare, Options(planner="1f1b")).static_bytes == (0, 0, 0)


def by_hand(recompute: int) -> tuple[int, dict[str, int]]:
    """Ten tokens in two slices, on one stage of three layers: tokens of the last slice, and what its backward takes."""
    stage = stage_of(
        num_layers=3,
        forward=LinearTime(10.0, 1.0),
        backward=LinearTime(20.0, 2.0),
        layer_bytes_per_token=100.0,
        recomputed_layer_bytes_per_token=8.0,
        extra_bytes_per_token=5.0,
        head_bytes_per_token=2.0,
        kv_bytes_per_token=16.0,
    )
    costs = PipelineCosts("by hand", (stage,), hidden_bytes_per_token=4.0)
    made = plan(problem((10,), 1), costs, Options(slices=2, recompute=recompute))
    backward = next(step.action for step in made.ranks[0] if step.action.op is Op.B)
    takes = memory_breakdown(made, costs).takes[backward]
    return made.chunks[backward.chunk].num_tokens, {name: size for name, size in takes.items() if size}


def test_a_backward_that_recomputes_holds_most_at_its_last_layer_and_others_at_their_first_where_the_head_has_given_way():
    tokens, takes = by_hand(recompute=3)
    assert takes == {
        item.CACHE_GRADIENT: 3 * 16 * 10,
        item.RECOMPUTED: tokens * (100 - 16 - 8),
        item.RECOMPUTE_MODE_ITEMS["full"]: -tokens * 2 * 8,
        item.HEAD: -tokens * 2,
    }
    tokens, takes = by_hand(recompute=0)
    assert takes == {item.CACHE_GRADIENT: 16 * 10, item.HEAD: -tokens * 2}
