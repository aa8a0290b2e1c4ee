"""Where the costs of a run are from: files, with bytes of the run where a file has none. Torch's collectives are played."""

import json
import logging
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Linear

from megatron_epp.cost.blocks import HEAD
from megatron_epp.cost.memory import FRAGMENTATION_SHARE
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.features.offload import rank_offload
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.offload.rank_offload import RankOffload
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.costs import sources as costs_of_runs
from megatron_epp.mcore.costs import stored as stored_costs
from megatron_epp.mcore.costs.megatron_facts import run_facts
from megatron_epp.plan import EppError
from megatron_epp.port.run_facts import AttentionSizes, RunFacts
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from megatron_epp.tools.formulas.of_run import with_device_memory
from tests.mcore.test_refusals import arguments
from tests.support.mcore.asking import ask_here

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
HERE = analytic_costs(SHAPE, CPU, [2, 2])


def with_static(costs: PipelineCosts, **parts: int) -> PipelineCosts:
    return replace(costs, stages=tuple(replace(s, static=replace(s.static, **parts)) for s in costs.stages))


@pytest.fixture
def first(monkeypatch):
    """This process is the first rank of the job. Gives what it has broadcast."""
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: sent.append(shared[0]))
    return sent


def test_what_is_wrong_with_a_named_file_is_raised_on_all_ranks(monkeypatch, first, tmp_path):
    with pytest.raises(EppError, match=r"--epp-costs nowhere\.json: .*Or give analytic or learn"):
        stored_costs.named(Namespace(epp_costs="nowhere.json"), ask_here)
    (error,) = first
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: shared.__setitem__(0, error))
    with pytest.raises(EppError, match=r"nowhere\.json"):
        stored_costs.named(Namespace(epp_costs="nowhere.json"), ask_here)


def test_costs_of_a_pipeline_in_another_precision_or_of_other_stages_are_refused_by_name():
    half = analytic_costs(replace(SHAPE, bytes_per_value=2), CPU, [1, 2, 1])
    args = Namespace(epp_costs="half.json", epp_latents="off")
    stored_costs.check_costs(args, half, 3, 128.0)
    with pytest.raises(
        EppError, match=r"half.json has costs of messages of 128 bytes per token where this run's take 256.*bf16"
    ):
        stored_costs.check_costs(args, half, 3, 256.0)
    with pytest.raises(EppError, match=r"half.json has costs of 3 stages but the pipeline has 2: .*--epp-costs learn"):
        stored_costs.check_costs(args, half, 2, 128.0)


@pytest.fixture
def one_rank(first, monkeypatch):
    """A pipeline of stages that are all here, whose layers have the bytes of `HERE`."""
    played = {
        "run_facts": lambda args, ask: SHAPE,
        "message_bytes": lambda stage: HERE.hidden_bytes_per_token,
        "by_stage": lambda mine, links: tuple(mine.values()),
        "gathered": lambda mine, links, choose=None: [mine],
        "_with_largest_workspaces": lambda mine: mine,
        "_undisturbed": lambda stages: nullcontext(),
        "_measured_bytes": lambda args, sizes, stage, base, product: with_static(HERE, optimizer=args.optimizer).stages[0],
    }
    for name, stand_in in played.items():
        monkeypatch.setattr(costs_of_runs, name, stand_in)

    def ask(name: str, shape: Any, *asked: Any) -> Any:
        """Answer by formulas of a shape, in the place of facts of a run."""
        sizes = AttentionSizes(*(getattr(shape, field, None) for field in AttentionSizes._fields))
        answers = {"attention_sizes": sizes, "prior": (HERE, LinearTime()), "with_device_memory": next(iter(asked), None)}
        return answers.get(name.partition(":")[2]) or ask_here(name, shape, *asked)

    def learn(args: Namespace) -> PipelineCosts:
        message = lambda tokens: (None, None, "cpu")  # noqa: E731
        stages = {
            number: Namespace(num_layers=2, message=message, model=Linear(1, 1), has_gradient=True) for number in range(2)
        }
        return costs_of_runs.pipeline_costs(args, stages, Namespace(position=0), 2, ask, lambda costs: costs)

    return learn


@pytest.mark.parametrize(
    ("choice", "bytes_per_value", "times"), [("auto", 2, (1, 2)), ("on", 2, (2, 2)), ("off", 2, (1, 1)), ("auto", 4, (1, 1))]
)
def test_an_older_file_is_planned_with_the_heads_and_the_sums_of_the_run(
    one_rank, monkeypatch, tmp_path, choice, bytes_per_value, times
):
    old = json.loads(HERE.to_json())
    for stage in old["stages"]:
        for kv in (block["kv"] for block in stage["blocks"] if block["kv"]):
            del kv["heads"], kv["queries_per_key"], kv["many_gradient_bytes_per_token"]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(old))
    shape = replace(SHAPE, num_query_groups=2, bytes_per_value=bytes_per_value)
    monkeypatch.setattr(costs_of_runs, "run_facts", lambda args, ask: shape)
    args = Namespace(epp_costs=str(path), epp_latents="auto", epp_fragmentation_share=None, epp_fp32_kv_gradients=choice)
    found = one_rank(args)
    assert [(stage.kv.heads, stage.kv.queries_per_key) for stage in found.stages] == [(2, 4)] * 2
    for stage in found.stages:
        sums = stage.kv.gradient_bytes_per_token, stage.kv.many_gradient_bytes_per_token
        assert sums == tuple(size * stage.kv.bytes_per_token for size in times)
    assert replace(found, stages=HERE.stages) == HERE


@pytest.mark.parametrize(
    ("costs", "link"), [("analytic", (HERE.host_latency_us, HERE.host_us_per_byte)), ("learn", (7.0, 0.5))]
)
def test_the_link_to_the_host_is_measured_where_costs_are_learnt(monkeypatch, costs, link):
    monkeypatch.setattr(rank_offload, "measure_offloadable_share", lambda stage: 0.75)
    monkeypatch.setattr(rank_offload, "measure_host_link", lambda device: (7.0, 0.5))
    monkeypatch.setattr(rank_offload, "gathered", lambda mine, links, choose=None: [mine])
    of_run = {"makes_chunks": True, "stages": {0: None}, "links": None, "device": None, "note": lambda step: None}
    found = RankOffload(Namespace(**of_run, args=Namespace(epp_costs=costs))).measured(HERE)
    assert (found.host_latency_us, found.host_us_per_byte) == link
    assert found.offloadable_share == 0.75


def test_an_evaluation_has_nothing_of_the_offload_of_the_iteration_before(monkeypatch):
    monkeypatch.setattr(rank_offload, "offload_handlers", lambda plan, rank, stages, host, offload, inner: offload)
    ours, training = RankOffload(Namespace(makes_chunks=False, rank=0, stages={})), Namespace(forward_only=False)
    ours.host, evaluation = HostMemory(torch.device("cpu"), 1 << 20), Namespace(forward_only=True)
    saved = ours.counting(training, (), lambda: 0)
    assert [ours.running(plan, None, None, {}) for plan in (training, evaluation)] == [saved, None]


def test_the_loss_takes_what_it_takes_on_the_replica_whose_kernel_fails(monkeypatch):
    """A plan is for all replicas."""

    def gather(everyone, mine, group=None):
        everyone[:] = [{0: 0}, mine, {0: 0}, {1: 900}]

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    mine = HERE.stages[1].changed(HEAD, workspace_bytes=300)
    assert costs_of_runs._with_largest_workspaces({1: mine}) == {1: mine.changed(HEAD, workspace_bytes=900)}


def on_gpu(args: Namespace) -> RunFacts:
    return replace(run_facts(args, ask_here), kernel="")


def test_on_a_cpu_the_costs_stay_as_they_are_but_for_a_share_that_was_given():
    facts = run_facts(arguments(padded_vocab_size=1024), ask_here)
    assert with_device_memory(facts, HERE) == HERE
    with_share = with_device_memory(facts.changed(epp_fragmentation_share=0.1), HERE)
    assert with_share.fragmentation_share == 0.1
    assert with_share.stages == HERE.stages


def test_on_a_gpu_passes_and_messages_take_room():
    costs = with_device_memory(on_gpu(arguments(padded_vocab_size=1024)), HERE)
    assert costs.fragmentation_share == FRAGMENTATION_SHARE
    assert costs.message_bytes_per_token == HERE.hidden_bytes_per_token
    running = [stage.layers.working_bytes_per_token for stage in costs.stages]
    assert running == [stage.layers.bytes_per_token for stage in HERE.stages]
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
    args = arguments(num_experts=8, expert_model_parallel_size=4, padded_vocab_size=1024, **flex)
    exchanged = with_device_memory(on_gpu(args), HERE)
    buffer = 4 * 4 * args.hidden_size  # fp32 rows of four ranks
    assert exchanged.exchange_bytes_per_token == buffer
    assert [stage.layers.working_bytes_per_token for stage in exchanged.stages] == running


class Experts(torch.nn.Module):
    """Weights of three experts in one module, as a grouped layer of Transformer Engine has them."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(3):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.zeros(30, 20)))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_a_module_come_together_and_fused_layers_have_a_placeholder_of_every_shape(fused: bool):
    decoder = torch.nn.ModuleList([torch.nn.Linear(30, 40, bias=False), torch.nn.Linear(30, 40, bias=False), Experts()])
    model = torch.nn.ModuleList([torch.nn.Embedding(10, 8), decoder])
    stage, args = SimpleNamespace(model=model, decoder=decoder), Namespace(gradient_accumulation_fusion=fused)
    assert costs_of_runs.new_gradient_bytes(args, stage) == 4 * (10 * 8 if fused else 3 * 30 * 20)
    assert costs_of_runs.placeholder_bytes(args, [stage, stage]) == 4 * fused * (30 * 40 + 30 * 20)


def test_a_profile_of_another_precision_is_named_and_gives_times_alone(caplog, monkeypatch):
    monkeypatch.setattr(costs_of_runs.dist, "get_rank", lambda: 0)
    half = analytic_costs(replace(SHAPE, bytes_per_value=2), CPU, [2, 2])
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        assert costs_of_runs._with_bytes(half, 128.0, TRAINING) == half
        assert not caplog.records
        assert costs_of_runs._with_bytes(half, 256.0, TRAINING).hidden_bytes_per_token == 256.0
    assert "128 bytes per token where this run's take 256" in caplog.text
