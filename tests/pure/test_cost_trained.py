"""Costs of what trains: tokens in the output layer, parts of the model, and bytes of gradients and optimizer states."""

import random
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_epp.cost.blocks import HEAD, INPUT
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import TRAINED_SHARE, OptimizerBytes, Parameters
from megatron_epp.cost.work import LinearTime, trained_tokens, work_of
from megatron_epp.plan import Chunk, PlanError, Segment
from megatron_epp.plan.document import digest
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.estimate import about_us
from megatron_epp.planner.service.replica_balance import divide
from megatron_epp.tools.advice.advice_text import flags_text
from megatron_epp.tools.advice.question import Configuration
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.advise import question_of
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.cli.planning_flags import costs_of
from megatron_epp.tools.formulas import H100, ModelShape, analytic_profile
from tests.support.calls import refusal
from tests.support.plan.planner_cases import pipeline, problem

TIMES = {"forward": LinearTime(5.0, 20.0), "backward": LinearTime(5.0, 40.0), "weight": LinearTime(0.0, 15.0)}


def with_head() -> PipelineCosts:
    first, last = pipeline(2).stages
    last = last.changed(INPUT, HEAD, **dict.fromkeys(TIMES, LinearTime())).changed(HEAD, **TIMES)
    return replace(pipeline(2), stages=(first, last))


def parts_of(length: int, trained: range) -> tuple[int, ...]:
    return tuple(int(token in trained) for token in range(length))


def test_tokens_of_a_segment_are_those_of_its_parts():
    parts = (0, 3, 8, 1)
    assert trained_tokens(parts, 40, 0, 40) == 12
    assert [trained_tokens(parts, 40, start, start + 10) for start in range(0, 40, 10)] == list(parts)
    assert trained_tokens(parts, 40, 15, 25) == 1.5 + 4
    assert sum(trained_tokens(parts, 37, start, min(37, start + 5)) for start in range(0, 37, 5)) == pytest.approx(12)
    assert trained_tokens((5,), 9, 0, 3) == pytest.approx(5 / 3)


def test_times_of_the_output_layer_are_those_of_trained_tokens():
    costs, lengths = with_head(), (8, 5)
    chunks = (Chunk((Segment(0, 0, 4),)), Chunk((Segment(0, 4, 8), Segment(1, 0, 5))))
    everything = work_of(chunks, lengths, 4)
    some = work_of(chunks, lengths, 4, (parts_of(8, range(6, 8)), parts_of(5, range(3))))
    assert some.trained.tolist() == [0, 5]
    for column, per_token in ((costs.forward_us, 20.0), (costs.backward_us, 40.0), (costs.weight_us, 15.0)):
        assert (column(1, everything) - column(1, some)).tolist() == pytest.approx([per_token * 4, per_token * (12 - 5)])
        assert column(0, everything).tolist() == column(0, some).tolist()
    for sizes in (costs.activation_bytes, costs.head_bytes):
        assert sizes(1, everything).tolist() == sizes(1, some).tolist()


def test_a_plan_of_trained_tokens_only_is_the_one_without_a_mask():
    asked = problem((40, 30, 20, 10), 2)
    everything = replace(asked, trained=tuple((length,) for length in asked.lengths))
    assert digest(plan(asked, with_head())) == digest(plan(everything, with_head()))


def test_chunks_are_balanced_by_another_stage_where_few_tokens_are_trained():
    asked, costs = problem((64, 64), 2), with_head()
    few = replace(asked, trained=((0,), (1,)))
    lines = [costs.line(stage, "forward") + costs.line(stage, "backward") for stage in range(2)]
    assert Chunker.of(asked, costs, None).line.per_token_us == lines[1].per_token_us
    assert Chunker.of(few, costs, None).line.per_token_us < lines[1].per_token_us - 0.9 * 60
    assert Chunker.of(few, costs, None).total_us < 0.6 * Chunker.of(asked, costs, None).total_us


def test_trained_tokens_go_with_their_sequences():
    asked = replace(problem((3, 9, 5), 2), trained=((1,), (2,), (3,)))
    assert asked.part((2, 0)).trained == ((3,), (1,))
    assert asked.part((2, 0)).lengths == (5, 3)
    with pytest.raises(PlanError, match="trained tokens of 2 sequences, and lengths of 3"):
        plan(replace(asked, trained=((1,), (2,))), pipeline(2))


def test_replicas_share_trained_tokens_too():
    """Half the sequences train nothing: one replica does not get all of them."""
    asked = replace(problem((60,) * 8, 2), trained=((60,), (0,)) * 4)

    def slowest_us(shares: tuple[Problem, ...]) -> float:
        return max(about_us(share, with_head(), Options()) for share in shares)

    division = divide(asked, with_head(), ((0,), (1,)), slowest_us)
    assert max([sum(sum(parts) for parts in asked.part(share).trained) for share in division.shares]) < 240 * 0.8


SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
ADAPTERS = 40_000_000


@pytest.mark.parametrize("block_tokens", [0, 16], ids=["logits at once", "loss by blocks"])
def test_the_backward_of_a_frozen_matrix_is_one_product_less(block_tokens: int) -> None:
    whole = analytic_profile(replace(SHAPE, loss_block_tokens=block_tokens), H100)
    frozen, half = whole.training(0.0), whole.training(0.5)
    for part in ("layer", "attention"):
        full, less = getattr(whole, part), getattr(frozen, part)
        assert (less.backward, less.weight.per_token_us) == (full.backward.without(full.weight), 0.0)
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


def test_stages_before_the_first_that_trains_keep_nothing_and_their_backwards_take_next_to_nothing() -> None:
    first, last = analytic_profile(SHAPE, H100).costs([2, 2]).stages
    costs = replace(analytic_profile(SHAPE, H100).costs([2, 2]), stages=(first.without_backward(), last))
    assert float(costs.backward_us(0, work_of([Chunk((Segment(0, 0, 100),))], [100]))[0]) == 1.0
    assert costs.stages[0].line("forward") == first.line("forward")
    for chunk_tokens in (None, 64):  # whole sequences and slices
        found = plan(Problem((256, 100, 60), (0, 1), (1 << 40,) * 2), costs, Options(chunk_tokens=chunk_tokens))
        assert check(found) == []
        assert found.predicted.peak_bytes[0] < found.predicted.peak_bytes[1]


def costs_by(command: str) -> PipelineCosts:
    asked = parsed(f"{command} --lengths 8192 --model llama3-8b --rates h100 --stages 4")
    return costs_of(asked, (8192,), Layout((8,) * 4, Placement("looped", 4, 1)))


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
    assert layer.backward.per_token_us == pytest.approx(of_all.backward.without(of_all.weight).per_token_us, rel=0.01)
    assert costs_by(f"{command} --trained-parameters {10**12}") == whole


def test_advice_counts_what_trains() -> None:
    asked = "advise --lengths 8192,8192 --model llama3-8b --devices 8 --global-batch-size 2"
    questions = [question_of(parsed(f"{asked} {flags}")) for flags in ("", "--trained-parameters 40000000")]
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


PRECISE = {"use_precision_aware_optimizer": True}
OFFLOADED = {**PRECISE, "optimizer_cpu_offload": True}
HALF = {"bf16": True}


@pytest.mark.parametrize(
    ("flags", "weight", "gradient", "state"),
    [
        (HALF, 2, 4, 4 + 4 + 4),
        ({"fp16": True}, 2, 2, 12),  # for which Megatron accumulates in fp32 only if it is told to
        ({"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, 2, 4, 12),
        ({}, 4, 4, 4 + 4),
        (HALF | {"grad_reduce_in_bf16": True}, 2, 2, 12),
        (HALF | {"optimizer": "sgd"}, 2, 4, 4 + 4),
        ({"optimizer": "sgd"}, 4, 4, 4),
        (HALF | PRECISE, 2, 4, 2 + 4 + 4),  # the bits of fp32 that bf16 lacks
        (HALF | PRECISE | {"main_params_dtype": "fp16"}, 2, 4, 2 + 4 + 4),
        ({"fp16": True} | PRECISE, 2, 2, 4 + 4 + 4),
        (PRECISE, 4, 4, 4 + 4 + 4),  # Transformer Engine copies weights in fp32 too
        (HALF | PRECISE | {"main_grads_dtype": "bf16"}, 2, 2, 10),
        (HALF | PRECISE | {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"}, 2, 4, 2 + 2 + 1),
        (HALF | OFFLOADED, 2, 4, 0),
        (HALF | OFFLOADED | {"optimizer_offload_fraction": 0.25, "exp_avg_dtype": "bf16"}, 2, 4, 0.75 * 12),
        (OFFLOADED | {"optimizer_offload_fraction": 0.5}, 4, 4, 0.5 * 8),
    ],
    ids=str,
)
def test_bytes_of_a_parameter(flags, weight, gradient, state):
    found = OptimizerBytes.of_flags(flags)
    assert (found.weight, found.gradient, found.state, found.matrix_state) == (weight, gradient, state, state)


@pytest.mark.parametrize(
    ("flags", "sharing"),
    [
        ({}, "elements"),
        ({"use_distributed_optimizer": False}, "none"),
        ({"optimizer": "sgd"}, "none"),
        ({"optimizer": "muon"}, "matrices"),
        ({"optimizer": "muon", "use_distributed_optimizer": False}, "none"),
        ({"optimizer": "muon", "use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True}, "matrices"),
        ({"optimizer": "dist_muon", "use_distributed_optimizer": False}, "matrices"),
        ({"optimizer": "dist_muon", "use_layer_wise_param_layout": False}, "parameters"),
    ],
    ids=str,
)
def test_what_ranks_share(flags, sharing):
    assert OptimizerBytes.of_flags(flags).sharing == sharing


def test_muon_has_one_moment_of_matrices_and_adam_or_lion_the_rest():
    muon = OptimizerBytes.of_flags(HALF | {"optimizer": "muon"})
    assert (muon.matrix_state, muon.state) == (4 + 4, 4 + 4 + 4)
    assert OptimizerBytes.of_flags(HALF | {"optimizer": "muon", "muon_scalar_optimizer": "lion"}).state == 4 + 4


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"optimizer": "soap"}, "bytes of --optimizer 'soap' are not known: give one of adam, sgd, muon, dist_muon"),
        (PRECISE | {"optimizer": "sgd"}, "--use-precision-aware-optimizer is for --optimizer adam, not sgd"),
        ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype bf16 needs --use-precision-aware-optimizer"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload needs --use-precision-aware-optimizer"),
        (OFFLOADED | {"optimizer_offload_fraction": 2}, "--optimizer-offload-fraction is 2; it must be a share, 0 to 1"),
        (PRECISE | {"exp_avg_dtype": ["fp32"]}, "--exp-avg-dtype is ['fp32']; it must be one of fp32, fp16, bf16, fp8"),
        ({"context_parallel_size": "4"}, "context_parallel_size: '4' is not a whole number"),
    ],
    ids=str,
)
def test_what_megatron_would_refuse_is_refused(flags, said):
    assert said in refusal(OptimizerBytes.of_flags, flags)


def test_states_are_shared_by_replicas_and_context_parallel_ranks_and_those_of_experts_by_fewer():
    sizes = {"data_parallel_size": 4, "context_parallel_size": 2, "expert_model_parallel_size": 4}
    held = OptimizerBytes.of_flags(HALF | sizes).static(Parameters(matrices=800, experts=1600, others=80))
    assert held == Static(weights=2 * 2480, gradients=4 * 2480, optimizer=12 * (880 // 8 + 1600 // 2))
    tensor = {"tensor_model_parallel_size": 2}
    assert OptimizerBytes.of_flags(sizes | tensor).expert_holders == 2
    assert OptimizerBytes.of_flags(sizes | tensor | {"expert_tensor_parallel_size": 1}).expert_holders == 4


def test_no_rank_has_more_than_what_is_said_of_whole_matrices():
    draw = random.Random(0)
    for _ in range(100):
        holders, sizes = draw.randint(1, 12), [draw.randint(1, 100) for _ in range(draw.randint(1, 40))]
        found = OptimizerBytes.of_flags({"optimizer": "muon", "data_parallel_size": holders})
        loads = [0] * holders
        for size in sorted(sizes, reverse=True):
            loads[loads.index(min(loads))] += size
        held = found.static(Parameters(matrices=sum(sizes), largest=max(sizes)))
        assert 4 * max(loads) <= held.optimizer + 1
        assert held.optimizer <= 4 * sum(sizes)


MODELS = {"dense": "--model llama3-8b --layers 8", "experts": "--model mixtral-8x7b --layers 8 --expert-parallel 4"}
FLAGS = {
    "as it is": "",
    "in bf16": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --main-grads-dtype bf16",
    "on the host": "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    "muon": "--optimizer muon",
    "sgd": "--optimizer sgd",
    "adapters": "--trained-parameters 40000000",
}
SIZES = {"tensor": 2, "context": 2, "pipeline": 2, "data": 4}


def parsed(command: str):
    return cli._parser().parse(shlex.split(command))


@pytest.mark.parametrize("optimizer", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_commands_count_alike(model: str, optimizer: str):
    layout = Layout(even_layers(8, 2), Placement("looped", 2, 1))
    tail = f"--lengths 4096 --context 4096 --cluster h100x8 {model} {optimizer}"
    ranks = "--stages 2 --tensor-parallel 2 --sequence-parallel --context-parallel 2 --data-parallel 4"
    if "--expert" in model:
        ranks += " --expert-tensor-parallel 1"  # as `advise` has it
    found = {name: costs_of(parsed(f"{name} {tail} {ranks}"), (4096,), layout) for name in ("plan", "memory", "compare")}
    question = question_of(parsed(f"advise {tail} --devices 32 --global-batch-size 8"))
    experts = 4 if question.flags.get("num_experts") else 1
    found["advise"] = question.costs(Configuration(**SIZES, expert=experts, layers=layout.layers))
    held = {name: [stage.static for stage in costs.stages] for name, costs in found.items()}
    assert all(one == held["plan"] for one in held.values()), held


def test_flags_of_a_model_file_count_and_those_given_win(tmp_path):
    file = tmp_path / "model.yaml"
    sizes = "num_layers: 4, hidden_size: 256, num_attention_heads: 4, vocab_size: 512, bf16: true"
    file.write_text(f"megatron: {{{sizes}, use_precision_aware_optimizer: true, exp_avg_dtype: bf16}}")
    layout = Layout((4,), Placement("looped", 1, 1))

    def state_bytes(flags: str) -> float:
        static = costs_of(parsed(f"plan --lengths 300 --model {file} --stages 1 {flags}"), (300,), layout).stages[0].static
        return static.optimizer / (static.weights / 2)

    assert (state_bytes(""), state_bytes("--exp-avg-dtype fp8")) == (2 + 2 + 4, 2 + 1 + 4)


def test_advice_ends_with_the_flags_of_the_optimizer_that_it_counted():
    def said(flags: str) -> str:
        question = question_of(parsed(f"advise --lengths 4096 --devices 8 --global-batch-size 8 {flags}"))
        return flags_text(question, Configuration(2, 1, 1, 4, layers=(32,))).replace(" \\\n", " ")

    assert f" {FLAGS['on the host']} " in said(FLAGS["on the host"])
    assert "precision" not in said("")
