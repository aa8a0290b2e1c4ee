"""Bytes of gradients and optimizer states follow Megatron's flags, and every command counts them alike."""

import random
import shlex

import pytest

from megatron_epp.advice.question import Configuration
from megatron_epp.advice.recipe import flags_text
from megatron_epp.cli import main as cli
from megatron_epp.cli.advise import question_of
from megatron_epp.cli.planning_flags import costs_of
from megatron_epp.cost import OptimizerBytes, Static
from megatron_epp.cost.optimizer import Parameters
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.layout import Layout, even_layers
from megatron_epp.plan.placement import Placement

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
    with pytest.raises(EppError) as refused:
        OptimizerBytes.of_flags(flags)
    assert said in str(refused.value)


def test_states_are_shared_by_replicas_and_context_parallel_ranks_and_those_of_experts_by_fewer():
    sizes = {"data_parallel_size": 4, "context_parallel_size": 2, "expert_model_parallel_size": 4}
    found = OptimizerBytes.of_flags(HALF | sizes)
    held = found.static(Parameters(matrices=800, experts=1600, others=80))
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
    layout = Layout.of_layers(even_layers(8, 2), Placement("looped", 2, 1))
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
    file.write_text(
        "megatron: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, vocab_size: 512, bf16: true, "
        "use_precision_aware_optimizer: true, exp_avg_dtype: bf16}"
    )
    layout = Layout.of_layers([4], Placement("looped", 1, 1))

    def state_bytes(flags: str) -> float:
        static = costs_of(parsed(f"plan --lengths 300 --model {file} --stages 1 {flags}"), (300,), layout).stages[0].static
        return static.optimizer / (static.weights / 2)

    assert state_bytes("") == 2 + 2 + 4
    assert state_bytes("--exp-avg-dtype fp8") == 2 + 1 + 4


def test_advice_ends_with_the_flags_of_the_optimizer_that_it_counted():
    question = question_of(parsed(f"advise --lengths 4096 --devices 8 --global-batch-size 8 {FLAGS['on the host']}"))
    said = flags_text(question, Configuration(2, 1, 1, 4, layers=(32,))).replace(" \\\n", " ")
    assert f" {FLAGS['on the host']} " in said
    plain = question_of(parsed("advise --lengths 4096 --devices 8 --global-batch-size 8"))
    assert "precision" not in flags_text(plain, Configuration(2, 1, 1, 4, layers=(32,)))
