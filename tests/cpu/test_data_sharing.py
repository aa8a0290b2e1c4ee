"""One rank of a replica plans, all run its plans: order, errors, and that only one does the work."""

import random
import time
from itertools import count, islice

import pytest

from megatron_epp.data.iterator import PlannedBatches, PlanSource
from megatron_epp.data.sampler import GlobalBatchSampler
from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.port.pack_plan import pack
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from tests.support.runtime.rank_processes import ranks_fixture
from tests.support.runtime.synthetic_sequences import MemoryDataset

LENGTHS = [5, 9, 2, 30, 7, 11, 4, 120, 64, 33]
SHAPE = ModelShape(num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
COSTS = analytic_costs(SHAPE, CPU, [1, 1])


def problem(lengths):
    return Problem(lengths=lengths, placement=(0, 1), cap_bytes=(UNLIMITED_BYTES,) * 2)


def batches(rank, links, make, seed=1, depth=2):
    """This rank's batches; `make` plans on the first rank."""
    source = PlanSource(make if rank == 0 else None, links.control.from_first)
    return PlannedBatches(MemoryDataset(LENGTHS), GlobalBatchSampler(len(LENGTHS), 4, seed=seed), source, depth)


def expected(number, seed=1):
    """Lengths and plan of the first batches, as one process alone makes them."""
    drawn = islice(GlobalBatchSampler(len(LENGTHS), 4, seed=seed), number)
    batches = [tuple(LENGTHS[i] for i in indices) for indices in drawn]
    return [(lengths, plan(problem(lengths), COSTS)) for lengths in batches]


def take_in_turns(rank, links, number):
    """Two streams taken alternately by ranks that dawdle at random, as training and evaluation. Returns what came."""
    planner = BackgroundPlanner(COSTS, Options()) if rank == 0 else None
    streams = [batches(rank, links, lambda batch: planner.plan(problem(batch.lengths)), seed) for seed in (1, 2)]
    dawdle, taken = random.Random(rank), [[], []]
    for turn in range(number):
        for stream, mine in zip(streams, taken, strict=True):
            time.sleep(dawdle.random() / 50)
            batch = next(stream)
            mine.append((batch.lengths, batch.plan))
            assert batch.planning_us > 0, turn
    if planner is not None:
        planner.process.close()
    return taken


def packed(batch):
    lengths = batch.lengths
    return (pack(plan(problem(lengths), COSTS), 1.0, tuple(range(len(lengths)))),)


def fail_at(rank, links, number, kind):
    """The batches that came before planning failed, and the errors of two calls after."""
    calls = count(1)

    def make(batch):
        if next(calls) == number:
            raise InfeasibleError("needs 12 GB") if kind == "infeasible" else ZeroDivisionError("a bug")
        return packed(batch)

    stream, came, errors = batches(rank, links, make), [], []
    for _ in range(number + 1):
        try:
            came.append(next(stream).lengths)
        except EppError as error:
            errors.append((type(error).__name__, str(error)))
    return came, errors


def disagree(rank, links):
    try:
        next(batches(rank, links, packed, seed=1 + rank))
    except EppError as error:
        return [str(error)]
    return None


NUM_RANKS = 3


ranks = ranks_fixture(NUM_RANKS)


def test_every_rank_gets_every_plan_in_the_order_of_its_batches(ranks):
    """Training and evaluation take theirs in turns, and no rank waits for another but at the exchange."""
    training, evaluation = expected(6, seed=1), expected(6, seed=2)
    assert ranks.run(take_in_turns, 6) == [[training, evaluation]] * NUM_RANKS


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("infeasible", ("InfeasibleError", "needs 12 GB")),
        ("bug", ("EppError", "the next batch cannot be planned: ZeroDivisionError: a bug")),
    ],
)
def test_what_goes_wrong_in_planning_is_raised_by_all_ranks_at_that_batch(ranks, number, kind, error):
    before = [lengths for lengths, _ in expected(number - 1)]
    assert ranks.run(fail_at, number, kind) == [(before, [error, error])] * NUM_RANKS


def test_a_rank_that_samples_other_documents_says_so(ranks):
    errors = ranks.run(disagree)
    assert errors[0] is None
    assert all("the plan is for sequences of" in error and ", seed, " in error for (error,) in errors[1:])
