"""What a training plans for weights, gradients and optimizer states is what Megatron's optimizers have after a step on CPU, and
what the commands say before it.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_epp.cost.kept import KeptCosts
from megatron_epp.cost.optimizer import DTYPE_FLAGS, KINDS, OptimizerBytes
from megatron_epp.features.learnt_costs import learnt
from megatron_epp.mcore.arguments.consequences import tell_unknown_optimizer
from megatron_epp.mcore.costs.megatron_facts import facts, optimizer_bytes, run_facts
from megatron_epp.mcore.costs.sources import _static
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.planning_flags import costs_of
from megatron_epp.tools.formulas import H100, ModelShape, analytic_costs, analytic_profile, of_run
from megatron_epp.tools.formulas.library import load_flags, shape_of
from tests.support.mcore import forked
from tests.support.mcore.asking import ask_here
from tests.support.mcore.jobs.optimizer import SETTINGS
from tests.support.mcore.megatron_flags import arguments
from tests.support.mcore.memory_cases import LENGTHS, VOCABULARY
from tests.support.mcore.synthetic_documents import documents_of, write_pair

HALF = {"bf16": True, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
SHAPE = ModelShape(num_layers=1, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
COSTS = analytic_costs(SHAPE, H100, [1])
PADDING = 0.03
"""Largest share by which buffers exceed the parameters in them: those are aligned, and these parameters are few."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    lengths = [length + 1 for length in LENGTHS]
    return write_pair(tmp_path_factory.mktemp("data") / "documents", documents_of(lengths, vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def found(documents):
    """Planned and real bytes of every setting, of both ranks."""
    done = forked.job(2, "optimizer", documents=documents, names=[*SETTINGS])
    assert done.returncode == 0, done.output[-5000:]
    return {name: [one for one in done.figures if one["name"] == name] for name in SETTINGS}


@pytest.mark.parametrize("name", SETTINGS)
def test_planned_bytes_are_those_that_are_there_after_a_step(found, name):
    """However the ranks of a setting share states."""
    planned, real = ([one[which] for one in found[name]] for which in ("planned", "real"))
    assert planned == [planned[0]] * 2
    for one in real:
        assert one["weights"] == planned[0]["weights"]
        assert planned[0]["gradients"] <= one["gradients"] <= planned[0]["gradients"] * (1 + PADDING)
        assert one["optimizer"] <= planned[0]["optimizer"] * (1 + PADDING)
    assert sum(one["optimizer"] for one in real) == pytest.approx(2 * planned[0]["optimizer"], rel=PADDING)


def test_an_optimizer_of_the_host_has_its_states_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    weight = torch.nn.Parameter(torch.ones(30, 40, dtype=torch.bfloat16))
    found = HybridDeviceOptimizer(
        [{"params": [weight]}],
        offload_fraction=0.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    )
    (inner,) = found.sub_optimizers
    (copy,) = inner.param_groups[0]["params"]
    copy.grad = torch.ones_like(copy)
    inner._optimizer_step_post_hooks.clear()  # which copy to a device
    inner.step()
    tensors = [copy, *(value for value in inner.state[copy].values() if value.numel() > 1)]
    stays = OptimizerBytes.of_flags(HALF | {"optimizer_offload_fraction": 0.0, "exp_avg_dtype": "bf16"})
    assert sum(tensor.nbytes for tensor in tensors) == weight.numel() * stays.state


FLAGS = {
    "adam": ({}, ""),
    "in lower precision": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
        | {"main_params_dtype": torch.float16, "main_grads_dtype": torch.bfloat16},
        "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8 --main-params-dtype fp16 "
        "--main-grads-dtype bf16",
    ),
    "on the host": (
        {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
        "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
    "muon": (
        {"optimizer": "muon", "use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": True},
        "--optimizer muon",
    ),
}
"""Validated arguments of a training, and flags of a command."""
SIZES = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 4, "data_parallel_size": 2}
RANKS = "--stages 2 --tensor-parallel 2 --sequence-parallel --context-parallel 4 --data-parallel 2"


@pytest.mark.parametrize(("training", "command"), FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_training_counts_as_the_commands_do(model: str, training: dict, command: str):
    experts = {"expert_model_parallel_size": 4} if model == "mixtral-8x7b" else {}
    flags = load_flags(model) | {"num_layers": 4} | SIZES | experts
    shape, layout = shape_of(flags), Layout((2, 2), Placement("looped", 2, 1))
    said = f"plan --lengths 4096 --context 4096 --model {model} --layers 4 {RANKS} {command}"
    said += " --expert-parallel 4" if experts else ""
    commands = [stage.static for stage in costs_of(cli._parser().parse(said.split()), (4096,), layout).stages]
    defaults = {"optimizer": "adam", "use_distributed_optimizer": True, "padded_vocab_size": shape.vocab_size, "fp16": False}
    args = arguments(**defaults | flags | training)
    searched = of_run.costs_of_layout(run_facts(args, ask_here), analytic_profile(shape, H100), layout).stages[0].static
    assert (searched.weights, searched.gradients, searched.optimizer) == (
        commands[0].weights,
        commands[0].gradients,
        commands[0].optimizer,
    )
    trained = _static(args, SimpleNamespace(model=model_of(shape, 2), more_weights=()))
    for name in ("weights", "gradients", "optimizer"):
        assert getattr(trained, name) == pytest.approx(getattr(commands[0], name), rel=1e-6)


def model_of(shape, layers: int) -> torch.nn.Module:
    """The first stage's parameters, without their values: the matrices that formulas count."""

    def matrix(rows: float, columns: float, **more: object) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(torch.empty(int(rows), int(columns), device="meta"))
        for name, value in more.items():
            setattr(weight, name, value)
        return weight

    hidden, ranks = shape.hidden_size, shape.tensor_parallel
    weights = [matrix(shape.vocab_size / ranks, hidden, is_embedding_or_output_parameter=True)]
    for _ in range(layers):
        weights += [matrix((shape.query_width + 2 * shape.kv_width) / ranks, hidden), matrix(shape.query_width / ranks, hidden)]
        own = {"allreduce": False} if shape.num_experts else {}
        weights += [matrix(shape.num_experts, hidden / ranks)] if shape.num_experts else []
        for _ in range((shape.num_experts or 1) // shape.expert_parallel):
            weights += [matrix(2 * shape.ffn_hidden_size / ranks, hidden, **own)]
            weights += [matrix(shape.ffn_hidden_size / ranks, hidden, **own)]
    return torch.nn.ParameterList(weights)


def test_flags_have_megatrons_defaults():
    usual = OptimizerConfig()
    args = SimpleNamespace(**{name: getattr(usual, name) for name in vars(usual)})
    usual = facts(args, "layout")
    assert not usual.keys() & {"optimizer", "use_precision_aware_optimizer", *DTYPE_FLAGS, "optimizer_cpu_offload"}
    unusual = {"optimizer": "muon", "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    vars(args).update(unusual, exp_avg_dtype=torch.bfloat16)
    assert facts(args, "layout") == usual | unusual | {"exp_avg_dtype": "torch.bfloat16"}


def test_an_optimizer_that_is_not_known_is_counted_as_adam_with_a_warning(caplog):
    known = {"bf16": True, "use_distributed_optimizer": True, "data_parallel_size": 2, "context_parallel_size": 1}
    assert optimizer_bytes(arguments(**known | {"optimizer": "soap"})) == optimizer_bytes(arguments(**known))
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        for kind in (*KINDS, None):
            tell_unknown_optimizer(arguments(optimizer=kind))
        assert not caplog.records
        tell_unknown_optimizer(arguments(optimizer="soap"))
    assert "memory of --optimizer soap is not known: plans count that of Adam" in caplog.text


def test_learnt_bytes_depend_on_the_optimizer(monkeypatch):
    monkeypatch.setattr(learnt, "gathered", lambda mine, links: [mine])
    monkeypatch.setattr(learnt, "get_model_config", lambda model: SimpleNamespace())
    models = {0: torch.nn.Linear(3, 4)}
    usual, other = (
        learnt.fingerprint(arguments(optimizer=name, use_precision_aware_optimizer=False), models, SimpleNamespace())
        for name in ("adam", "sgd")
    )
    assert KeptCosts(COSTS, usual).obstacle(other) == "--optimizer was not told and is sgd"
    assert not KeptCosts(COSTS, other).obstacle(other)


def test_casts_to_fp8_count_as_weights():
    layer = torch.nn.Linear(8, 4)
    layer._fp8_workspaces = {}
    stage = SimpleNamespace(model=layer, decoder=torch.nn.ModuleList([layer, torch.nn.Linear(8, 4)]), more_weights=())
    defaults = {"optimizer": "adam", "use_distributed_optimizer": True, "bf16": True}
    plain, in_fp8 = (_static(arguments(**defaults, **of), stage) for of in ({}, {"fp8": "e4m3", "fp8_recipe": "blockwise"}))
    assert in_fp8.weights - plain.weights == 2 * 8 * 4  # by rows and by columns
