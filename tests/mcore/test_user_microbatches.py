"""A script's own microbatches, run by plans, train as Megatron's own schedules train them: its data, forward step and loss."""

import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_epp.plan import EppError
from tests.support.mcore.forked import job, of_ranks, train
from tests.support.mcore.jobs.frameworks import EVEN, UNEVEN
from tests.support.mcore.launch import Finished

PLANS = "--epp --epp-microbatches user"
ITERATIONS = 6
"""One to warm up, three to learn costs from, two with plans made from these."""
TOLERANCE = 1e-5
"""Largest relative difference of losses and of norms of gradients: replicas and stages may add in another order."""

STAGES = "--pipeline-model-parallel-size 2"
CELLS = {
    "one process": (1, ""),
    "full recompute, loss per token": (
        2,
        f"{STAGES} --calculate-per-token-loss --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}
"""Others are rows of `test_matrix.py`, compared tensor by tensor."""


def both(folder: Path, processes: int, *flags: object, change: str = "") -> tuple[Finished, Finished]:
    own = train(folder / "stock", processes, *flags, iterations=ITERATIONS, change=change)
    planned = train(folder / "planned", processes, *flags, *PLANS.split(), iterations=ITERATIONS, change=change)
    return own, planned


def check_equal(own: Finished, planned: Finished) -> None:
    assert planned.steps.keys() == own.steps.keys()
    for iteration, step in own.steps.items():
        assert planned.steps[iteration] == pytest.approx(step, rel=TOLERANCE)


@pytest.mark.parametrize("cell", CELLS)
def test_a_stock_script_trains_as_without_plans(tmp_path: Path, cell: str) -> None:
    processes, flags = CELLS[cell]
    own, planned = both(tmp_path, processes, *flags.split())
    check_equal(own, planned)
    assert "in their own order, while costs are learnt" in planned.output
    assert "costs learnt from 3 iterations" in planned.output
    assert re.findall(r"epp iteration (\d+) \| makespan \(ms\): ", planned.output) == [str(1 + i) for i in range(ITERATIONS)]
    assert "agreed while the last iteration ran" in planned.output
    told = "plans recompute no layers: the model's own recompute_granularity=full decides: leave it out"
    assert planned.output.count(told) == ("--recompute-granularity" in flags)


def test_a_loss_of_the_scripts_own_runs_and_makes_megatrons_climb(tmp_path: Path) -> None:
    own, planned = both(tmp_path, 2, *STAGES.split(), change="own_loss")
    check_equal(own, planned)
    assert planned.steps[ITERATIONS]["loss"] > planned.steps[1]["loss"]


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
    required = {"forward_step_func": print, "data_iterator": None, "model": None, "num_microbatches": 1}
    call = partial(schedule_call.ScheduleCall, **required, seq_length=1, micro_batch_size=1)
    for messages, said in (
        ({"adjust_tensor_shapes_fn": print}, "adjust_tensor_shapes_fn: messages follow the plan"),
        ({"p2p_communicator": communicator(Bridging, "own")}, "a p2p_communicator of type Bridging: messages follow the plan"),
        ({"p2p_communicator": Namespace(pp_group="own")}, "a p2p_communicator of type Namespace: messages follow the plan"),
        ({"p2p_communicator": communicator(P2PCommunicator, "other")}, "p2p_communicator: its pipeline is not the one of"),
        ({"p2p_communicator": communicator(P2PCommunicator, None)}, "p2p_communicator: its pipeline is not the one of"),
        *(({"pg_collection": Namespace(**own)}, "pg_collection: its pipeline") for own in ({"pp": "other"}, {}, {"pp": None})),
    ):
        with pytest.raises(EppError, match=f"^a plan cannot honour {said}"):
            call(**messages).check_messages()
    call().check_messages()
    call(p2p_communicator=communicator(P2PCommunicator, "again"), pg_collection=Namespace(pp="again")).check_messages()


LOOPS = {
    "one stage": (1, 1, UNEVEN, "somewhere"),
    "pipeline": (2, 2, UNEVEN, None),
    "several stages per rank": (2, 4, EVEN, None),
}
"""Ranks, stages, lengths of microbatches, and the attribute of another model that holds the model."""


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_without_megatrons_parser_gets_the_gradients_and_results_of_stock_in_its_own_order(loop: str) -> None:
    """Data that is no loss too."""
    ranks, stages, lengths, inside = LOOPS[loop]
    finished = job(ranks, "frameworks:compared", stages=stages, lengths=lengths, inside=inside)
    told = "plans recompute no layers: Outer has no decoder with layers, nor a language_model with one"
    assert finished.output.count(told) == (inside is not None)
    figures = of_ranks(finished)
    assert len(figures) == ranks
    assert worst_of(figures) < TOLERANCE
    for rank in figures:
        by_plans = [(run["results"], rank["stock"], "loss") for run in (*rank["runs"], {"results": rank["evaluated"]})]
        for ours, theirs, value in (*by_plans, (rank["collected"], rank["collected by stock"], "of each")):
            assert [entry["tokens"] for entry in ours] == [entry["tokens"] for entry in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                assert mine[value] == pytest.approx(other[value], rel=TOLERANCE)
    assert any(rank["stock"] and rank["collected by stock"] for rank in figures)


def worst_of(ranks: tuple[dict[str, Any], ...]) -> float:
    """Return the largest relative difference of a gradient, over all planned runs of all ranks."""
    return max(run["worst"] for rank in ranks for run in rank["runs"])


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
