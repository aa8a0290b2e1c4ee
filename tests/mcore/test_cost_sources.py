"""Costs of files and of a run, latents that it hands on, and a device's memory without that of libraries."""

import argparse
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
from megatron_epp.cost.memory import FRAGMENTATION_SHARE, SETUP_MARGIN_BYTES, room_bytes
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.features.offload import rank_offload
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.offload.rank_offload import RankOffload
from megatron_epp.mcore.arguments.consequences import prepare_epp_args
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.costs import sources as costs_of_runs
from megatron_epp.mcore.costs import stored
from megatron_epp.mcore.costs import stored as stored_costs
from megatron_epp.mcore.costs.megatron_facts import run_facts
from megatron_epp.mcore.model.kinds import latent_attention
from megatron_epp.mcore.training import caps, layout_search
from megatron_epp.plan import UNLIMITED_BYTES, EppError
from megatron_epp.port.run_facts import AttentionSizes, RunFacts
from megatron_epp.tools.cli.planning_flags import cap_of
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_costs, analytic_profile
from megatron_epp.tools.formulas.library import Cluster
from megatron_epp.tools.formulas.of_run import model_shape, with_device_memory
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


STAGES = (1, False), (2, False), (1, False)
OTHER_STAGES = {
    STAGES[:2]: "1, 2",
    ((1, False), (1, False), (2, False)): "1, 1, 2",
    (*STAGES[:2], (1, True)): "1, 2, 1 and multi-token prediction",
}


def test_costs_of_a_pipeline_in_another_precision_or_of_other_stages_are_refused_by_name():
    half = analytic_costs(replace(SHAPE, bytes_per_value=2), CPU, [1, 2, 1])
    args = Namespace(epp_costs="half.json", epp_latents="off")
    stored_costs.check_costs(args, half, STAGES, 128.0)
    with pytest.raises(
        EppError, match=r"half.json has costs of messages of 128 bytes per token where this run's take 256.*bf16"
    ):
        stored_costs.check_costs(args, half, STAGES, 256.0)
    for stages, layers in OTHER_STAGES.items():
        message = f"half.json has costs of layers 1, 2, 1, and this run has {layers}: .*--epp-costs learn"
        with pytest.raises(EppError, match=message):
            stored_costs.check_costs(args, half, stages, 128.0)
    ahead = analytic_costs(replace(SHAPE, bytes_per_value=2, predictions=1), CPU, [1, 2, 1])
    stored_costs.check_costs(args, ahead, (*STAGES[:2], (1, True)), 128.0)
    with pytest.raises(EppError, match=r"of layers 1, 2, 1 and multi-token prediction, and this run has 1, 2, 1:"):
        stored_costs.check_costs(args, ahead, STAGES, 128.0)


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
            number: Namespace(num_layers=2, depths=0, message=message, model=Linear(1, 1), has_gradient=True)
            for number in range(2)
        }
        return costs_of_runs.pipeline_costs(args, stages, Namespace(position=0), ask, lambda costs: costs)

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


LATENT = "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 32 --qk-pos-emb-head-dim 4 --v-head-dim 32 "
LATENT += "--pipeline-model-parallel-size 2 --seq-length 4096 --global-batch-size 2"


def run_of(flags: str, **values: Any) -> argparse.Namespace:
    """Arguments of a run of two stages, as they are when the model is about to be built."""
    args = arguments(*flags.split(), processes=2, **values)
    prepare_epp_args(args)
    args.padded_vocab_size, args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 1024, 1, None
    return args


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run be one process with data of its own, and formulas for its costs."""
    monkeypatch.setattr(layout_search, "made_by_first", lambda make: make())
    monkeypatch.setattr(layout_search, "ask", ask_here)
    monkeypatch.setattr(layout_search, "first_batches", lambda args: iter([(3000, 500)]))


@pytest.mark.parametrize(
    ("flags", "settled"),
    [
        (LATENT, "off"),
        (f"{LATENT} --epp-memory-cap-gb 0.02", "on"),
        (f"{LATENT} --epp-memory-cap-gb 0.02 --epp-latents off", "off"),
        (f"{LATENT} --epp-latents on", "on"),
        (f"{LATENT} --epp-memory-cap-gb 0.02 --skip-train", "off"),
    ],
)
def test_latents_are_handed_on_where_faster(alone: None, flags: str, settled: str, caplog: pytest.LogCaptureFixture) -> None:
    args = run_of(flags)
    with caplog.at_level("INFO"):
        layout_search.settle_latents(args)
    assert args.epp_latents == settled
    told = [record.getMessage() for record in caplog.records if "--epp-latents auto" in record.getMessage()]
    planned = "latent" in flags and "--epp-latents" not in flags and "skip" not in flags
    assert len(told) == planned


@pytest.mark.parametrize(("theirs", "own"), [("on", "off"), ("off", "on")])
def test_costs_of_a_pipeline_are_of_what_the_run_hands_on(theirs: str, own: str) -> None:
    costs = pipeline_costs(theirs)
    sizes = [(count, False) for count in costs.num_layers], costs.hidden_bytes_per_token
    stored.check_costs(argparse.Namespace(epp_latents=theirs), costs, *sizes)
    with pytest.raises(EppError, match=rf"costs\.json has costs of slices .* give another file; set latents to {theirs}"):
        stored.check_costs(argparse.Namespace(epp_latents=own, epp_costs="costs.json"), costs, *sizes)


@pytest.mark.parametrize("choice", ["on", "off"])
def test_costs_of_a_pipeline_settle_the_choice(alone: None, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setattr(layout_search, "named", lambda args, ask: pipeline_costs(choice))
    args = run_of(LATENT)
    layout_search.settle_latents(args)
    assert args.epp_latents == choice


def pipeline_costs(choice: str) -> PipelineCosts:
    args = run_of(f"{LATENT} --epp-latents {choice}")
    return analytic_profile(model_shape(run_facts(args, ask_here)), CPU).costs([args.num_layers // 2] * 2)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_norm_that_a_layer_fuses_is_applied_to_the_latents(normalization: str, zero_centered: bool) -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(8), torch.randn(8)
    linear = SimpleNamespace(
        layer_norm_weight=weight - 1 if zero_centered else weight,
        layer_norm_bias=bias,
        zero_centered_gamma=zero_centered,
        normalization=normalization,
        eps=1e-3,
    )
    centered = x if normalization == "RMSNorm" else x - x.mean(1, keepdim=True)
    expected = centered / (centered.square().mean(1, keepdim=True) + 1e-3).sqrt() * weight
    expected = expected if normalization == "RMSNorm" else expected + bias
    torch.testing.assert_close(latent_attention._normed(linear, x), expected)
    assert latent_attention._normed(torch.nn.Linear(8, 8), x) is x


GIB = 1 << 30


def test_there_is_room_for_what_is_free_and_what_torch_has_less_a_margin_and_little_makes_no_other_cap():
    for free_gib, reserved_gib, room_gib in (60, 15, 74), (60.3, 15, 74.25), (74.99, 0, 73.75), (0.5, 0.5, 0), (0.2, 0, 0):
        assert room_bytes(int(free_gib * GIB), int(reserved_gib * GIB)) == room_gib * GIB
    assert len({room_bytes(60 * GIB + more, 15 * GIB) for more in range(0, GIB // 4, GIB // 64)}) == 1
    assert SETUP_MARGIN_BYTES == GIB


@pytest.fixture
def device(monkeypatch):
    """A GPU of 80 GiB; says how much of it is free and how much torch has reserved."""
    left = SimpleNamespace(free=0, reserved=0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left.free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: left.reserved)
    return left


@pytest.mark.parametrize(("free", "asked", "cap"), [(50, None, 72), (50, 70, 70), (50, 78, 75), (40, None, 65), (40, 70, 65)])
def test_a_cap_is_what_is_wanted_or_the_room_there_is(device, free, asked, cap):
    device.free, device.reserved = free * GIB, 26 * GIB
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=asked)) == cap * GIB


def test_without_a_cap_a_run_takes_as_much_of_a_device_as_the_command_line_plans_for(device):
    device.free = 79 * GIB
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=None)) == cap_of(None, Cluster("of 80 GiB", H100, 80.0)) < 80 * GIB


def run(monkeypatch, folder, *, position: int = 0, others=(), **changes) -> tuple[int, ...]:
    """The caps of a run with two pipeline ranks that resumes what is in a folder, in GiB, and saves there. This rank is the
    first of the job; of others there are position and cap in bytes.
    """
    monkeypatch.setattr(caps, "made_by_first", lambda make: make())
    monkeypatch.setattr(caps, "from_each_of_job", lambda mine: [mine, *others])
    given = {"epp_memory_cap_gb": None, "pipeline_model_parallel_size": 2, "rank": 0, "load": str(folder), "save": str(folder)}
    return tuple(cap / GIB for cap in caps.agreed_caps(Namespace(**given | changes), position))


OTHERS = [(1, 70 * GIB), (0, 74 * GIB), (1, 69 * GIB)]


def test_a_resumed_run_has_the_caps_of_the_run_before_though_its_kernels_are_loaded_already(device, monkeypatch, tmp_path):
    device.free, device.reserved = int(30.3 * GIB), 40 * GIB
    assert run(monkeypatch, tmp_path, others=OTHERS) == (69.25, 69)
    device.free, device.reserved = int(22.2 * GIB), 48 * GIB  # the same with states, and 0.1 GiB of code
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=None)) == 69 * GIB  # a step less, by what is free
    for _ in range(2):
        assert run(monkeypatch, tmp_path, others=OTHERS) == (69.25, 69)
        device.free += GIB // 4  # and so it stays in the run after that


@pytest.mark.parametrize("now_gib", [53, 65])
def test_a_resumed_run_on_a_device_with_other_room_has_caps_of_its_own(device, monkeypatch, tmp_path, now_gib, caplog):
    device.free = 60 * GIB
    assert run(monkeypatch, tmp_path, others=OTHERS) == (59, 69)
    device.free = (now_gib + 1) * GIB
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        assert run(monkeypatch, tmp_path, others=OTHERS) == (now_gib, 69)
    assert f"plans fill {now_gib}.00 GiB of the device of rank 0, where those of the run before filled 59.00" in caplog.text


@pytest.mark.parametrize("changes", [{"epp_memory_cap_gb": 58.9}, {"pipeline_model_parallel_size": 1}])
def test_a_resumed_run_that_wants_another_cap_or_has_other_ranks_has_its_own(device, monkeypatch, tmp_path, changes):
    device.free = 60 * GIB
    run(monkeypatch, tmp_path, others=OTHERS)
    device.free -= GIB // 4
    assert run(monkeypatch, tmp_path, others=OTHERS, **changes)[0] in (58.75, int(58.9 * GIB) / GIB)


OF_BEFORE = {"wanted_bytes": 72 * GIB, "cap_bytes": [58 * GIB, 69 * GIB]}
"""Files of versions that gave them no schema."""
NEGATIVE = OF_BEFORE | {"schema": "megatron-epp/caps", "version": 1, "cap_bytes": [-1, 69 * GIB]}


@pytest.mark.parametrize("text", ["[1, 2", "{}", json.dumps(OF_BEFORE), json.dumps(NEGATIVE)])
def test_caps_that_cannot_be_read_are_named(device, monkeypatch, tmp_path, caplog, text):
    device.free = 60 * GIB
    (tmp_path / caps.FILE_NAME).write_text(text)
    with caplog.at_level(logging.WARNING, logger="megatron_epp"):
        assert run(monkeypatch, tmp_path, others=OTHERS) == (59, 69)
    assert f"{tmp_path / caps.FILE_NAME} cannot be read" in caplog.text


def test_without_a_device_a_cap_is_what_is_asked_and_nothing_is_kept(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path, others=OTHERS, epp_memory_cap_gb=0.5) == (0.5, 69)
    assert not any(tmp_path.iterdir())
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=None)) == UNLIMITED_BYTES
    assert caps.cap_bytes(Namespace(epp_memory_cap_gb=0.5)) == GIB // 2


def test_a_cap_that_was_asked_for_and_is_lowered_is_a_warning_with_the_numbers(device, caplog):
    caplog.set_level(logging.INFO)
    caps.tell_lowered(Namespace(epp_memory_cap_gb=70), [70 * GIB, 70 * GIB])
    caps.tell_lowered(Namespace(epp_memory_cap_gb=None), [72 * GIB])
    assert caplog.records == []
    caps.tell_lowered(Namespace(epp_memory_cap_gb=70), [65 * GIB, 70 * GIB])
    caps.tell_lowered(Namespace(epp_memory_cap_gb=None), [65 * GIB, 65 * GIB])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    asked, default = (record.getMessage() for record in caplog.records)
    assert "--epp-memory-cap-gb, 70.00 GiB, is more than" in asked
    assert "fill 65.00, 70.00 GiB on pipeline ranks 0 to 1 (free memory and what torch has reserved, less 1.00 GiB)" in asked
    assert "90% of the device's memory, 72.00 GiB" in default
