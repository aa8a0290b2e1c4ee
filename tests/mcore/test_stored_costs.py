"""A resumed run has the times that the one before has measured, and bytes of its own. Torch's collectives are played."""

import json
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_epp.cost import CPU, ModelShape, PipelineCosts, analytic_costs, analytic_profile
from megatron_epp.mcore.costs import sources as costs_of_runs
from megatron_epp.mcore.costs import stored as stored_costs
from megatron_epp.mcore.costs.probe import Link
from megatron_epp.plan import EppError
from tests.support.failing_disk import swept

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
HERE = analytic_costs(SHAPE, CPU, [2, 2])
TIMES = "forward", "backward", "weight", "extra_forward", "extra_backward", "extra_weight"


def other_times(costs: PipelineCosts, factor: float) -> PipelineCosts:
    """As if measured when the machine was slower."""
    stages = (replace(s, **{name: getattr(s, name).scaled(factor) for name in TIMES}) for s in costs.stages)
    return replace(costs, name="measured", stages=tuple(stages), message_latency_us=7.0 * factor)


def with_static(costs: PipelineCosts, **parts: int) -> PipelineCosts:
    return replace(costs, stages=tuple(replace(s, static=replace(s.static, **parts)) for s in costs.stages))


@pytest.fixture
def first(monkeypatch):
    """This process is the first rank of the job. Gives what it has broadcast."""
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: sent.append(shared[0]))
    return sent


FLAGS = {
    "epp_costs": "measure",
    "epp_offload": "off",
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "epp_placement": "v",
    "epp_split_weight_gradient": False,
}


@pytest.fixture
def resumed(first, tmp_path):
    """The arguments of a run that goes on where one with such costs and flags has ended."""

    def resume(costs: PipelineCosts, **flags: object) -> Namespace:
        stored_costs.keep(Namespace(**FLAGS | flags, save=str(tmp_path)), costs)
        return Namespace(**FLAGS, load=str(tmp_path), save=None)

    return resume


def test_times_are_those_kept_and_bytes_those_of_this_run(resumed):
    kept = with_static(other_times(HERE, 3.0), optimizer=999)
    found = stored_costs.kept_times(resumed(kept), with_static(HERE, optimizer=111))
    assert found == with_static(kept, optimizer=111)


@pytest.mark.parametrize(
    ("kept", "flags", "reason"),
    [
        (analytic_costs(SHAPE, CPU, [1, 3]), {}, "[1, 3] layers where this run's have [2, 2]"),
        (analytic_costs(SHAPE, CPU, [1, 1, 1, 1]), {}, "[1, 1, 1, 1] layers where this run's have [2, 2]"),
        (analytic_costs(replace(SHAPE, bytes_per_value=4), CPU, [2, 2]), {}, "of another precision (--bf16, --fp16)"),
        (HERE, {"tensor_model_parallel_size": 2}, "--tensor-model-parallel-size was 2 and is 1"),
        (HERE, {"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size was 4 and is 2"),
        (HERE, {"epp_placement": "looped"}, "--epp-placement was looped and is v"),
        (HERE, {"epp_split_weight_gradient": True}, "--epp-split-weight-gradient was True and is False"),
    ],
)
def test_times_of_other_stages_are_measured_again_with_a_warning(resumed, caplog, kept, flags, reason):
    assert stored_costs.kept_times(resumed(kept, **flags), HERE) is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert reason in line
    assert "measured again" in line


def test_times_of_another_device_are_measured_again(resumed, monkeypatch, caplog):
    args = resumed(HERE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Fast One")
    assert stored_costs.kept_times(args, HERE) is None
    assert "the device was cpu and is A Fast One" in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"half a fi', "not a cost profile"),
        ("[" * 200_000 + "]" * 200_000, "nested deeper than 100"),
        (
            HERE.to_json().replace('"name"', '"measured_with": ' + "[" * 200 + "]" * 200 + ', "name"', 1),
            "nested deeper than 100",
        ),
        (HERE.to_json().replace('"kv_heads": ', '"kv_heads": 1' + "0" * 400, 1), "is not a whole number from 1"),
        (HERE.to_json(), "--tensor-model-parallel-size was not told and is 1"),
        (HERE.to_json().replace("{", '{"measured_with": null,', 1), "--tensor-model-parallel-size was not told and is 1"),
    ],
)
def test_a_file_that_does_not_say_what_it_is_for_is_measured_again(resumed, caplog, text, reason):
    args = resumed(HERE)
    Path(args.load, stored_costs.FILE_NAME).write_text(text)
    assert stored_costs.kept_times(args, HERE) is None
    assert reason in caplog.text


@pytest.mark.parametrize("offload", ["on", "off"])
def test_a_link_to_the_host_is_kept_where_it_was_measured(resumed, offload):
    kept = replace(HERE, host_latency_us=5.0, host_us_per_byte=0.5)
    found = stored_costs.kept_times(resumed(kept, epp_offload=offload), HERE)
    expected = kept if offload == "on" else HERE
    assert (found.host_latency_us, found.host_us_per_byte) == (expected.host_latency_us, expected.host_us_per_byte)


def test_where_nothing_is_resumed_nothing_is_kept(first, tmp_path, caplog):
    for load in (None, str(tmp_path)):
        assert stored_costs.kept_times(Namespace(load=load), HERE) is None
    assert not caplog.records


def test_a_rank_that_sees_no_file_goes_by_what_the_first_has_found(monkeypatch, tmp_path):
    kept = other_times(HERE, 3.0)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: shared.__setitem__(0, kept))
    assert stored_costs.kept_times(Namespace(load=str(tmp_path)), HERE) == kept


def test_a_rank_that_sees_a_file_which_the_first_does_not_measures_too(monkeypatch, resumed):
    args = resumed(HERE)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: None)
    assert stored_costs.kept_times(args, HERE) is None


def test_what_is_wrong_with_a_named_file_is_raised_on_all_ranks(monkeypatch, first, tmp_path):
    with pytest.raises(EppError, match=r"--epp-costs nowhere\.json: .*Or give analytic, measure or learn"):
        stored_costs.named(Namespace(epp_costs="nowhere.json"))
    (error,) = first
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda shared, src: shared.__setitem__(0, error))
    with pytest.raises(EppError, match=r"nowhere\.json"):
        stored_costs.named(Namespace(epp_costs="nowhere.json"))


def test_whatever_fails_on_the_first_rank_is_told_to_the_others(first):
    """Which would wait for its answer."""

    def fail():
        raise TypeError("argument of type 'NoneType' is not iterable")

    with pytest.raises(EppError, match=r"first rank of the job failed \(TypeError: argument") as raised:
        stored_costs.of_first(fail)
    assert first == [raised.value]
    assert isinstance(raised.value.__cause__, TypeError)


def test_costs_of_a_pipeline_in_another_precision_or_of_other_stages_are_refused_by_name():
    half = analytic_costs(replace(SHAPE, bytes_per_value=2), CPU, [1, 2, 1])
    assert stored_costs.checked(half, "half.json", 3, 128.0) is half
    with pytest.raises(
        EppError, match=r"half.json has costs of messages of 128 bytes per token where this run's take 256.*--bf16"
    ):
        stored_costs.checked(half, "half.json", 3, 256.0)
    with pytest.raises(EppError, match=r"half.json has costs of 3 stages but the pipeline has 2: .*--epp-costs measure"):
        stored_costs.checked(half, "half.json", 2, 128.0)


@pytest.fixture
def one_rank(first, monkeypatch):
    """A pipeline of stages that are all here, whose layers have the bytes of `HERE` and take what `times` says."""
    times = {}
    played = {
        "model_shape": lambda args: SHAPE,
        "formulas": lambda args: analytic_profile(SHAPE, CPU),
        "message_bytes": lambda stage: HERE.hidden_bytes_per_token,
        "_by_stage": lambda mine, links: tuple(mine.values()),
        "gathered": lambda mine, links: [mine],
        "_with_largest_workspaces": lambda mine: mine,
        "_undisturbed": lambda stages: nullcontext(),
        "_measured_bytes": lambda args, stage, base: with_static(HERE, optimizer=args.optimizer).stages[0],
        "measure_times": lambda stage, base, context: replace(base, forward=base.forward.scaled(times["factor"])),
        "measure_link": lambda stage, links, position: Link(times["factor"], 0.0, 0.0),
    }
    for name, stand_in in played.items():
        monkeypatch.setattr(costs_of_runs, name, stand_in)

    def learn(args: Namespace, factor: float) -> PipelineCosts:
        times["factor"] = factor
        stages = {number: Namespace(num_layers=2, num_halves=4) for number in range(2)}
        return costs_of_runs.pipeline_costs(args, stages, Namespace(position=0), (0, 1))

    return learn


def test_a_run_resumed_with_other_replicas_has_kept_times_and_optimizer_states_of_its_own(one_rank, tmp_path):
    common = {"epp_costs": "measure", "epp_offload": "off", "epp_fragmentation_share": None, "seq_length": 64}
    common["epp_warm_up"] = "auto"
    args = Namespace(**common, data_parallel_size=2, optimizer=500, save=str(tmp_path / "a"), load=None)
    before = one_rank(args, 2.0)
    assert before.message_latency_us == 2.0
    resumed = Namespace(**common, data_parallel_size=1, optimizer=1000, save=str(tmp_path / "b"), load=args.save)
    after = one_rank(resumed, 9.0)
    assert after == with_static(before, optimizer=1000)
    again = one_rank(Namespace(**vars(resumed) | {"load": resumed.save}), 9.0)
    assert again == after


@pytest.mark.parametrize(
    ("choice", "bytes_per_value", "times"), [("auto", 2, (1, 2)), ("on", 2, (2, 2)), ("off", 2, (1, 1)), ("auto", 4, (1, 1))]
)
def test_an_older_file_is_planned_with_the_heads_and_the_sums_of_the_run(
    one_rank, monkeypatch, tmp_path, choice, bytes_per_value, times
):
    old = json.loads(HERE.to_json())
    for stage in old["stages"]:
        del stage["kv_heads"], stage["queries_per_key"], stage["many_kv_gradient_bytes_per_token"]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(old))
    shape = replace(SHAPE, num_query_groups=2, bytes_per_value=bytes_per_value)
    monkeypatch.setattr(costs_of_runs, "model_shape", lambda args: shape)
    args = Namespace(epp_costs=str(path), epp_fragmentation_share=None, epp_fp32_kv_gradients=choice)
    found = one_rank(args, 1.0)
    assert [(stage.kv_heads, stage.queries_per_key) for stage in found.stages] == [(2, 4)] * 2
    for stage in found.stages:
        sums = stage.kv_gradient_bytes_per_token, stage.many_kv_gradient_bytes_per_token
        assert sums == tuple(size * stage.kv_bytes_per_token for size in times)
    assert replace(found, stages=HERE.stages) == HERE


def test_the_loss_takes_what_it_takes_on_the_replica_whose_kernel_fails(monkeypatch):
    """A plan is for all replicas."""

    def gather(everyone, mine, group=None):
        everyone[:] = [{0: 0}, mine, {0: 0}, {1: 900}]

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    mine = replace(HERE.stages[1], workspace_bytes=300)
    assert costs_of_runs._with_largest_workspaces({1: mine}) == {1: replace(mine, workspace_bytes=900)}


def test_whichever_step_of_the_disk_fails_kept_costs_are_whole_and_the_error_names_them(tmp_path):
    path, refused = tmp_path / "checkpoints" / "costs.json", 0
    stored_costs.write_whole(path, "old")
    for answer in swept(lambda: stored_costs.write_whole(path, "new")):
        if isinstance(answer, EppError):
            refused += 1
            assert str(answer) == f"cannot write {path}: No space left on device"
            assert path.read_text() == "old"
        else:
            assert answer is None
            assert path.read_text() == "new"
        path.write_text("old")
    assert refused >= 4
