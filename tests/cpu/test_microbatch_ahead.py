"""Ranks agree on the next iteration's microbatches while the present one runs, and never on others than it will take."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_epp.mcore.iteration.agreement import AgreedShapes
from megatron_epp.mcore.iteration.look_ahead import Ahead, LookAhead, installed
from megatron_epp.mcore.iteration.microbatch_shapes import Microbatch
from megatron_epp.plan import EppError

LENGTHS = (5, 3, 8, 2, 9, 4)
LIMIT_S = 30.0


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


def test_the_callers_iterator_is_read_on_the_gpu_of_the_rank(monkeypatch):
    used = {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.setdefault(threading.get_ident(), device))
    readers = []

    def items():
        for length in LENGTHS:
            readers.append(threading.get_ident())
            yield length

    ahead = ahead_of_one_rank()
    ahead.begin([LookAhead(items())], 2, shapes_of)
    ahead.wait()
    assert [used[reader] for reader in readers] == [3, 3]


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


def test_the_next_iteration_is_agreed_on_while_the_present_one_runs():
    runs = threading.Event()

    def agree(shapes, problem, items):
        assert runs.wait(LIMIT_S)
        return AgreedShapes(shapes, ())

    ahead, (source,) = Ahead(agree), installed([iterator()])
    present = [next(source) for _ in range(2)]
    ahead.begin([source], 2, shapes_of)  # does not wait
    runs.set()
    assert present == [5, 3]
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
    ahead.wait()
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
    ahead.close()


def test_items_of_the_next_iteration_are_held_until_it_takes_them():
    seen = []

    def agree(shapes, problem, items):
        seen.append(items)
        return AgreedShapes(shapes, ())

    ahead, (source,) = Ahead(agree), installed([iterator()])
    ahead.begin([source], 2, shapes_of)
    ahead.wait()
    assert seen == [[[5, 3]]]
    assert ahead.held == [[5, 3]]
    ahead.take([source], 2)
    assert ahead.held == []
    ahead.close()
