"""Frameworks around Megatron that train by plans: reruns of an iteration, schedules called by name, iterators of their own,
steps of several calls, and routers that replay."""

import re
from collections import defaultdict
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from tests.support.mcore.forked import RECORDER, job, launch, of_ranks, succeeded, train
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN
from tests.support.mcore.jobs.reinforcement import UNLIKE
from tests.support.mcore.launch import TINY
from tests.support.seeds import some_by_default

PLANS = ("--epp", "--epp-microbatches", "user")
STAGES, PIPELINING = ("--pipeline-model-parallel-size", "2"), "forward_backward_pipelining"
ITERATIONS = 6
PIPELINES = [
    pytest.param(2, UNEVEN, id="a stage per rank", marks=pytest.mark.slow),  # the other has queues of several chunks
    pytest.param(4, EVEN, id="two stages per rank"),
]
TOLERANCE = 1e-5


def test_an_iteration_that_runs_again_gets_its_own_microbatches_and_its_own_plan(tmp_path: Path) -> None:
    """Costs are learnt when four runs are done; the second of iteration 3 is the fifth. Dropout differs by order."""
    run = partial(train, tmp_path / "run", 2, *STAGES, "--hidden-dropout", 0.1, iterations=ITERATIONS, change="rerun")
    own, planned = run(), run(*PLANS)
    for finished in (own, planned):
        assert len(re.findall("Unexpected result", finished.output)) == 3
        assert len(re.findall("unexpected result is reproducible within the tolerance", finished.output)) == 3
        assert "not reproducible" not in finished.output
    for iteration in range(1, 4):  # from the next on, microbatches have the random numbers of another order
        assert planned.steps[iteration] == pytest.approx(own.steps[iteration], rel=TOLERANCE)


def test_validated_results_are_numbered_by_microbatch_in_whatever_order_these_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import rerun_state_machine

    from megatron_epp.mcore.iteration.schedule_call import numbered_by

    machine = rerun_state_machine.RerunStateMachine()
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)

    def numbers(order: tuple[int, ...]) -> dict[int, list[int]]:
        machine.validation_counts, found = defaultdict(int), {}
        for index in order:
            with numbered_by(index):
                found[index] = [machine._get_validation_call_info("a message").sequence for _ in range(2)]
        assert machine.validation_counts == {}
        return found

    assert numbers((0, 1, 2)) == numbers((2, 0, 1))
    assert len({number for each in numbers((0, 1, 2)).values() for number in each}) == 6
    assert numbers((0,)) == {0: [1, 2]}  # as Megatron numbers them


@pytest.mark.parametrize(
    ("stages", "lengths", "name"),
    [(2, UNEVEN, f"{PIPELINING}_without_interleaving"), (4, EVEN, f"{PIPELINING}_with_interleaving")],
)
def test_a_framework_without_plans_trains_by_installed_ones(stages: int, lengths: tuple[int, ...], name: str) -> None:
    for found in of_ranks(job(2, "frameworks:installed", stages=stages, lengths=lengths, name=name)):
        assert found["worst"] < TOLERANCE
        assert all(results == found["stock"] for results in found["results"])
        assert found["learnt"]
        assert "plans run Megatron's schedules already" in found["twice"]
        assert found["is_stock"]


@pytest.mark.parametrize(
    ("processes", "flags", "name"),
    [
        (1, (), "forward_backward_no_pipelining"),
        (2, STAGES, f"{PIPELINING}_without_interleaving"),
        (2, (*STAGES, "--num-layers-per-virtual-pipeline-stage", "1"), f"{PIPELINING}_with_interleaving"),
    ],
)
def test_a_schedule_called_in_a_wrapper_is_planned(tmp_path: Path, processes: int, flags: tuple[str, ...], name: str) -> None:
    program = RECORDER.with_name("direct_training.py")
    arguments = [*TINY, "--train-iters", 2, *flags, *PLANS]
    finished = succeeded(launch(processes, "-m", "megatron_epp.run", program, *arguments, env={"RECORD_TO": str(tmp_path)}))
    assert f"called through the wrapper: 4 times {name}" in finished.output  # training, and evaluation at the end
    assert "in their own order, while costs are learnt" in finished.output


@some_by_default("ways", [((False, False), (True, True)), ((False, True), (True, False))], 1)
def test_gradients_are_reduced_once_after_two_calls_and_with_an_idle_replica(
    ways: tuple[tuple[bool, bool], ...],
) -> None:
    """As NeMo-RL's split step: the hooks are set so that no call reduces, and gradients are finalised behind the last."""
    found = [*chain.from_iterable(of_ranks(job(4, "frameworks:split_step", ways=ways)))]
    said = [(one["rank"], one["overlap"], one["distributed"]) for one in found]
    assert sorted(said) == sorted(2 * [(rank, *way) for rank in range(4) for way in ways])
    assert [one for one in found if one["worst"] > TOLERANCE] == []


def test_replicas_that_share_experts_train_microbatches_of_their_own_lengths_in_one_order() -> None:
    """Without it a third of public recipes with pipeline stages and experts could not be planned."""
    ranks = of_ranks(job(4, "reinforcement:shared_experts"))
    assert [one for rank in ranks for one in rank if one["worst"] > TOLERANCE] == []
    for own in ranks:
        assert all(sorted(one["lengths"]) == sorted(UNLIKE[own[0]["rank"] % 2]) for one in own)
    given, planned = ([own[number]["lengths"] for own in ranks] for number in (0, -1))
    assert given == [list(UNLIKE[0]), list(UNLIKE[1])] * 2
    assert planned != given
    orders = [[UNLIKE[number % 2].index(length) for length in row] for number, row in enumerate(planned)]
    assert orders[::2] == orders[1::2]  # by stage, of the two replicas


@pytest.mark.parametrize(("stages", "lengths"), PIPELINES)
def test_routes_that_routers_replay_are_those_of_their_microbatches_in_the_given_order(
    stages: int, lengths: tuple[int, ...]
) -> None:
    ranks = of_ranks(job(2, "router_replay:replayed", stages=stages, lengths=lengths))
    assert len(ranks) == 2
    for rank in ranks:
        said = "a plan cannot honour moe_enable_routing_replay=True (microbatches must run in their own order"
        assert rank["refused"].startswith(said)
        assert [one for one in rank["trained"] if one["worst"] > TOLERANCE] == []
        assert all(len(set(row)) == 1 for one in rank["trained"] for row in one["recompute"])
        assert all(found == rank["by stock"] for found in rank["recorded"])
    trained = [one for rank in ranks for one in rank["trained"]]
    assert sum(any(map(any, one["recompute"])) for one in trained) == 2  # the last of each rank, under a cap


@pytest.mark.parametrize(("stages", "lengths"), PIPELINES)
def test_microbatches_read_by_get_next_are_run_in_any_order(stages: int, lengths: tuple[int, ...]) -> None:
    """Iterators are left behind the last."""
    finished = job(2, "reinforcement:read_by_get_next", stages=stages, lengths=lengths)
    ranks = of_ranks(finished)
    runs = [run for rank in ranks for run in rank["runs"]]
    assert len(runs) == 12
    for rank in ranks:
        for run in rank["runs"]:
            assert run["worst"] < TOLERANCE
            assert run["offsets"] == [6] * (stages // 2)
            for name in ("reward", "loss"):
                assert [entry[name] for entry in run["results"]] == pytest.approx([entry[name] for entry in rank["stock"]])
        ours, theirs = ([*chain.from_iterable(rank[name])] for name in ("samples", "samples by stock"))
        assert ours == pytest.approx(theirs)
    assert [entry["reward"] for entry in next(run["results"] for run in runs if run["results"])] == [1, 2, 3, 4, 5, 6]
    assert "6 microbatches of 24 tokens: " in finished.output or "6 microbatches of 8 to 32 tokens: " in finished.output


def test_objects_of_a_generator_that_know_their_padded_lengths_are_run_in_any_order_with_results_in_the_callers() -> None:
    """As NeMo-RL calls Megatron: packed microbatches are objects, and the model is in no list."""
    ranks = of_ranks(job(2, "reinforcement:of_processed", lengths=UNEVEN))
    for rank in ranks:
        assert [run for run in rank["runs"] if run["worst"] > TOLERANCE] == []
        for results in (*(run["results"] for run in rank["runs"]), rank["evaluated"]):
            for ours, theirs in zip(results, rank["stock"], strict=True):
                assert [*chain(*ours["logprobs"])] == pytest.approx([*chain(*theirs["logprobs"])], rel=1e-4, abs=1e-5)
        orders = [run["ran"] for run in rank["runs"]]
        assert orders[-1] != orders[0]
        assert sorted(orders[-1]) == sorted(orders[0])
    assert any(rank["stock"] for rank in ranks)
