"""Settings of a model's configuration for the schedule are honoured by plans as by Megatron's schedules, or refused by name."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_epp.mcore.arguments.microbatches import check_order
from megatron_epp.mcore.training.reduction import Reduction
from megatron_epp.plan import EppError
from tests.support.mcore.forked import launch

PROGRAM = Path(__file__).parents[1] / "support" / "mcore" / "honoured_worker.py"
TOLERANCE = 1e-5
Refused = Callable[[Mapping[str, object], Mapping[str, object]], str]
PIPELINES = {
    "a stage per rank": (2, "24,8,32,16,8,32"),
    "two stages per rank, no token trained": (4, "24,24,24,24,24,24"),
}


@pytest.fixture(scope="module", params=PIPELINES)
def cases(request: pytest.FixtureRequest) -> tuple[dict[str, Any], ...]:
    """Output of every rank for every case."""
    finished = launch(2, PROGRAM, *PIPELINES[request.param])
    assert finished.returncode == 0, finished.output[-5000:]
    return finished.figures


def of(cases: tuple[dict[str, Any], ...], name: str) -> list[dict[str, Any]]:
    found = [case for case in cases if case["case"] == name]
    assert len(found) == 2
    return found


def called(events: list[list[Any]], *names: str) -> list[list[Any]]:
    return sorted((event for event in events if event[0] in names), key=str)


def test_gradients_are_those_of_stock_in_every_case(cases: tuple[dict[str, Any], ...]) -> None:
    assert [case for case in cases if case["worst"] > TOLERANCE or not case["finite"]] == []


def test_reductions_start_once_with_complete_gradients_and_finalisation_runs_once(cases: tuple[dict[str, Any], ...]) -> None:
    for case in of(cases, "synchronised"):
        for names in (("gradients", "complete", "incomplete"), ("finalize",)):
            assert called(case["planned"], *names) == called(case["stock"], *names)
        assert len(called(case["planned"], "finalize")) == 1 == len(called(case["planned"][-1:], "finalize"))
        assert not called(case["planned"], "incomplete")
        held, released = called(case["planned"], "held"), called(case["planned"], "released")
        assert [number for _, number in held] == [number for _, number in released] == [*range(case["world"])]
        assert called(case["planned"][: case["world"]], "parameters") == [["parameters", n] for n in range(case["world"])]


def test_without_a_function_that_starts_reductions_nothing_holds_hooks_in_the_last_backward(
    cases: tuple[dict[str, Any], ...],
) -> None:
    for case in of(cases, "synchronised_by_hooks"):
        assert case["planned"] == case["stock"] == [["held in the last backward", 0]] * case["world"]


@pytest.mark.parametrize("name", ["three_parts", "per_token", "autocast", "forward_only"])
def test_calls_are_those_of_stock(cases: tuple[dict[str, Any], ...], name: str) -> None:
    for case in of(cases, name):
        assert case["planned"] == case["stock"]
        assert bool(case["stock"]) == (name != "forward_only")


def test_layers_that_run_again_do_so_under_the_autocast_of_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_epp.mcore.microbatches import stage as module

    again: list[Any] = []

    def run_again(run: Any, args: Any, kwargs: Any) -> Any:
        again.append(run)
        return run(*args, **kwargs)

    monkeypatch.setattr(module, "run_again", run_again)
    stage, start = module.MicrobatchStage.__new__(module.MicrobatchStage), torch.eye(2, requires_grad=True)
    stage._num_recomputed, stage._device = 1, torch.device("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert stage._run_layer(0, torch.matmul, start, start).dtype == torch.bfloat16
    assert again[0](start, start).dtype == torch.bfloat16  # as a backward would
    assert stage._run_layer(0, torch.matmul, start, start).dtype == torch.float32


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    """A function that returns what `wrap` refuses a model's configuration with, and that of its data parallelism."""
    from megatron_epp.mcore.microbatches import wrap

    def told(config: Mapping[str, object], data_parallel: Mapping[str, object]) -> str:
        monkeypatch.setattr(wrap, "get_model_config", lambda model: Namespace(**config))
        model: Any = Namespace(ddp_config=Namespace(**data_parallel))
        with pytest.raises(EppError) as error:
            wrap.arguments_of([model], {"epp_order": "planned"})
        return str(error.value)

    return told


def test_settings_of_a_models_configuration_that_a_plan_cannot_honour_are_refused(refused: Refused) -> None:
    assert "--overlap-moe-expert-parallel-comm" in refused({"overlap_moe_expert_parallel_comm": True}, {})
    assert "--cuda-graph-impl local" in refused({"cuda_graph_impl": "local", "hybrid_context_parallel": False}, {})
    assert "--fp8-format hybrid" in refused({"fp8": "hybrid"}, {})
    assert "--num-distributed-optimizer-instances 2" in refused({}, {"num_distributed_optimizer_instances": 2})
    for routers in ("global_aux_loss", ["aux_loss", "global_aux_loss"]):
        assert "global_aux_loss: replicas have plans" in refused({"moe_router_load_balancing_type": routers}, {})
    assert "--use-megatron-fsdp" in refused({"cuda_graph_impl": "none"}, {"use_megatron_fsdp": True})
    for name in ("hybrid", "dynamic"):
        said = f"--{name}-context-parallel True (leave it out: its collectives join replicas, which have plans of their own)"
        assert said in refused({f"{name}_context_parallel": True}, {})


def test_router_replay_is_refused_by_the_names_that_frameworks_give_it_unless_the_order_is_given(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = (
        "(microbatches must run in their own order: add --epp-order given, or order='given' where megatron_epp.wrap is called)"
    )
    names = ("moe_enable_routing_replay", "enable_routing_replay", "use_routing_replay", "use_rollout_routing_replay")
    for name in names:
        assert f"--{name.replace('_', '-')} True {order}" in refused({name: True}, {})
    check_order(Namespace(**dict.fromkeys(names, True)), "given")
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
    assert f"ENABLE_ROUTING_REPLAY=1 in the environment {order}" in refused({}, {})
    check_order(Namespace(), "given")
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "0")
    check_order(Namespace(), "planned")


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
