"""Settings of a model's configuration for the schedule are honoured by plans as by Megatron's schedules, or refused by name."""

import ast
import contextlib
import importlib
from argparse import Namespace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_epp import wrap
from megatron_epp.mcore import releases
from megatron_epp.mcore.arguments.refusals import refuse
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.arguments.table import names_in_loop
from megatron_epp.mcore.iteration import reduction
from megatron_epp.mcore.iteration.reduction import Reduction
from megatron_epp.plan import EppError
from megatron_epp.planner import Options
from tests.mcore.test_mistakes import ROUTER_REPLAY
from tests.support.mcore.forked import job, of_ranks
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN

TOLERANCE = 1e-5
Cases = tuple[dict[str, Any], ...]
PIPELINES = {"a stage per rank": (2, UNEVEN), "two stages per rank, no token trained": (4, EVEN)}


@pytest.fixture(scope="module", params=PIPELINES)
def cases(request: pytest.FixtureRequest) -> tuple[dict[str, Any], ...]:
    stages, lengths = PIPELINES[request.param]
    return (*chain.from_iterable(of_ranks(job(2, "config_functions:honoured", stages=stages, lengths=lengths))),)


def of(cases: tuple[dict[str, Any], ...], name: str) -> list[dict[str, Any]]:
    found = [case for case in cases if case["case"] == name]
    assert len(found) == 2
    return found


def called(events: list[list[Any]], *names: str) -> list[list[Any]]:
    return sorted((event for event in events if event[0] in names), key=str)


def test_gradients_are_those_of_stock_in_every_case(cases: tuple[dict[str, Any], ...]) -> None:
    assert [case for case in cases if case["worst"] > TOLERANCE or not case["finite"]] == []
    assert "own_groups" in {case["case"] for case in cases}


def test_reductions_start_once_with_complete_gradients_and_finalisation_runs_once(cases: Cases) -> None:
    for case in of(cases, "synchronised"):
        for names in (("gradients", "complete", "incomplete"), ("finalize",)):
            assert called(case["planned"], *names) == called(case["stock"], *names)
        assert len(called(case["planned"], "finalize")) == 1 == len(called(case["planned"][-1:], "finalize"))
        assert not called(case["planned"], "incomplete")
        held, released = called(case["planned"], "held"), called(case["planned"], "released")
        assert [number for _, number in held] == [number for _, number in released] == [*range(case["world"])]
        world = case["world"]
        assert called(case["planned"][world : 2 * world], "parameters") == [["parameters", n] for n in range(world)]


def test_without_a_function_that_starts_reductions_nothing_holds_hooks_in_the_last_backward(cases: Cases) -> None:
    for case in of(cases, "synchronised_by_hooks"):
        assert case["planned"] == case["stock"] == [["held in the last backward", 0]] * case["world"]


@pytest.mark.parametrize("name", ["three_parts", "per_token", "autocast", "forward_only"])
def test_calls_are_those_of_stock(cases: tuple[dict[str, Any], ...], name: str) -> None:
    for case in of(cases, name):
        assert case["planned"] == case["stock"]
        assert bool(case["stock"]) == (name != "forward_only")


def test_layers_that_run_again_do_so_under_the_autocast_of_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_epp.mcore.iteration import microbatch_stage as module

    again: list[Any] = []

    def run_again(run: Any, args: Any, kwargs: Any, in_fp8: bool) -> Any:
        again.append(run)
        return run(*args, **kwargs)

    monkeypatch.setattr(module, "run_again", run_again)
    stage, start = module.MicrobatchStage.__new__(module.MicrobatchStage), torch.eye(2, requires_grad=True)
    stage._in_fp8 = False
    stage._num_recomputed, stage._device = 1, torch.device("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stage._run_layer(0, torch.matmul, start, start).dtype == torch.bfloat16
    assert again[0](start, start).dtype == torch.bfloat16  # as a backward would
    assert stage._run_layer(0, torch.matmul, start, start).dtype == torch.float32


def test_router_replay_is_taken_in_the_given_order_and_its_variable_refused_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(Namespace(**dict.fromkeys(ROUTER_REPLAY, True), epp_order="given"), Door.MODEL)
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
    with pytest.raises(EppError, match=r"ENABLE_ROUTING_REPLAY=1 in the .*: use megatron_epp.wrap.order='given'"):
        refuse(Namespace(epp_order="planned"), Door.MODEL)
    refuse(Namespace(epp_order="given"), Door.MODEL)
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "0")
    refuse(Namespace(epp_order="planned"), Door.MODEL)


def test_a_model_of_samples_may_have_megatrons_replay_and_no_queue_of_a_framework() -> None:
    of_samples = {"epp_order": "planned", "epp_microbatches": "plan"}
    refuse(Namespace(moe_enable_routing_replay=True, **of_samples), Door.MODEL)
    with pytest.raises(EppError, match=r"use_routing_replay=True .*: leave it out, and give samples a column routes"):
        refuse(Namespace(use_routing_replay=True, **of_samples), Door.MODEL)


SCHEDULES, FINALIZATION = "megatron.core.pipeline_parallel.schedules", "megatron.core.distributed.finalize_model_grads"


@pytest.mark.parametrize(
    ("module", "name", "function", "says"),
    [
        (SCHEDULES, "backward_step", lambda output_tensor, config: None, "takes (output_tensor, config) and not (input"),
        (SCHEDULES, "deallocate_output_tensor", lambda pipeline, out: None, "takes (pipeline, out) and not ("),
        (SCHEDULES, "deallocate_output_tensor", None, "in which there is no"),
        (FINALIZATION, "finalize_model_grads", lambda model, num_tokens: None, "takes (model, num_tokens) and not ("),
    ],
)
def test_a_function_of_megatrons_that_takes_other_arguments_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Any, says: str
) -> None:
    monkeypatch.setattr(importlib.import_module(module), name, function)
    with pytest.raises(EppError) as error:
        wrap()
    for fact in (f"cannot be run with megatron-core {releases.installed_version()}", f"{module}:{name}", says):
        assert fact in str(error.value)


def test_a_function_of_megatrons_that_is_wrapped_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(*args: Any, **kwargs: Any) -> None: ...

    monkeypatch.setattr(f"{SCHEDULES}.forward_step", wrapped)
    wrap()


def test_the_arguments_that_are_checked_are_those_of_the_calls() -> None:
    package = Path(releases.__file__).parent
    found = {}
    for name in ("iteration/microbatch_stage.py", "iteration/base_run.py", "model/stage.py"):
        for call in (node for node in ast.walk(ast.parse((package / name).read_text())) if isinstance(node, ast.Call)):
            found[ast.unparse(call.func)] = len(call.args), [word.arg for word in call.keywords if word.arg]
    names = {"finalize_model_grads": "config.finalize_model_grads_func", "deallocate_output_tensor": "deallocate_output_tensor"}
    for target, (by_position, by_name) in releases.CALLED.items():
        name = target.partition(":")[2]
        assert found[names.get(name, f"schedules.{name}")] == (len(by_position.split()), by_name.split())


def test_an_untested_release_causes_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(releases, "installed_version", lambda: "0.17.1")
    releases.tell_untested.cache_clear()
    wrap(allow_unknown_megatron=True)
    assert caplog.messages == []
    wrap()
    wrap()
    (line,) = caplog.messages
    assert line.startswith("megatron-core 0.17.1 is installed, and megatron-epp is tested with >=0.18,<0.20")
    releases.tell_untested.cache_clear()


def test_a_model_that_knows_no_process_groups_gets_those_of_the_parallel_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a multimodal one, which Megatron's own schedules run."""
    monkeypatch.setattr(reduction.ProcessGroupCollection, "use_mpu_process_groups", lambda: "those of the parallel state")
    inner = torch.nn.Linear(1, 1)
    outer = torch.nn.Sequential()
    outer.module = inner
    for model in (inner, outer):
        assert reduction.process_groups(model) == "those of the parallel state"
    inner.pg_collection = "its own"  # type: ignore[assignment]
    assert reduction.process_groups(outer) == "its own"


def test_a_models_own_recompute_decides_wherever_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_epp.mcore.iteration.microbatch_stage import MicrobatchStage, layers_of

    off, on = Namespace(recompute_granularity=None), Namespace(recompute_granularity="selective")
    stage = MicrobatchStage.__new__(MicrobatchStage)

    def told(model: Any, config: Any) -> str:
        stage.model, stage.config = model, config
        return stage.recompute_obstacle

    decoder, tower = Namespace(layers=[1, 2], config=off), Namespace(decoder=Namespace(layers=[3], config=off))
    for model in (
        Namespace(decoder=decoder),
        Namespace(module=Namespace(decoder=decoder)),
        Namespace(decoder=None, language_model=Namespace(decoder=decoder), vision_model=tower),
        Namespace(module=Namespace(thinker=Namespace(language_model=Namespace(decoder=decoder)))),
    ):
        assert layers_of(model) == [1, 2]  # type: ignore[arg-type]
        assert told(model, off) == ""
        assert told(model, on).startswith("the model's own recompute_granularity=selective decides: leave it out")
        decoder.config = on
        assert told(model, off).startswith("the model's own recompute_granularity=selective decides: leave it out")
        decoder.config = off
    for model in (Namespace(decoder=Namespace()), Namespace(language_model=None, encoder=decoder)):
        assert layers_of(model) == ()  # type: ignore[arg-type]
        assert told(model, off).startswith("Namespace has no decoder with layers, nor a language_model with one")


def test_offload_is_refused_where_plans_recompute_nothing_unless_it_is_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_epp.mcore.iteration import microbatch_run as pipeline

    monkeypatch.setattr(pipeline.dist, "get_rank", lambda: 0)
    left = pipeline._without_recompute(Options(offload=True), "a reason", names_in_loop(["offload"]), is_asked=False)
    assert left == Options(recompute=0)
    with pytest.raises(EppError, match=r"^offload takes the place of recompute, and plans recompute no layers: a reason"):
        pipeline._without_recompute(Options(offload=True), "a reason", names_in_loop(["offload"]), is_asked=True)


def test_one_function_that_holds_all_chunks_is_left_and_entered_again_around_each_last_backward() -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def no_sync() -> Any:
        log.append("held")
        yield
        log.append("released")

    config = Namespace(no_sync_func=no_sync, grad_sync_func=None)
    with Reduction(config, [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)], True, False) as reduction:
        for index in (1, 0):
            reduction.before_last_gradient(index)
            log.append(f"{index}!")
            reduction.reduce(index)
    assert log == ["held", "released", "1!", "held", "released", "0!"]
