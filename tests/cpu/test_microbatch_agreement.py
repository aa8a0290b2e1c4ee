"""Ranks exchange objects over a tree of small groups, and agree on the same microbatches or end with the same error."""

import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.mcore.iteration.microbatch_agreement import AgreedShapes, Ahead, LookAhead, _largest, _pairs, installed
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch
from megatron_epp.plan import EppError
from megatron_epp.runtime.links.objects import Groups, ObjectGroup, gathered_by
from scripts.write_communicators import num_connections
from tests.support.runtime.agreement_runs import SHAPES, prefixed, results, shapes
from tests.support.runtime.rank_processes import Ranks, ranks_fixture

ranks = ranks_fixture(2)


def test_a_rank_without_data_learns_the_shapes(ranks: Ranks) -> None:
    assert ranks.run(shapes, [None, SHAPES], ("", ""), (0, 70)) == [AgreedShapes(SHAPES, (0, 70))] * 2


DIFFER = "microbatches differ between ranks of a replica: "
ENDED = "the data iterator ended after 1 of 4 microbatches"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([SHAPES, SHAPES[:-1]],), f"{DIFFER}rank 0 has 4, rank 1 has 3"),
        (
            ([SHAPES, (*SHAPES[:-1], Microbatch((7,)))],),
            f"{DIFFER}microbatch 3 has 400 tokens in 1 sequences on rank 0 and 7 in 1 on rank 1",
        ),
        (
            ([SHAPES, SHAPES[:-1]], ("", ""), (0, 0), (4, 5)),
            "replicas that share experts run the same actions, and have other numbers of microbatches: rank 0 has 4, "
            "rank 1 has 3. Give them as many; keep experts within a replica (EP x ETP at most TP x CP); or use Megatron's own "
            "schedule",
        ),
        (([SHAPES, None], ("", ENDED)), f"rank 1: {ENDED}"),
        (([None, None],), "no rank of this pipeline has a data iterator"),
    ],
    ids=["count", "shape", "replicas", "an error of one rank", "no data"],
)
def test_what_does_not_agree_ends_every_rank_with_the_numbers(ranks: Ranks, arguments: tuple[object, ...], said: str) -> None:
    outcomes = ranks.outcomes(shapes, *arguments)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith(f"refused: {said}")


@pytest.mark.parametrize(("is_learnt", "said"), [(True, "refused: rank 1: ValueError: a prefix of 9 tokens"), (False, SHAPES)])
def test_a_search_for_prefixes_that_fails_on_a_rank_ends_all_and_runs_once_costs_are_learnt(ranks, is_learnt, said) -> None:
    assert ranks.outcomes(prefixed, 1, is_learnt) == [said] * 2


@pytest.mark.parametrize(
    ("ways", "outcome"),
    [
        (["well", "fails"], "made by 0"),
        (["fails", "well"], "refused: no plan"),
        (["breaks", "well"], "refused: the first rank failed (ZeroDivisionError: a bug)"),
    ],
)
def test_what_the_first_rank_makes_or_its_error_every_rank_has(ranks: Ranks, ways: list[str], outcome: str) -> None:
    assert ranks.outcomes(results, ways) == [outcome] * 2


def test_replicas_that_share_experts_plan_the_largest_microbatches_and_each_runs_its_own(ranks: Ranks) -> None:
    other = (Microbatch((30,)), Microbatch((20, 10)), Microbatch((8, 8)), Microbatch((401,)))
    first, second = ranks.run(shapes, [SHAPES, other], ("", ""), (0, 70), (4, 5))
    assert (first.here, second.here) == (SHAPES, other)
    assert (first.shapes, first.num_bytes) == (second.shapes, second.num_bytes)
    for own in (SHAPES, other):
        for largest, one in zip(first.shapes, own, strict=True):
            assert sum(largest.lengths) >= sum(one.lengths)
            assert _pairs(largest.lengths) >= _pairs(one.lengths)


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_largest_shape_has_the_most_tokens_and_pairs_and_hardly_more(replicas: list[list[int]]) -> None:
    found = _largest(tuple(Microbatch(tuple(lengths)) for lengths in replicas))
    assert sum(found.lengths) == max(map(sum, replicas))
    assert _pairs(found.lengths) >= max(map(_pairs, replicas))
    assert found.lengths in map(tuple, replicas) or len(found.lengths) <= 2


LENGTHS = (5, 3, 8, 2, 9, 4)


def shapes_of(items):
    return tuple(Microbatch((length,)) for length in items)


def iterator():
    return SimpleNamespace(iterable=iter(LENGTHS), rewind=lambda: None)


def ahead_of_one_rank():
    """An agreement of a single rank: it is what the rank says."""

    def agree(shapes, problem, items):
        if problem:
            raise EppError(problem)
        return AgreedShapes(shapes, ())

    return Ahead(agree)


def test_items_that_were_seen_ahead_are_taken_in_order():
    items = LookAhead(iter(LENGTHS))
    assert (items.peek(2), next(items), items.peek(3)) == ([5, 3], 5, [3, 8, 2])
    assert (list(items), items.peek(2)) == ([3, 8, 2, 9, 4], [])


def test_iterators_get_one_look_ahead_for_good():
    own = iterator()
    (first,) = installed([own, None])
    assert (installed([own, None]), installed([None])) == ([first], [])
    assert installed([own, iter(LENGTHS)]) is None


def test_the_next_iteration_is_agreed_on_before_its_items_are_taken():
    ahead, (source,) = ahead_of_one_rank(), installed([iterator()])
    assert [next(source) for _ in range(2)] == [5, 3]
    ahead.begin([source], 2, shapes_of)
    assert ahead.take([source], 2) == AgreedShapes(shapes_of([8, 2]), ())
    assert [next(source) for _ in range(2)] == [8, 2]


@pytest.mark.parametrize(("begun", "taken"), [(None, 2), (2, 3), (7, 7)], ids=["the first", "another count", "its end"])
def test_nothing_is_agreed_on_before_the_first_iteration_for_another_count_and_where_the_iterator_ends(begun, taken):
    ahead, (source,) = ahead_of_one_rank(), installed([iterator()])
    if begun is not None:
        ahead.begin([source], begun, shapes_of)
    assert ahead.take([source], taken) is None
    assert list(source) == list(LENGTHS)


@pytest.mark.parametrize("at", [0, 1], ids=["an item is taken", "another iterator"])
def test_an_iterator_that_moved_since_is_an_error(at: int):
    ahead, sources = ahead_of_one_rank(), installed([iterator(), iterator()])
    ahead.begin(sources[:1], 2, shapes_of)
    next(sources[0])
    with pytest.raises(EppError, match="not the one of the last call"):
        ahead.take([sources[at]], 2)


def test_a_rank_without_data_gets_what_the_others_agreed_on():
    ahead = Ahead(lambda shapes, problem, items: AgreedShapes(shapes_of([7]) if shapes is None else shapes, ()))
    ahead.begin([], 1, shapes_of)
    assert ahead.take([], 1) == AgreedShapes(shapes_of([7]), ())


def exchanges(rank, links, named, largest):
    """Return what this rank gets from an object group of the ranks that each names, in meshes of at most `largest`."""
    group = ObjectGroup.create(named[rank], Groups(largest_mesh=largest))
    if not group.levels:
        return None
    for _ in range(20):  # exchanges follow each other without waiting for all members
        last = group.from_first([f"of {rank}", time.monotonic_ns()])
    levels = [dist.get_process_group_ranks(one) for one in group.levels]
    return last[0], group.from_each({"of": rank, "long": "x" * rank * 1000}), group.is_first, levels


def new_connections(rank, links, largest):
    """Number of sockets to other ranks that an object group of all ranks opens."""
    everyone = range(dist.get_world_size())
    dist.barrier()
    before = _sockets()
    ObjectGroup.create(everyone, Groups(largest_mesh=largest)).from_each(rank)
    return _sockets() - before


def read_by(rank, links, readers):
    """Items of all ranks on those that read them."""
    return gathered_by(readers, 10 * rank, links.figures)


def _sockets():
    return sum(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process().net_connections("tcp"))


SIZE = 8


six = ranks_fixture(SIZE)


@pytest.mark.parametrize("largest", [2, 3, 4, SIZE])
def test_every_member_gets_the_items_of_the_first_and_of_each_in_order(six, largest):
    found = six.run(exchanges, [range(SIZE)] * SIZE, largest)
    everyone = [{"of": rank, "long": "x" * rank * 1000} for rank in range(SIZE)]
    assert [own[:3] for own in found] == [("of 0", everyone, rank == 0) for rank in range(SIZE)]
    assert all(len(group) <= largest for *_, levels in found for group in levels)


def test_several_groups_are_made_together_and_ranks_may_be_in_none(six):
    even, odd = (0, 2, 4), (1, 3, 5)
    found = six.run(exchanges, [even, odd, even, odd, even, odd, even, odd], 2)
    assert found[6:] == [None, None]
    for named in (even, odd):
        for rank in named:
            first, each, is_first, _ = found[rank]
            assert (first, [one["of"] for one in each], is_first) == (f"of {named[0]}", list(named), rank == named[0])


@pytest.mark.parametrize("largest", [2, 4, SIZE])
def test_a_rank_is_connected_to_as_many_others_as_the_formula_says(six, largest):
    assert six.run(new_connections, largest) == [num_connections(SIZE, rank, largest) for rank in range(SIZE)]


def test_figures_reach_those_who_read_them_and_no_others(six):
    items = [10 * rank for rank in range(SIZE)]
    assert six.run(read_by, [3, 0, 3, SIZE]) == [items if rank in (0, 3) else None for rank in range(SIZE)]
