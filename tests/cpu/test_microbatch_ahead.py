"""Ranks agree on the next iteration's microbatches ahead of it, and never on others than it will take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_epp.mcore.iteration.microbatch_agreement import AgreedShapes
from megatron_epp.mcore.iteration.microbatch_look_ahead import Ahead, LookAhead, installed
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch
from megatron_epp.plan import EppError

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
    assert items.peek(2) == [5, 3]
    assert next(items) == 5
    assert items.peek(3) == [3, 8, 2]
    assert list(items) == [3, 8, 2, 9, 4]
    assert items.peek(2) == []


def test_iterators_get_one_look_ahead_for_good():
    own = iterator()
    (first,) = installed([own, None])
    assert installed([own, None]) == [first]
    assert installed([None]) == []
    assert installed([own, iter(LENGTHS)]) is None


def test_the_next_iteration_is_agreed_on_before_its_items_are_taken():
    ahead, (source,) = ahead_of_one_rank(), installed([iterator()])
    assert [next(source) for _ in range(2)] == [5, 3]
    ahead.begin([source], 2, shapes_of)
    assert ahead.take([source], 2) == AgreedShapes(shapes_of([8, 2]), ())
    assert [next(source) for _ in range(2)] == [8, 2]


def test_nothing_is_agreed_on_before_the_first_iteration_and_for_another_count():
    ahead, (source,) = ahead_of_one_rank(), installed([iterator()])
    assert ahead.take([source], 2) is None
    ahead.begin([source], 2, shapes_of)
    assert ahead.take([source], 3) is None
    assert [next(source) for _ in range(3)] == [5, 3, 8]


def test_where_the_iterator_ends_the_iteration_itself_says_so():
    ahead, (source,) = ahead_of_one_rank(), installed([iterator()])
    ahead.begin([source], 7, shapes_of)
    assert ahead.take([source], 7) is None
    assert list(source) == list(LENGTHS)


@pytest.mark.parametrize("change", ["an item is taken", "another iterator"])
def test_an_iterator_that_moved_since_is_an_error(change: str):
    ahead, (source,) = ahead_of_one_rank(), installed([iterator()])
    ahead.begin([source], 2, shapes_of)
    if change == "an item is taken":
        next(source)
    else:
        (source,) = installed([iterator()])
    with pytest.raises(EppError, match="not the one of the last call"):
        ahead.take([source], 2)


def test_a_rank_without_data_gets_what_the_others_agreed_on():
    ahead = Ahead(lambda shapes, problem, items: AgreedShapes(shapes_of([7]) if shapes is None else shapes, ()))
    ahead.begin([], 1, shapes_of)
    assert ahead.take([], 1) == AgreedShapes(shapes_of([7]), ())
