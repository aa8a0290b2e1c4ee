"""Batches planned in the background, of one rank or by one of a replica for all: order, errors, shutdown."""

import gc
import pickle
import random
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import count, islice
from queue import Queue
from unittest.mock import Mock

import pytest

from megatron_epp.data.iterator import DisagreementError, PlannedBatches, PlanSource, samples_in
from megatron_epp.data.sampler import GlobalBatchSampler
from megatron_epp.plan import EppError, InfeasibleError
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.problem import Lengths
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.port.pack_plan import pack
from megatron_epp.port.planning import BackgroundPlanner
from megatron_epp.tools.formulas import CPU, ModelShape, analytic_costs
from tests.support.runtime.rank_processes import ranks_fixture
from tests.support.runtime.synthetic_sequences import MemoryDataset, plan_of

LENGTHS = [5, 9, 2, 30, 7, 11, 4]


def whole_sequences(batch):
    lengths = batch.lengths
    plan = plan_of(lengths, [[(sequence, 0, length)] for sequence, length in enumerate(lengths)])
    return (pack(plan, 1000.0 * len(lengths), tuple(range(len(lengths)))),)


def of_share(share, batch):
    """Return the item of a replica for its share of a batch."""
    (packed,) = whole_sequences(Lengths([batch.lengths[at] for at in share]))
    return (packed._replace(share=share),)


def batches(make_plan=whole_sequences, sampler=None, **options):
    sampler = sampler or GlobalBatchSampler(len(LENGTHS), 3)
    return PlannedBatches(MemoryDataset(LENGTHS), sampler, make_plan and PlanSource(make_plan), **options)


def test_batches_carry_the_samplers_sequences_their_lengths_and_their_plan():
    iterator = batches()
    for number, indices in enumerate(islice(GlobalBatchSampler(len(LENGTHS), 3), 10)):
        batch = next(iterator)
        assert (batch.indices, batch.lengths) == (indices, tuple(LENGTHS[index] for index in indices))
        assert (batch.plan.lengths, batch.planning_us) == (batch.lengths, 3000.0)
        assert batch.consumed_samples == 3 * (number + 1)
        assert batch.chunk(1).tokens.tolist() == [1000 * indices[1] + t for t in range(batch.lengths[1])]
    iterator.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_depth_changes_nothing_but_timing(depth):
    iterator, reference = batches(depth=depth), batches()
    assert list(islice(iterator, 8)) == list(islice(reference, 8))
    iterator.close()
    reference.close()


def test_a_sampler_draws_groups_of_sequences_whose_loss_is_computed_together():
    dataset = MemoryDataset(LENGTHS)
    dataset.groups = ((0, 3), (6,), (2, 4, 5), (1,))
    make_plan = Mock(side_effect=whole_sequences)
    iterator = PlannedBatches(dataset, [(2, 0), (1, 2, 2)], PlanSource(make_plan))
    first, second = next(iterator), next(iterator)
    asked = [call.args[0].loss_groups for call in make_plan.call_args_list]
    assert (first.indices, second.indices) == ((2, 4, 5, 0, 3), (6, 2, 4, 5, 2, 4, 5))
    assert asked == [(0, 0, 0, 1, 1), (0, 1, 1, 1, 2, 2, 2)]
    assert [batch.loss_groups for batch in (first, second)] == asked
    assert (first.global_size, second.global_size) == (2, 3)
    assert (first.consumed_samples, second.consumed_samples) == (0, 0)  # a list does not count them
    assert samples_in(dataset).tolist() == [sum(LENGTHS[at] for at in group) for group in dataset.groups]
    assert second.part([4, 5, 6]).loss_groups == (2, 2, 2)
    iterator.close()


def test_plans_are_made_ahead_but_not_without_bound():
    asked = Queue()

    def make_plan(batch):
        asked.put(batch)
        return whole_sequences(batch)

    iterator = batches(make_plan, depth=2)
    next(iterator)
    for _ in range(4):  # one taken, two waiting, one in the making
        asked.get(timeout=60)
    iterator.close()
    assert asked.qsize() <= 1  # and maybe the second given out with the first


def test_a_planning_error_surfaces_after_the_batches_made_before_it_and_stays():
    calls = count(1)

    def make_plan(batch):
        if next(calls) == 3:
            raise InfeasibleError("needs 12 GB")
        return whole_sequences(batch)

    iterator = batches(make_plan, depth=4)
    assert len([*islice(iterator, 2)]) == 2
    for _ in range(2):
        with pytest.raises(InfeasibleError, match="needs 12 GB"):
            next(iterator)


def test_a_sampler_error_surfaces():
    def sampler():
        yield (0, 1)
        raise RuntimeError("index 9 is out of range")

    for make_plan, error in ((whole_sequences, EppError), (None, RuntimeError)):
        iterator = batches(make_plan, sampler=sampler())
        assert next(iterator).indices == (0, 1)
        with pytest.raises(error, match="index 9 is out of range"):
            next(iterator)


def test_a_plan_for_other_lengths_is_refused():
    with pytest.raises(DisagreementError, match=r"plan is for sequences of 5, 9 tokens .* batch has 2, 30\. .*seed"):
        next(batches(lambda batch: whole_sequences(Lengths((5, 9))), sampler=[(2, 3)]))


SHARES = ((1,), (0, 2))


def test_replicas_take_the_shares_they_planned():
    replicas = [batches(partial(of_share, share), replica=r, replicas=2) for r, share in enumerate(SHARES)]
    for indices in islice(GlobalBatchSampler(len(LENGTHS), 3), 5):
        for share, replica in zip(SHARES, replicas, strict=True):
            batch = next(replica)
            assert (batch.indices, batch.plan.lengths) == (tuple(indices[at] for at in share), batch.lengths)
            assert batch.global_size == 3
    for replica in replicas:
        replica.close()


def test_replicas_of_a_team_take_theirs_of_the_plans_made_for_all():
    for position, share in enumerate(SHARES):
        source = PlanSource(lambda batch: of_share(SHARES[0], batch) + of_share(SHARES[1], batch), replica_position=position)
        iterator = PlannedBatches(MemoryDataset(LENGTHS), [(3, 4, 5)], source)
        assert next(iterator).indices == tuple((3, 4, 5)[at] for at in share)


def test_without_plans_replicas_take_every_other_sequence():
    parts = [batches(None, GlobalBatchSampler(len(LENGTHS), 4), replica=r, replicas=2) for r in range(2)]
    for indices in islice(GlobalBatchSampler(len(LENGTHS), 4), 5):
        assert [next(part).indices for part in parts] == [indices[::2], indices[1::2]]
    for part in parts:
        part.close()


def test_every_batch_is_taken_with_the_checksum_of_its_division_and_where_planning_fails_the_others_are_told():
    checksums, seen = count(), []

    def make(batch):
        if batch.lengths == (LENGTHS[4],):
            raise InfeasibleError("no plan fits")
        return (whole_sequences(batch)[0]._replace(division=next(checksums)),)

    iterator = PlannedBatches(MemoryDataset(LENGTHS), [(0, 1), (2,), (3,), (4,)], PlanSource(make, check_division=seen.append))
    for number in range(3):
        next(iterator)
        assert seen == list(range(number + 1))
    with pytest.raises(InfeasibleError, match="no plan fits"):
        next(iterator)
    assert seen == [0, 1, 2, None]


def test_batches_carry_what_was_prepared_of_them_and_of_their_lowered_actions():
    source = PlanSource(whole_sequences, prepare=lambda batch, actions: (batch.chunk(0).tokens.tolist(), actions))
    iterator = PlannedBatches(MemoryDataset(LENGTHS), [(0, 1), (2,)], source)
    for batch in iterator:
        assert batch.prepared == (batch.chunk(0).tokens.tolist(), lower(batch.plan)[0])
        assert iterator.restored(pickle.loads(pickle.dumps(batch))).prepared == batch.prepared  # as from a checkpoint
    with pytest.raises(EppError, match="of an earlier version"):
        iterator.restored(replace(batch, actions=None))


def test_the_next_batch_is_prepared_while_one_runs():
    planned, prepared = threading.Event(), threading.Event()

    def sampler():
        yield (0, 1)
        yield (2,)
        planned.set()  # both are waiting

    def prepare(batch, actions):
        if batch.indices == (2,):
            prepared.set()

    iterator = PlannedBatches(MemoryDataset(LENGTHS), sampler(), PlanSource(whole_sequences, prepare=prepare))
    assert planned.wait(timeout=60)
    assert next(iterator).indices == (0, 1)
    assert prepared.wait(timeout=60)
    iterator.close()


def test_a_batch_that_cannot_be_prepared_is_raised_in_its_place():
    def prepare(batch, actions):
        if batch.indices == (2,):
            raise OSError("disk is gone")

    iterator = PlannedBatches(MemoryDataset(LENGTHS), [(0, 1), (2,)], PlanSource(whole_sequences, prepare=prepare))
    assert next(iterator).indices == (0, 1)
    with pytest.raises(OSError, match="disk is gone"):
        next(iterator)
    iterator.close()


def test_close_ends_the_threads_and_the_iteration():
    iterator = batches()
    next(iterator)
    (prepare_thread,) = iterator._prepare_thread._threads
    iterator.close()
    iterator.close()
    assert not iterator._prefetched._thread.is_alive()
    assert not prepare_thread.is_alive()
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_forgotten_iterator_stops_planning():
    iterator = batches()
    thread = iterator._prefetched._thread
    next(iterator)
    del iterator
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


SHARED = [5, 9, 2, 30, 7, 11, 4, 120, 64, 33]
SHAPE = ModelShape(num_layers=2, hidden_size=16, ffn_hidden_size=32, num_attention_heads=4, vocab_size=32)
COSTS = analytic_costs(SHAPE, CPU, [1, 1])


def problem(lengths):
    return Problem(lengths=lengths, placement=(0, 1), cap_bytes=(UNLIMITED_BYTES,) * 2)


def drawn(rank, links, make, seed=1, depth=2):
    """This rank's batches; `make` plans on the first rank."""
    source = PlanSource(make if rank == 0 else None, links.control.from_first)
    return PlannedBatches(MemoryDataset(SHARED), GlobalBatchSampler(len(SHARED), 4, seed=seed), source, depth)


def expected(number, seed=1):
    """Lengths and plan of the first batches, as one process alone makes them."""
    drawn = islice(GlobalBatchSampler(len(SHARED), 4, seed=seed), number)
    drawn = [tuple(SHARED[i] for i in indices) for indices in drawn]
    return [(lengths, plan(problem(lengths), COSTS)) for lengths in drawn]


def take_in_turns(rank, links, number):
    """Two streams taken alternately by ranks that dawdle at random, as training and evaluation. Returns what came."""
    planner = BackgroundPlanner(COSTS, Options()) if rank == 0 else None
    streams = [drawn(rank, links, lambda batch: planner.plan(problem(batch.lengths)), seed) for seed in (1, 2)]
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

    stream, came, errors = drawn(rank, links, make), [], []
    for _ in range(number + 1):
        try:
            came.append(next(stream).lengths)
        except EppError as error:
            errors.append((type(error).__name__, str(error)))
    return came, errors


def disagree(rank, links):
    try:
        next(drawn(rank, links, packed, seed=1 + rank))
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
