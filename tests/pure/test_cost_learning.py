"""Measured iterations: costs learnt from them have their times and bytes, and few sizes scale formulas."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from megatron_epp.cost.blocks import HEAD, INPUT, StageCosts
from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.cost.memory import Static
from megatron_epp.cost.whole_microbatches import of_whole_microbatches, with_static
from megatron_epp.cost.work import LinearTime, causal_pairs
from megatron_epp.features.learnt_costs.learner import Learner, deviation, fitted_costs, size_of
from megatron_epp.features.learnt_costs.timed import Timed, fitted_line, undetermined
from megatron_epp.plan import NO_RECOMPUTE, Chunk, Op, Plan, Recompute, Segment
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_profile
from tests.support.plan.small_plans import one_f_one_b

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=128)
FORMULAS = analytic_profile(SHAPE, CPU).costs((2, 2))
FORWARD = {0: LinearTime(100.0, 2.0, 0.01), 1: LinearTime(50.0, 1.0, 0.0)}
BACKWARD = {0: LinearTime(200.0, 4.0, 0.02), 1: LinearTime(80.0, 3.0, 0.01)}
WEIGHT = {0: LinearTime(10.0, 1.0, 0.0), 1: LinearTime(20.0, 0.5, 0.0)}
SIZES = (64, 500, 1000, 3000)


def plan_of(sizes: tuple[int, ...] = SIZES, recompute: Recompute = NO_RECOMPUTE) -> Plan:
    chunks = tuple(Chunk((Segment(number, 0, length),)) for number, length in enumerate(sizes))
    rows = ((recompute,) * len(sizes),) * 2
    return replace(one_f_one_b(), lengths=sizes, chunks=chunks, recompute=rows)


def events(plan, stage, scale=1.0, split=False):
    """Events of an iteration that took `scale` times as long as `FORWARD`, `BACKWARD` and, if split, `WEIGHT` say."""
    found, now = [], 0.0
    for op, lines in ((Op.F, FORWARD), (Op.B, BACKWARD), (Op.W, WEIGHT))[: 3 if split else 2]:
        for chunk in range(len(SIZES)):
            took = scale * lines[stage].time_us(*size_of(plan, chunk))
            found.append((f"{stage}{op}{chunk}", now, now + took, None))
            now += took
    return tuple(found)


def warm_learner(plan):
    learner = Learner()
    for _ in range(WARM_UP):
        learner.add(plan, (), {})
    return learner


def learnt(scales=(1.0,) * RECORDED, kept_per_token=0, split=False):
    plan, found = plan_of(), []
    for rank in (0, 1):
        learner = warm_learner(plan)
        for scale in scales:
            kept = {
                (op, rank, chunk): kept_per_token * size_of(plan, chunk)[0] // (1 if op is Op.F else 4)
                for op in (Op.F, Op.W)[: 2 if split else 1]
                for chunk in range(len(SIZES))
            }
            learner.add(plan, events(plan, rank, scale, split), kept if kept_per_token else {}, 7, 0.75 - rank / 4)
        found.append(learner.learnt)
    return fitted_costs(FORMULAS, found)


SOME = ((64, 2080), (700, 245_350), (3000, 4_501_500))


def same(found: LinearTime, expected: LinearTime) -> bool:
    return all(found.time_us(*size) == pytest.approx(expected.time_us(*size)) for size in SOME)


@pytest.mark.parametrize("stage", [0, 1])
def test_times_are_those_that_were_measured(stage):
    own = learnt().stages[stage]
    assert same(own.line("forward"), FORWARD[stage])
    assert same(own.line("backward"), BACKWARD[stage])


@pytest.mark.parametrize("stage", [0, 1])
def test_weight_gradients_of_their_own_are_a_part_of_the_backward(stage):
    costs = learnt(kept_per_token=20_000, split=True)
    own = costs.stages[stage]
    assert same(own.line("weight"), WEIGHT[stage])
    assert same(own.line("backward"), BACKWARD[stage] + WEIGHT[stage])
    assert own.layers.weight_bytes_per_token * own.num_layers == pytest.approx(5_000)
    assert costs.splits_weight
    assert not learnt().splits_weight


def test_times_of_spans_are_those_of_as_many_tokens():
    plan, more = plan_of(), [0, 2000, 100, 700]

    def slower(rank):
        """Events in which spans take the first rank's passes as long as more tokens."""
        for text, start_us, end_us, _ in events(plan, rank):
            line, chunk = (FORWARD if text[1] == "F" else BACKWARD)[rank], int(text[2:])
            yield text, start_us, end_us + line.per_token_us * more[chunk] * (rank == 0), None

    learners = [warm_learner(plan) for _ in range(2)]
    for rank, learner in enumerate(learners):
        for _ in range(RECORDED):
            learner.add(plan, tuple(slower(rank)), {}, span_tokens=more.__getitem__)
    costs = fitted_costs(FORMULAS, [learner.learnt for learner in learners])
    for stage in (0, 1):
        assert same(costs.stages[stage].line("forward"), FORWARD[stage])


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


def test_the_error_of_formulas_is_told_as_a_ratio():
    def slower(stage):
        for name in ("forward", "backward"):
            stage = stage.with_lines(name, *(line.scaled(2) for line in stage.lines(name)))
        return stage

    found = deviation(FORMULAS, replace(FORMULAS, stages=tuple(map(slower, FORMULAS.stages))), SOME)
    assert found[:3] == pytest.approx((2.0, 2.0, 2.0))
    assert (found[3:], str(found)) == ((None, None), "2.00 of the time by formulas (stages 2.00 to 2.00)")


def test_static_bytes_are_changed_by_stage():
    costs = with_static(learnt(), lambda stage, _: Static(weights=5 * stage))
    costs = with_static(costs, lambda _, held: replace(held, buffers=2))
    assert [stage.static_bytes for stage in costs.stages] == [2, 7]


LAYER = LinearTime(20.0, 2.0, 0.01)
OF_LAYERS, OF_BACKWARDS = LAYER.scaled(2), LinearTime(200.0, 9.0, 0.05)


def learner_of(plan: Plan, again_us: LinearTime = LinearTime()) -> Learner:  # noqa: B008 - frozen
    learner, lines = warm_learner(plan), (("F", OF_LAYERS), ("B", OF_BACKWARDS + again_us))
    sizes = [size_of(plan, chunk) for chunk in range(len(plan.chunks))]
    events = [(f"0{op}{chunk}", 0.0, line.time_us(*size), None) for chunk, size in enumerate(sizes) for op, line in lines]
    for _ in range(RECORDED):
        learner.add(plan, events, {})
    return learner


def first_stage(learner: Learner) -> StageCosts:
    formulas = replace(FORMULAS, stages=(only_layers(FORMULAS.stages[0]), FORMULAS.stages[1]))
    return fitted_costs(formulas, [learner.learnt], keeps_weights=True).stages[0]


def only_layers(stage: StageCosts) -> StageCosts:
    return stage.changed(INPUT, HEAD, forward=LinearTime(), backward=LinearTime(), weight=LinearTime())


def test_a_backward_is_learnt_without_the_forward_that_layers_run_again() -> None:
    stage = first_stage(learner_of(plan_of(recompute=Recompute(full=1)), again_us=LAYER))
    assert same(stage.line("forward"), OF_LAYERS)
    assert same(stage.line("backward"), OF_BACKWARDS)
    assert same(stage.layers.forward, LAYER)


def test_other_recompute_modes_change_as_the_forward_does() -> None:
    before, stage = FORMULAS.stages[0].layers.recompute, first_stage(learner_of(plan_of()))
    factors = {name: mode.again.per_token_us / before[name].again.per_token_us for name, mode in stage.layers.recompute.items()}
    assert factors
    assert len({round(factor, 9) for factor in factors.values()}) == 1
    assert factors.popitem()[1] != pytest.approx(1.0, rel=0.1)
    assert of_whole_microbatches(FORMULAS).stages[0].layers.recompute == {}


def test_weight_gradients_that_were_not_split_keep_their_share_of_the_backward() -> None:
    before, after = FORMULAS.stages[0], first_stage(learner_of(plan_of()))
    assert after.line("weight").per_token_us > 0
    assert after.layers.weight == after.layers.weight.within(after.layers.backward)
    assert after.line("weight").per_token_us != pytest.approx(before.line("weight").per_token_us, rel=0.1)


@pytest.mark.parametrize("sizes", [(700,), (700, 900), (700, 800, 900, 1000, 1100)])
def test_nearly_equal_sizes_scale_the_formulas(sizes: tuple[int, ...]) -> None:
    before, stage = only_layers(FORMULAS.stages[0]).layers.forward, first_stage(learner_of(plan_of(sizes)))
    after, size = stage.layers.forward, size_of(plan_of(sizes), 0)
    assert same(after, before.scaled(after.per_token_us / before.per_token_us))
    assert stage.line("forward").time_us(*size) == pytest.approx(OF_LAYERS.time_us(*size), rel=0.15)


def test_a_stage_shares_its_time_between_layers_and_the_rest_as_by_formula() -> None:
    stage = fitted_costs(FORMULAS, [learner_of(plan_of()).learnt]).stages[0]
    before = FORMULAS.stages[0]
    assert before.line_of_ends("forward").per_token_us > 0
    share = before.line_of_ends("forward").per_token_us / before.line("forward").per_token_us
    assert stage.line_of_ends("forward").per_token_us / stage.line("forward").per_token_us == pytest.approx(share)


def test_stages_without_layers_have_their_time_in_the_rest() -> None:
    stage = fitted_costs(analytic_profile(SHAPE, CPU).costs((0, 4)), [learner_of(plan_of()).learnt]).stages[0]
    assert stage.layers.forward == LinearTime()
    assert same(stage.line_of_ends("forward"), OF_LAYERS)


def test_tokens_that_are_not_trained_do_not_make_the_output_layer_seem_fast() -> None:
    plan, last, shares, slowness = plan_of(), FORMULAS.stages[1], (0.1, 1.0, 0.3, 0.0), 1.7
    learner, events = warm_learner(plan), []
    for (op, name), (chunk, share) in product((("F", "forward"), ("B", "backward")), enumerate(shares)):
        tokens, *_ = size = size_of(plan, chunk)
        time_us = last.line(name).time_us(*size) - last.line_of_ends(name).per_token_us * tokens * (1 - share)
        events.append((f"1{op}{chunk}", 0.0, slowness * time_us, None))
    for _ in range(RECORDED):
        learner.add(plan, events, {}, output_share=shares.__getitem__)
    found = fitted_costs(FORMULAS, [learner.learnt], keeps_weights=True).stages[1]
    assert same(found.line("forward"), last.line("forward").scaled(slowness))
    assert same(found.line("backward"), last.line("backward").scaled(slowness))
    assert found.line_of_ends("forward").per_token_us == pytest.approx(slowness * last.line_of_ends("forward").per_token_us)


def equal_in_time(line: LinearTime, length: int, count: int) -> list[tuple[int, int]]:
    """Starts and ends of slices of a sequence that take equal times."""

    def us(end: int) -> float:
        return line.time_us(end, causal_pairs(0, end))

    ends = [min(range(length + 1), key=lambda end: abs(us(end) - us(length) * part / count)) for part in range(1, count)]
    return [*pairwise([0, *ends, length])]


@pytest.mark.parametrize("seed", range(5))
def test_slices_that_take_equal_times_do_not_make_tokens_look_free(seed: int) -> None:
    """Any mixture of times per slice, token and pair goes through their times, so noise would choose one."""
    noise, truth = random.Random(seed), OF_LAYERS.scaled(1.5)
    slices = [(end - start, causal_pairs(start, end)) for start, end in equal_in_time(OF_LAYERS, 4000, 8)]
    times = [Timed(*size, truth.time_us(*size) * noise.uniform(0.9, 1.1)) for size in slices * RECORDED]
    line = fitted_line(OF_LAYERS, times)
    for start, end in equal_in_time(OF_LAYERS, 4000, 2):
        size = end - start, causal_pairs(start, end)
        assert line.time_us(*size) == pytest.approx(truth.time_us(*size), rel=0.1)


def test_it_is_told_which_times_the_batches_do_not_tell() -> None:
    cut = [(end - start, causal_pairs(start, end)) for start, end in equal_in_time(OF_LAYERS, 4000, 8)]
    assert undetermined(OF_LAYERS, [Timed(*size, 1.0) for size in cut]) == ("fixed time",)
    assert undetermined(OF_LAYERS, [Timed(700, 250_000, 1.0)]) == ("fixed time", "time per token", "time per pair")
    assert undetermined(OF_LAYERS, [Timed(size, causal_pairs(0, size), 1.0) for size in SIZES]) == ()
    assert undetermined(OF_LAYERS, []) == ()
