"""Costs of a model of which only a part trains: products, gradients, states, plans and commands."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.advice.question import Configuration
from megatron_epp.advice.recipe import flags_text
from megatron_epp.cli import main as cli
from megatron_epp.cli.advise import question_of
from megatron_epp.cli.main import main
from megatron_epp.cli.planning_flags import costs_of
from megatron_epp.cost import H100, ModelShape, OptimizerBytes, PipelineCosts, analytic_profile, work_of
from megatron_epp.cost.optimizer import TRAINED_SHARE, Parameters
from megatron_epp.plan import Chunk, Segment
from megatron_epp.plan.check import check
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import Options, Problem, plan

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
ADAPTERS = 40_000_000


@pytest.mark.parametrize("block_tokens", [0, 16], ids=["logits at once", "loss by blocks"])
def test_the_backward_of_a_frozen_matrix_is_one_product_less(block_tokens: int) -> None:
    whole = analytic_profile(replace(SHAPE, loss_block_tokens=block_tokens), H100)
    frozen, half = whole.training(0.0), whole.training(0.5)
    for part in ("layer", "attention"):
        full, less = getattr(whole, part), getattr(frozen, part)
        assert less.backward == full.backward.without(full.weight)
        assert less.weight.per_token_us == 0.0
        assert getattr(half, part).weight == full.weight.scaled(0.5)
    product_us = 1e6 * 2 * SHAPE.vocabulary_parameters / H100.linear_flops
    saved_us = whole.head.backward.per_token_us - frozen.head.backward.per_token_us
    assert saved_us == pytest.approx(product_us)
    assert whole.training(1.0) is whole


def test_only_what_trains_has_gradients_and_states() -> None:
    parameters = Parameters(matrices=1000, experts=400, others=600, largest=100, largest_other=100)
    found = OptimizerBytes.of_flags({"bf16": True, TRAINED_SHARE: 0.25}).static(parameters)
    assert (found.weights, found.gradients, found.optimizer) == (2 * 2000, 4 * 500, 12 * 500)
    of_those = OptimizerBytes.of_flags({"bf16": True}).static(parameters, Parameters(others=30))
    assert (of_those.weights, of_those.gradients, of_those.optimizer) == (2 * 2000, 4 * 30, 12 * 30)


@pytest.mark.parametrize("chunk_tokens", [None, 64], ids=["whole", "slices"])
def test_stages_before_the_first_that_trains_keep_nothing_and_their_backwards_take_next_to_nothing(
    chunk_tokens: int | None,
) -> None:
    costs = analytic_profile(SHAPE, H100).costs([2, 2])
    costs = replace(costs, stages=(costs.stages[0].without_backward(), costs.stages[1]))
    work = work_of([Chunk((Segment(0, 0, 100),))], [100])
    assert float(costs.backward_us(0, work)[0]) == 1.0
    assert costs.stages[0].line("forward") == analytic_profile(SHAPE, H100).costs([2, 2]).stages[0].line("forward")
    problem = Problem((256, 100, 60), (0, 1), (1 << 40,) * 2)
    found = plan(problem, costs, Options(chunk_tokens=chunk_tokens))
    assert check(found) == []
    assert found.predicted.peak_bytes[0] < found.predicted.peak_bytes[1]


def costs_by(command: str) -> PipelineCosts:
    """Return the costs that a command plans with; `test_cost_optimizer` compares them with those of other commands."""
    asked = cli._parser().parse(shlex.split(f"{command} --lengths 8192 --model llama3-8b --rates h100 --stages 4"))
    return costs_of(asked, (8192,), Layout.of_layers([8] * 4, Placement("looped", 4, 1)))


@pytest.mark.parametrize("command", ["plan", "memory", "compare"])
def test_commands_count_what_trains(command: str) -> None:
    whole, less = costs_by(command), costs_by(f"{command} --trained-parameters {ADAPTERS}")
    share = ADAPTERS / 8_030_000_000
    for stage, of_all in zip(less.stages, whole.stages, strict=True):
        assert stage.static.weights == of_all.static.weights
        assert stage.static.optimizer == pytest.approx(share * of_all.static.optimizer, rel=0.01)
        assert stage.static.gradients == pytest.approx(share * of_all.static.gradients, rel=0.01)
        assert stage.static.buffers <= 2 * 2 * ADAPTERS
        assert stage.line("forward") == of_all.line("forward")
    layer, of_all = less.stages[1].layers, whole.stages[1].layers
    frozen = of_all.backward.without(of_all.weight)
    assert layer.backward.per_token_us == pytest.approx(frozen.per_token_us, rel=0.01)
    assert costs_by(f"{command} --trained-parameters {10**12}") == whole


def test_advice_counts_what_trains() -> None:
    asked = "advise --lengths 8192,8192 --model llama3-8b --devices 8 --global-batch-size 2"
    questions = [
        question_of(cli._parser().parse(shlex.split(f"{asked} {flags}"))) for flags in ("", "--trained-parameters 40000000")
    ]
    config = Configuration(tensor=1, context=1, pipeline=2, data=4, layers=(16, 16))
    whole, less = (question.costs(config).stages[0] for question in questions)
    assert less.static.optimizer < whole.static.optimizer / 100
    assert less.line("backward").per_token_us < whole.line("backward").per_token_us
    reductions = [question.reduction_us(config) for question in questions]
    assert reductions[1] == pytest.approx(reductions[0] * questions[1].trained_share)
    assert "trained" not in flags_text(questions[1], config)  # it is no flag of training, which counts itself


def test_costs_of_stages_are_as_they_have_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(analytic_profile(SHAPE, H100).costs([2, 2]).to_json())
    assert main(["plan", "--lengths", "300", "--costs", str(path), "--trained-parameters", "40"]) == 2
    assert "costs of stages as they have trained: leave --trained-parameters out" in capsys.readouterr().err
