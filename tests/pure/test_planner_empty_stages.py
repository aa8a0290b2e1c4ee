"""Stages without layers keep little and have no weight gradient, and links to the host may carry nothing or cost nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megatron_epp.cli.main import main
from megatron_epp.cost import CPU, H100, ModelShape, PipelineCosts, analytic_costs
from megatron_epp.cost.blocks import LAYER
from megatron_epp.plan import InfeasibleError, Op, Plan
from megatron_epp.plan.check import check
from megatron_epp.plan.serialize import load
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.tables import tabulate
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.seeds import some_by_default

LAYERS = ("first", "last", "middle", "several", "all but one")


def costs_of(draw: random.Random, stages: int, experts: bool) -> PipelineCosts:
    layers, without = [draw.randint(1, 3) for _ in range(stages)], draw.choice(LAYERS)
    empty = {"first": [0], "last": [-1], "middle": [stages // 2], "several": [0, stages // 2, -1]}
    for stage in empty.get(without, range(1, stages)):
        layers[stage] = 0
    layers[draw.randrange(stages)] += not sum(layers)
    shape = ModelShape(
        num_layers=sum(layers),
        hidden_size=256,
        ffn_hidden_size=704,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=draw.choice((512, 8192)),
        loss_block_tokens=draw.choice((0, 0, 256)),
        **({"num_experts": 4, "experts_per_token": 2} if experts else {}),  # type: ignore[arg-type]
    )
    costs = replace(analytic_costs(shape, H100, layers, state_bytes_per_parameter=8.0), host_turns=draw.choice((1, 2)))
    link = draw.random()
    if link < 0.2:
        return replace(costs, offloadable_share=draw.choice((0.0, 1e-9, 1e-3, 0.5)))
    return replace(costs, host_us_per_byte=0.0, host_latency_us=0.0) if link < 0.4 else costs


def asked_of(seed: int) -> tuple[list[Problem], PipelineCosts, Options]:
    """One problem, or those of replicas that share experts."""
    draw = random.Random(seed)
    ranks, per_rank, turns_back = draw.randint(1, 4), draw.choice((1, 1, 1, 2)), draw.random() < 0.5
    once = range(ranks)
    placement = (*once, *(reversed(once) if turns_back else once))[: ranks * per_rank]
    replicas = draw.choice((1, 1, 1, 2))
    costs = costs_of(draw, len(placement), replicas > 1)
    options = Options(
        split_weight=draw.random() < 0.6,
        offload=draw.random() < 0.6,
        kv_offload=draw.random() < 0.8,
        steps=30,
        chunk_tokens=draw.choice((None, None, 512)),
        slices=draw.choice((None, None, 5)),
        recompute=draw.choice(("auto", "auto", "auto", 1)),
    )
    longest = draw.choice((2000, 20000))
    batches = [tuple(round(longest ** draw.random()) for _ in range(draw.randint(1, 6))) for _ in range(replicas)]
    static = max(sum(costs.static_bytes(s) for s in range(len(placement)) if placement[s] == rank) for rank in once)
    per_token = sum(s.num_layers * s.layers.bytes_per_token + s.ends_bytes_per_token for s in costs.stages) / ranks
    cap = UNLIMITED_BYTES if draw.random() < 0.2 else static + int(draw.random() ** 3 * per_token * sum(batches[0]))
    rest = {"token_multiple": draw.choice((1, 8)), "forward_only": draw.random() < 0.2}
    rest["host_cap_bytes"] = draw.choice((UNLIMITED_BYTES, UNLIMITED_BYTES, 10**6))
    return [Problem(batch, placement, (cap,) * ranks, **rest) for batch in batches], costs, options  # type: ignore[arg-type]


def planned(asked: list[Problem], costs: PipelineCosts, options: Options) -> tuple[Plan, ...]:
    return plan_lockstep(asked, costs, options) if len(asked) > 1 else (plan(asked[0], costs, options),)


@some_by_default("seed", range(80), 12)
def test_any_batch_is_planned_or_refused_with_a_cap_that_would_do(seed: int):
    asked, costs, options = asked_of(seed)
    try:
        made = planned(asked, costs, options)
    except InfeasibleError as error:
        text, least = str(error), error.least_cap_bytes
    else:
        assert [check(one) for one in made] == [[]] * len(asked)
        return
    assert text.count("\n") <= 1
    assert least > asked[0].cap_bytes[0] or "too few" in text
    if least:
        made = planned([replace(one, cap_bytes=(least,) * one.num_ranks) for one in asked], costs, options)
        assert [check(one) for one in made] == [[]] * len(asked)


@pytest.mark.parametrize(
    "arguments",
    [
        "--lengths 100,200,3 --stages 2 --layers 2 --layout 0,2 --split-weight",
        "--lengths 9000,5000,3000,2000 --model llama3-8b --stages 4 --layout 11,11,10,0 --split-weight",
    ],
)
def test_the_command_line_plans_weight_gradients_apart_where_a_stage_has_no_layers(arguments: str, tmp_path):
    assert main(["plan", *arguments.split(), "-o", str(tmp_path / "plan.json")]) == 0
    assert Op.W in {step.action.op for steps in load(tmp_path / "plan.json").ranks for step in steps}


def test_the_command_line_refuses_a_cap_that_is_too_small_where_a_stage_has_no_layers(capsys):
    arguments = "--lengths 100 --stages 2 --layers 1 --layout 0,1 --offload --memory-gb 0.001"
    assert main(["plan", *arguments.split()]) == 2
    assert "(1073741 bytes)" in capsys.readouterr().err


def test_only_stages_with_a_weight_gradient_put_it_off():
    asked, costs = problem((9000, 5000, 3000), 3), pipeline(3)
    costs = replace(costs, stages=(costs.stages[0].changed(LAYER, count=0), *costs.stages[1:]))
    made = plan(asked, costs, Options(split_weight=True))
    assert check(made) == []
    assert {step.action.stage for steps in made.ranks for step in steps if step.action.op is Op.W} == {1, 2}


@pytest.mark.parametrize("link_us_per_byte", [0.0, 1e-5])
def test_the_bound_under_a_cap_takes_no_recompute_of_a_stage_without_layers(link_us_per_byte: float):
    costs = pipeline(2)
    costs = replace(costs, stages=(costs.stages[0].changed(LAYER, count=0), costs.stages[1]), host_us_per_byte=link_us_per_byte)
    free = problem((9000, 300), 2)
    table = plan(free, costs).chunks
    capped = replace(free, cap_bytes=(1, UNLIMITED_BYTES))
    bounds = [lower_bound_us(tabulate(table, asked, costs), table, asked, Options(offload=True)) for asked in (free, capped)]
    assert bounds[0] == bounds[1]


def copied(lengths: tuple[int, ...], share: float, costs: PipelineCosts) -> Plan:
    """A plan with offload under a cap between what is static (0) and what takes no recompute (1)."""
    free = problem(lengths, 2)
    made = plan(free, costs)
    peak, static = max(made.predicted.peak_bytes), max(made.static_bytes)
    made = plan(replace(free, cap_bytes=(static + int((peak - static) * share),) * 2), costs, COPIES)
    assert check(made) == []
    return made


COPIES = Options(offload=True, kv_offload=False)
LINK = {"host_latency_us": 1.0, "host_us_per_byte": 1e-5}
FREE = {"host_latency_us": 0.0, "host_us_per_byte": 0.0}


@some_by_default("lengths", [(2000, 6000, 20000), (20000, 4000, 6000, 4000), (2000, 6000, 2000, 20000, 2000)], 1)
@pytest.mark.parametrize(("share", "copies"), [(0.0, False), (1e-9, False), (1e-4, False), (1.0, True)])
def test_where_less_than_a_layers_input_may_leave_nothing_is_copied(lengths: tuple[int, ...], share: float, copies: bool):
    made = copied(lengths, 0.5, replace(pipeline(2, 2), offloadable_share=share, **LINK))
    assert any(made.copies) == copies


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5])
def test_no_more_of_a_chunk_leaves_than_may(share: float):
    made = copied((6000, 4000, 5000, 800), 0.11, replace(pipeline(2), offloadable_share=share, **FREE))
    assert 0 < max(map(max, made.offload_share)) <= share


@pytest.mark.parametrize(("lengths", "slices"), [((100_000,), 5), ((20_000, 5000), 5)])
def test_a_cap_named_for_keys_and_values_at_the_host_would_do_where_it_then_asks_for_none_there(lengths, slices: int):
    """The last stage then holds most memory, and less with the slices that hosting is tried with than with others."""
    shape = ModelShape(num_layers=5, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512)
    costs, options = analytic_costs(shape, CPU, [2, 3, 0]), Options(slices=slices, offload=True)
    with pytest.raises(InfeasibleError) as refused:
        plan(problem(lengths, 3, 1, forward_only=True), costs, options)
    assert check(plan(problem(lengths, 3, refused.value.least_cap_bytes, forward_only=True), costs, options)) == []
