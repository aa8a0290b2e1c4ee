"""Costs learnt from measured iterations reproduce the times and bytes that they were learnt from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.cost import CPU, LinearTime, ModelShape, analytic_profile
from megatron_epp.cost.learning import RECORDED, WARM_UP, Learner, deviation, fitted_costs, size_of, with_static
from megatron_epp.cost.memory import Static
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Op, Segment
from tests.support.plan.small_plans import one_f_one_b

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=128)
FORMULAS = analytic_profile(SHAPE, CPU).costs((2, 2))
FORWARD = {0: LinearTime(100.0, 2.0, 0.01), 1: LinearTime(50.0, 1.0, 0.0)}
BACKWARD = {0: LinearTime(200.0, 4.0, 0.02), 1: LinearTime(80.0, 3.0, 0.01)}
WEIGHT = {0: LinearTime(10.0, 1.0, 0.0), 1: LinearTime(20.0, 0.5, 0.0)}
LENGTHS = (64, 500, 1000, 3000)


def plan_of_sizes():
    segments = [Chunk((Segment(number, 0, length),)) for number, length in enumerate(LENGTHS)]
    table = ((NO_RECOMPUTE,) * len(LENGTHS),) * 2
    return replace(one_f_one_b(), lengths=LENGTHS, chunks=tuple(segments), recompute=table)


def events(plan, stage, scale=1.0, split=False):
    """Events of an iteration that took `scale` times as long as `FORWARD`, `BACKWARD` and, if split, `WEIGHT` say."""
    found, now = [], 0.0
    for op, lines in ((Op.F, FORWARD), (Op.B, BACKWARD), (Op.W, WEIGHT))[: 3 if split else 2]:
        for chunk in range(len(LENGTHS)):
            took = scale * lines[stage].time_us(*size_of(plan, chunk))
            found.append((f"{stage}{op}{chunk}", now, now + took, None))
            now += took
    return tuple(found)


def learnt(scales=(1.0,) * RECORDED, kept_per_token=0, split=False):
    """Learners of both ranks."""
    plan, found = plan_of_sizes(), []
    for rank in (0, 1):
        learner = Learner()
        for _ in range(WARM_UP):
            assert not learner.is_recording
            learner.add(plan, (), {})
        for scale in scales:
            assert learner.is_recording
            kept = {
                (op, rank, chunk): kept_per_token * size_of(plan, chunk)[0] // (1 if op is Op.F else 4)
                for op in (Op.F, Op.W)[: 2 if split else 1]
                for chunk in range(len(LENGTHS))
            }
            learner.add(plan, events(plan, rank, scale, split), kept if kept_per_token else {}, 7, 0.75 - rank / 4)
        assert not learner.is_recording
        found.append(learner.learnt)
    return fitted_costs(FORMULAS, found)


@pytest.mark.parametrize("stage", [0, 1])
def test_times_are_those_that_were_measured(stage):
    costs = learnt()
    for tokens, pairs in ((64, 2080), (700, 245_350), (3000, 4_501_500)):
        assert costs.stages[stage].line("forward").time_us(tokens, pairs) == pytest.approx(
            FORWARD[stage].time_us(tokens, pairs)
        )
        assert costs.stages[stage].line("backward").time_us(tokens, pairs) == pytest.approx(
            BACKWARD[stage].time_us(tokens, pairs)
        )


@pytest.mark.parametrize("stage", [0, 1])
def test_weight_gradients_of_their_own_are_a_part_of_the_backward(stage):
    costs = learnt(kept_per_token=20_000, split=True)
    both = costs.stages[stage]
    for tokens, pairs in ((64, 2080), (3000, 4_501_500)):
        weight_us = WEIGHT[stage].time_us(tokens, pairs)
        assert both.line("weight").time_us(tokens, pairs) == pytest.approx(weight_us)
        assert both.line("backward").time_us(tokens, pairs) == pytest.approx(BACKWARD[stage].time_us(tokens, pairs) + weight_us)
    assert both.layers.weight_bytes_per_token * both.num_layers == pytest.approx(5_000)
    assert costs.splits_weight
    assert not learnt().splits_weight


def test_times_of_spans_are_those_of_as_many_tokens():
    plan, more = plan_of_sizes(), [0, 2000, 100, 700]

    def slower(rank):
        """Events in which spans take the first rank's passes as long as more tokens."""
        for text, start_us, end_us, _ in events(plan, rank):
            line, chunk = (FORWARD if text[1] == "F" else BACKWARD)[rank], int(text[2:])
            yield text, start_us, end_us + line.per_token_us * more[chunk] * (rank == 0), None

    learners = [Learner() for _ in range(2)]
    for rank, learner in enumerate(learners):
        for number in range(WARM_UP + RECORDED):
            learner.add(plan, tuple(slower(rank)) if number >= WARM_UP else (), {}, span_tokens=more.__getitem__)
    costs = fitted_costs(FORMULAS, [learner.learnt for learner in learners])
    for stage in (0, 1):
        assert costs.stages[stage].line("forward").time_us(700, 245_350) == pytest.approx(FORWARD[stage].time_us(700, 245_350))


def test_the_least_share_of_any_rank_can_be_offloaded():
    assert learnt().offloadable_share == 0.5


def test_one_slow_iteration_does_not_count():
    assert learnt((1.0, 9.0, 1.0)).stages[0].line("forward").time_us(64, 2080) == pytest.approx(FORWARD[0].time_us(64, 2080))


def test_bytes_are_those_that_were_measured():
    for stage in learnt(kept_per_token=20_000).stages:
        assert stage.layers.bytes_per_token * stage.num_layers + stage.ends_bytes_per_token == pytest.approx(20_000)
    assert learnt().stages[0].layers.bytes_per_token == FORMULAS.stages[0].layers.bytes_per_token


def test_a_layer_that_recomputes_keeps_its_input_as_by_formula():
    (stage, _) = learnt(kept_per_token=20_000).stages
    assert stage.layers.input_bytes_per_token == FORMULAS.stages[0].layers.input_bytes_per_token
    assert learnt(kept_per_token=1).stages[0].layers.bytes_per_token == stage.layers.input_bytes_per_token


def test_equal_measurements_give_equal_costs():
    assert learnt() == learnt()


def test_the_error_of_formulas_is_told_as_a_ratio():
    def slower(stage):
        for name in ("forward", "backward"):
            stage = stage.with_lines(name, *(line.scaled(2) for line in stage.lines(name)))
        return stage

    twice = replace(FORMULAS, stages=tuple(map(slower, FORMULAS.stages)))
    found = deviation(FORMULAS, twice, [(64, 2080), (3000, 4_501_500)])
    assert found[:3] == pytest.approx((2.0, 2.0, 2.0))
    assert found[3:] == (None, None)
    assert str(found) == "2.00 of the time by formulas (stages 2.00 to 2.00)"


def test_static_bytes_are_changed_by_stage():
    costs = with_static(
        with_static(learnt(), lambda stage, _: Static(weights=5 * stage)), lambda _, held: replace(held, buffers=2)
    )
    assert [stage.static_bytes for stage in costs.stages] == [2, 7]
