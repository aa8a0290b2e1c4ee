"""A caller's microbatches are taken once, measured, and given back in any order."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch

from megatron_epp.mcore.microbatches.source import Microbatch, shape_of, take, tensor_bytes
from megatron_epp.plan import EppError


def tokens(*shape: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.zeros(shape, dtype=torch.int64)}


def packed(ends: list[int], total: int) -> dict[str, torch.Tensor]:
    return {**tokens(1, total), "cu_seqlens": torch.tensor([ends], dtype=torch.int32)}


class ByKeys:
    """Iterator with random access, as frameworks for reinforcement learning have them."""

    def __init__(self, lengths: list[list[int]]) -> None:
        self.lengths, self.offset = lengths, 0

    def get_next(self, keys: list[str]) -> dict[str, list[int]]:
        self.offset += 1
        return dict.fromkeys(keys, self.lengths[self.offset - 1])


@pytest.mark.parametrize(
    ("item", "shape"),
    [
        (tokens(2, 16), Microbatch((16, 16), 2)),
        (tokens(24), Microbatch((24,))),
        ({"input_ids": torch.zeros(1, 5)}, Microbatch((5,))),
        (packed([0, 3, 10], 10), Microbatch((3, 7))),
        (packed([0, 3, 10, 10, 10], 10), Microbatch((3, 7))),
        (packed([0, 3, 10], 16), Microbatch((3, 7, 6))),
        ([tokens(1, 4)], Microbatch((4,))),
        ({"total_lengths": [4, 9]}, Microbatch((4, 9))),
    ],
)
def test_the_shape_of_a_microbatch_is_found(item: object, shape: Microbatch) -> None:
    assert shape_of(item) == shape


@pytest.mark.parametrize("item", [7, {}, {"labels": torch.zeros(1, 4)}])
def test_a_microbatch_without_lengths_is_refused_and_the_remedy_named(item: object) -> None:
    with pytest.raises(EppError, match="shape_of"):
        shape_of(item)


def test_microbatches_come_back_in_any_order() -> None:
    taken = take(iter([tokens(1, 3), tokens(1, 5), tokens(1, 7)]), 3, shape_of)
    assert taken.shapes() == (Microbatch((3,)), Microbatch((5,)), Microbatch((7,)))
    assert [next(taken.at(index))["tokens"].shape[1] for index in (2, 0, 1)] == [7, 3, 5]


def test_no_more_items_are_taken_than_the_iteration_has() -> None:
    iterator = iter([tokens(1, 3), tokens(1, 5)])
    take(iterator, 1, shape_of)
    assert next(iterator)["tokens"].shape[1] == 5


def test_an_iterator_that_ends_early_is_named_with_its_count() -> None:
    with pytest.raises(EppError, match="ended after 1 of 2 microbatches"):
        take(iter([tokens(1, 3)]), 2, shape_of)


def test_a_forward_step_that_takes_two_items_is_told_so() -> None:
    one = take(iter([tokens(1, 3)]), 1, shape_of).at(0)
    next(one)
    with pytest.raises(EppError, match="second item for microbatch 0"):
        next(one)


def test_an_iterator_with_an_offset_is_read_by_offset_and_left_behind_its_last_microbatch() -> None:
    iterator = ByKeys([[1], [2, 3], [4], [5]])
    iterator.offset = 1
    taken = take(iterator, 2, shape_of)
    assert taken.shapes() == (Microbatch((2, 3)), Microbatch((4,)))
    assert [taken.at(index).get_next(["x"])["x"] for index in (1, 0)] == [[4], [2, 3]]
    taken.finish()
    assert iterator.offset == 3


def test_a_rank_without_an_iterator_has_no_lengths() -> None:
    assert take(None, 2, shape_of).shapes() is None
    assert take(None, 2, shape_of).at(0) is None


def test_an_object_that_is_no_iterator_is_refused_by_its_type() -> None:
    with pytest.raises(EppError, match="is a list, which has neither __next__"):
        take([tokens(1, 3)], 1, shape_of)


def test_bytes_of_microbatches_are_those_of_their_storages_on_the_device() -> None:
    class Packed:
        def __init__(self) -> None:
            self.ends = torch.zeros(3, dtype=torch.int32)

    whole = torch.zeros(10, dtype=torch.float32)

    @dataclass(slots=True)
    class Slotted:
        inner: Packed

    batch = OrderedDict(tokens=whole[:4], more=[whole[4:], Slotted(Packed())], count=3, text="words")
    items = [batch, batch, torch.zeros(2, 2, device="meta"), torch.eye(3).to_sparse()]
    assert tensor_bytes(items, torch.device("cpu")) == 40 + 12
    taken = take(iter([tokens(1, 3), tokens(1, 5)]), 2, shape_of)
    assert taken.num_bytes(torch.device("cpu")) == 8 * 8
    assert take(None, 2, shape_of).num_bytes(torch.device("cpu")) == 0
