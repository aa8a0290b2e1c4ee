"""A script's own microbatches, run by plans, train as Megatron's own schedules train them: its data, forward step and loss."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron_epp import wrap
from megatron_epp.plan import EppError
from tests.support.mcore.forked import job, launch, of_ranks, train
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN
from tests.support.mcore.launch import TINY, Finished

PLANS = "--epp --epp-microbatches user"
ITERATIONS = 6
"""One to warm up, three to learn costs from, two with plans made from these."""
DECIDES = (
    "the model's own recompute_granularity={} decides: leave it out, and plans recompute as many layers as the cap needs "
    "(memory_cap_gb, --epp-memory-cap-gb)"
)
TOLERANCE = 1e-5
"""Largest relative difference of losses and of norms of gradients: replicas and stages may add in another order."""

CELLS = {
    "one process": (1, ""),
    "full recompute, loss per token": (
        2,
        "--pipeline-model-parallel-size 2 --calculate-per-token-loss "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}
MORE_CELLS = {
    "pipeline": (2, "--pipeline-model-parallel-size 2"),
    "tensor and sequence parallel": (4, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "experts shared by replicas": (
        4,
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall "
        "--no-bias-gelu-fusion --disable-bias-linear",
    ),
    "pipeline, several stages per rank": (2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    "distributed optimizer": (
        4,
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "experts": (
        2,
        "--pipeline-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall --no-bias-gelu-fusion --disable-bias-linear",
    ),
    "multi-token prediction": (2, "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope"),
}
"""In the set `slow`: the default set has them in `test_matrix.py`, tensor by tensor."""


@pytest.fixture(params=[*CELLS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_CELLS)])
def cell(request: pytest.FixtureRequest) -> tuple[int, list[str]]:
    processes, flags = (CELLS | MORE_CELLS)[request.param]
    return processes, flags.split()


def both(folder: Path, processes: int, *flags: object, change: str = "") -> tuple[Finished, Finished]:
    """Train with Megatron's own schedule and by plans."""
    own = train(folder / "stock", processes, *flags, iterations=ITERATIONS, change=change)
    planned = train(folder / "planned", processes, *flags, *PLANS.split(), iterations=ITERATIONS, change=change)
    return own, planned


def check_equal(own: Finished, planned: Finished) -> None:
    assert planned.steps.keys() == own.steps.keys()
    for iteration, step in own.steps.items():
        assert planned.steps[iteration] == pytest.approx(step, rel=TOLERANCE)


def test_a_stock_script_trains_as_without_plans(tmp_path: Path, cell: tuple[int, list[str]]) -> None:
    processes, flags = cell
    own, planned = both(tmp_path, processes, *flags)
    check_equal(own, planned)
    assert "in their own order, while costs are learnt" in planned.output
    assert "costs learnt from 3 iterations" in planned.output
    assert re.findall(r"epp iteration (\d+) \| makespan \(ms\): ", planned.output) == [str(1 + i) for i in range(ITERATIONS)]
    assert "agreed while the last iteration ran" in planned.output
    told = f"plans recompute no layers: {DECIDES.format('full')}"
    assert planned.output.count(told) == ("--recompute-granularity" in flags)


def test_a_hybrid_model_trains_as_without_plans(tmp_path: Path) -> None:
    pattern = "--hybrid-layer-pattern *-*-|*-*- --spec tests.support.mcore.local_hybrid stack_spec"
    check_equal(*both(tmp_path, 2, "--pipeline-model-parallel-size", 2, *pattern.split(), change="torch_norms"))


def test_a_loss_of_the_scripts_own_really_runs(tmp_path: Path) -> None:
    flags = MORE_CELLS["pipeline"][1].split()
    own, planned = both(tmp_path, 2, *flags, change="own_loss")
    check_equal(own, planned)
    stock = train(tmp_path / "without", 2, *flags, iterations=2)
    assert planned.steps[2]["loss"] > stock.steps[2]["loss"]  # it climbs


def test_an_iterator_that_ends_early_ends_every_rank_with_the_count() -> None:
    finished = job(2, "frameworks:ending_early", count=7)
    assert finished.returncode != 0
    said = "rank 0: the data iterator ended after 6 of 7 microbatches; rank 1: the data iterator ended after 6 of 7"
    assert f"EppError: {said}" in finished.output


def test_flags_that_would_have_no_effect_are_named_together(tmp_path: Path) -> None:
    ours = ["--epp-recompute", 1, "--epp-placement", "v", "--epp-slices", 3, "--epp-planner", "seq1f1b"]
    finished = launch(1, "-m", "megatron_epp.mcore.pretrain_gpt", *TINY, "--train-iters", 1, *PLANS.split(), *ours)
    assert finished.returncode == 1
    (said,) = re.findall(r"own model and data: leave out (.*)", finished.output)
    assert {"--epp-recompute 1", "--epp-placement v", "--epp-slices 3", "--epp-planner seq1f1b"} == set(said.split(", "))


def test_settings_of_wrap_that_would_have_no_effect_are_refused() -> None:
    with pytest.raises(EppError, match=r"megatron_epp\.wrap runs the script's own model and data: leave out slices=3"):
        wrap(slices=3)
    with pytest.raises(EppError, match="host_memory_gb needs offload='on'"):
        wrap(host_memory_gb=3, offload="off")
    with pytest.raises(EppError, match="no setting colour"):
        wrap(colour="red")
    with pytest.raises(EppError, match="order is 'mine'; it must be one of planned, given"):
        wrap(order="mine")
    with pytest.raises(EppError, match="offload is True; it must be one of auto, on, off"):
        wrap(offload=True)
    for name, value in (("offload", "on"), ("host_memory_gb", 3), ("split_weight_gradient", True)):
        with pytest.raises(EppError, match=f"order='given' .* leave out {name}"):
            wrap(order="given", **{name: value})


def test_what_would_send_over_another_pipeline_or_other_messages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_epp.mcore.iteration import schedule_call

    class Bridging(P2PCommunicator):
        """Sends by another way."""

    def communicator(kind: type[P2PCommunicator], group: str | None) -> P2PCommunicator:
        made = kind.__new__(kind)
        made.pp_group = group  # type: ignore[assignment]
        return made

    ranks = {"own": [0, 1], "other": [0, 2], "again": [0, 1]}
    monkeypatch.setattr(schedule_call.mpu, "get_pipeline_model_parallel_group", lambda: "own")
    monkeypatch.setattr(schedule_call.dist, "get_process_group_ranks", ranks.__getitem__)
    pipeline = "its pipeline is not the one of megatron.core.parallel_state. Leave it out, or use Megatron's own schedule"

    def check(*values: object) -> None:
        names = "adjust_tensor_shapes_fn", "p2p_communicator", "pg_collection"
        required = {"forward_step_func": print, "data_iterator": None, "model": None, "num_microbatches": 1}
        call = schedule_call.ScheduleCall(**required, seq_length=1, micro_batch_size=1, **dict(zip(names, values, strict=True)))
        call.check_messages()

    for values, said in (
        ((print, None, None), "adjust_tensor_shapes_fn: messages follow the plan."),
        ((None, communicator(Bridging, "own"), None), "a p2p_communicator of type Bridging: messages follow the plan."),
        ((None, Namespace(pp_group="own"), None), "a p2p_communicator of type Namespace: messages follow the plan."),
        ((None, communicator(P2PCommunicator, "other"), None), f"p2p_communicator: {pipeline}"),
        ((None, communicator(P2PCommunicator, None), None), f"p2p_communicator: {pipeline}"),
        ((None, None, Namespace(pp="other")), f"pg_collection: {pipeline}"),
        ((None, None, Namespace()), f"pg_collection: {pipeline}"),
        ((None, None, Namespace(pp=None)), f"pg_collection: {pipeline}"),
    ):
        with pytest.raises(EppError) as error:
            check(*values)
        assert str(error.value).startswith(f"a plan cannot honour {said}")
    check(None, None, None)
    check(None, communicator(P2PCommunicator, "again"), Namespace(pp="again"))


LOOPS = {
    "one stage": (1, 1, UNEVEN, "somewhere"),
    "pipeline": (2, 2, UNEVEN, None),
    "several stages per rank": (2, 4, EVEN, None),
}
"""Ranks, stages, lengths of microbatches, and the attribute of another model that holds the model."""


@pytest.fixture(scope="module", params=LOOPS)
def wrapped(request: pytest.FixtureRequest) -> tuple[dict[str, Any], ...]:
    """Figures of the ranks of a framework's own loop: one run by stock, six planned, one evaluation."""
    ranks, stages, lengths, inside = LOOPS[request.param]
    finished = job(ranks, "frameworks:compared", stages=stages, lengths=lengths, inside=inside)
    told = (
        "plans recompute no layers: Outer has no decoder with layers, nor a language_model with one, so its own settings decide"
    )
    found = of_ranks(finished)
    assert finished.output.count(told) == (inside is not None)
    assert len(found) == ranks
    return found


def worst_of(ranks: tuple[dict[str, Any], ...]) -> float:
    """Return the largest relative difference of a gradient, over all planned runs of all ranks."""
    return max(run["worst"] for rank in ranks for run in rank["runs"])


def test_a_loop_without_megatrons_parser_gets_the_gradients_of_stock(wrapped: tuple[dict[str, Any], ...]) -> None:
    assert worst_of(wrapped) < TOLERANCE


def test_results_come_in_the_callers_order(wrapped: tuple[dict[str, Any], ...]) -> None:
    for one in wrapped:
        stock = one["stock"]
        for results in (*(run["results"] for run in one["runs"]), one["evaluated"]):
            assert [entry["tokens"] for entry in results] == [entry["tokens"] for entry in stock]
            assert [entry["loss"] for entry in results] == pytest.approx([entry["loss"] for entry in stock], rel=TOLERANCE)
    assert any(one["stock"] for one in wrapped)


def test_data_that_is_no_loss_is_collected_in_the_callers_order(wrapped: tuple[dict[str, Any], ...]) -> None:
    seen = [(one["collected"], one["collected by stock"]) for one in wrapped]
    for ours, theirs in seen:
        assert [entry["tokens"] for entry in ours] == [entry["tokens"] for entry in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["of each"] == pytest.approx(other["of each"], rel=TOLERANCE)
    assert any(theirs for _, theirs in seen)


def test_under_a_cap_layers_of_some_microbatches_recompute_and_gradients_stay() -> None:
    """The model is a multimodal one, whose layers are those of the language model inside."""
    cap_bytes = 202_000  # weights, gradients and optimizer included, by formula
    settings = {"memory_cap_gb": cap_bytes / 2**30}
    finished = job(2, "frameworks:compared", stages=2, lengths=UNEVEN, settings=settings, inside="language_model")
    said = of_ranks(finished)
    (share,) = re.findall(r"planned .* bubble [\d.]+%, ([\d.]+)% of layers recompute", finished.output)[1:2]
    assert 0 < float(share) < 100
    assert worst_of(said) < TOLERANCE
    peaks = {one["rank"]: [run["peak_bytes"] for run in one["runs"]] for one in said}
    assert peaks.keys() == {0, 1}
    for of_rank in peaks.values():  # the first iteration runs without plans for the cap, the last with one
        assert of_rank[-1] < min(of_rank[0], cap_bytes)
