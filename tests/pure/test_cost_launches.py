"""Time of launching: no pass takes less than the host needs to launch it, in costs, in plans and in what they are read from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_epp.cost import H100, H100_NODE, LinearTime, analytic_costs, work_of
from megatron_epp.cost.blocks import LAYER
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.cost.timed import Timed, fitted_line
from megatron_epp.plan import Chunk, Op, Recompute, Segment
from megatron_epp.plan.check import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan

SHAPE = replace(shape_of(load_flags("llama3-8b") | {"tensor_model_parallel_size": 8}), num_layers=8)
LENGTHS = 200, 60, 16_000
CHUNKS = tuple(Chunk((Segment(q, 0, length),)) for q, length in enumerate(LENGTHS))
WORK = work_of(CHUNKS, LENGTHS)
DEVICE, BOUND = (analytic_costs(SHAPE, rates, [4, 4]) for rates in (H100, H100_NODE))
PROBLEM = Problem((8192, 300, 200, 100), (0, 1), (UNLIMITED_BYTES,) * 2)


def test_a_line_is_the_larger_of_launching_and_of_the_device():
    line = LinearTime(10.0, 1.0, launch_us=50.0)
    assert [line.time_us(tokens, 0) for tokens in (20, 40, 60)] == [50.0, 50.0, 70.0]
    assert line.time_us(np.array([20, 60]), np.array([0, 0])).tolist() == [50.0, 70.0]
    assert (line + line.scaled(2)).launch_us == 150.0
    assert line.without(LinearTime(launch_us=20.0)).launch_us == 30.0


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", ["forward", "backward", "weight"])
def test_short_chunks_take_as_long_as_launching_and_long_ones_as_the_device(name: str, stage: int):
    launch_us = BOUND.stages[stage].line(name).launch_us
    short_us, shorter_us, long_us = getattr(BOUND, f"{name}_us")(stage, WORK)
    assert short_us == shorter_us == launch_us > 0
    assert long_us == getattr(DEVICE, f"{name}_us")(stage, WORK)[2] > launch_us


def test_a_backward_and_its_split_weight_gradient_are_launched_for_themselves():
    """Whole they are launched as long as apart where the host bounds both, and never faster apart."""
    whole, weight, saved = (getattr(BOUND, f"{name}_us")(1, WORK) for name in ("backward", "weight", "saved_by_split"))
    assert saved[:2] == pytest.approx(weight[:2])
    assert (whole - saved + weight >= whole * (1 - 1e-12)).all()
    mixed = BOUND.stages[1].changed(LAYER, weight=replace(BOUND.stages[1].layers.weight, launch_us=0.0))
    costs = replace(BOUND, stages=(mixed, mixed))
    # without its weight gradient the backward is launched as long as with it, so splitting it off spares nothing
    assert costs.saved_by_split_us(0, WORK)[0] < costs.weight_us(0, WORK)[0]
    assert (DEVICE.saved_by_split_us(1, WORK) == DEVICE.weight_us(1, WORK)).all()


@pytest.mark.parametrize("mode", DEVICE.recompute_modes)
def test_a_layer_that_recomputes_is_launched_again(mode: str):
    one = Recompute(**{mode: 1})
    again = BOUND.stages[0].layers.mode(mode)
    assert again is not None
    assert BOUND.recompute_us(0, WORK, one)[1] == again.again.launch_us > 0
    assert BOUND.recompute_us(0, WORK, one)[2] == DEVICE.recompute_us(0, WORK, one)[2]


def test_an_action_that_launching_bounds_hides_no_exchange():
    assert DEVICE.exchange_us(0, WORK).min() > 0
    assert BOUND.exchange_us(0, WORK)[:2].tolist() == [0.0, 0.0]
    assert BOUND.exchange_us(0, WORK)[2] == DEVICE.exchange_us(0, WORK)[2]


def test_experts_are_launched_besides_attention():
    experts = replace(SHAPE, num_experts=8, experts_per_token=2)
    dense, routed = (analytic_costs(shape, H100_NODE, [8]).stages[0].layers.forward.launch_us for shape in (SHAPE, experts))
    assert routed > dense


@pytest.mark.parametrize("split", [False, True])
def test_plans_are_proven_and_no_action_is_below_its_launches(split: bool):
    made = plan(PROBLEM, BOUND, Options(split_weight=split, slices=8))
    assert check(made) == []
    names = {Op.F: "forward", Op.B: "backward", Op.W: "weight"}
    for step in (step for row in made.ranks for step in row):
        op, stage, _ = step.action
        own = BOUND.stages[stage]
        is_split = any(s.action == step.action._replace(op=Op.W) for row in made.ranks for s in row)
        line = own.line("split") if op is Op.B and is_split else own.line(names[op])
        assert step.time_us >= line.launch_us * (1 - 1e-9)


def test_slices_are_fewer_where_launching_bounds_them():
    problem, rates = (
        Problem((32768,), (0, 1, 2, 3), (UNLIMITED_BYTES,) * 4),
        (H100, replace(H100_NODE, launch_forward_us=1500.0, launch_backward_us=2500.0)),
    )
    device, bound = (plan(problem, analytic_costs(SHAPE, each, [2] * 4), Options()) for each in rates)
    assert len(bound.chunks) < len(device.chunks)


def test_learnt_lines_keep_the_time_of_launching_unless_a_pass_took_less():
    earlier = LinearTime(10.0, 1.0, launch_us=500.0)
    times = [Timed(tokens, 0, max(500.0, 2.0 * tokens)) for tokens in (100, 200, 400, 800, 1600)]
    assert fitted_line(earlier, times).launch_us == 500.0
    assert fitted_line(earlier, [one._replace(time_us=2.0 * one.tokens) for one in times]).launch_us == 200.0
