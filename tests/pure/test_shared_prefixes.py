"""Prefixes that samples share are found from their tokens, at any depth, and each label is trained for one sample."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.features.trees.prefixes import shared_prefixes
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from tests.support.plan.random_forests import forest

NONE = NOTHING_BORROWED


def borrowed(texts, trained=None, least=1):
    masks = [
        np.zeros(len(text) - 1, dtype=bool) if trained is None else np.array(trained[q], dtype=bool)
        for q, text in enumerate(texts)
    ]
    return shared_prefixes([np.array(text) for text in texts], masks, least)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5]], (NONE, Borrowed(0, 2))),
        ([[1, 2, 3, 5], [1, 2, 3, 4]], (Borrowed(1, 2), NONE)),  # the first of them in the order of tokens lends
        ([[1, 2, 3], [1, 2, 3]], (NONE, Borrowed(0, 1))),  # equal ones: the last input stays each one's own
        ([[1, 2, 3], [1, 2, 3, 4]], (NONE, Borrowed(0, 2))),
        ([[1, 2], [1, 3]], ()),  # one token in common, and no label
        ([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 8]], (NONE, Borrowed(0, 4), Borrowed(0, 2))),
        ([[1, 2, 3, 4], [1, 2, 9, 4, 5], [1, 2, 9, 4, 6]], (NONE, Borrowed(0, 1), Borrowed(1, 3))),
        ([[300, 1, 2], [2, 1, 2], [300, 1, 3]], (NONE, NONE, Borrowed(0, 1))),
        ([[1, 2, 3]], ()),
    ],
)
def test_what_samples_borrow(texts, expected):
    assert borrowed(texts) == expected


def test_a_label_that_two_train_is_not_borrowed_and_one_that_either_trains_is():
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]
    assert borrowed(texts, [[0, 1, 0, 1], [0, 0, 1, 1]]) == (NONE, Borrowed(0, 3))
    assert borrowed(texts, [[0, 1, 0, 1], [0, 1, 1, 1]]) == (NONE, Borrowed(0, 1))
    third = [*texts, [1, 2, 3, 4, 7]]  # the second trains a label that the first holds, and so does the third
    assert borrowed(third, [[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1]]) == (NONE, Borrowed(0, 3), Borrowed(0, 2))


def test_a_prefix_too_short_to_pay_is_not_borrowed():
    assert borrowed([[1, 2, 3, 4], [1, 2, 3, 5]], least=3) == ()


@given(st.integers(0, 10**6))
def test_in_random_forests_every_borrowed_input_and_its_label_are_the_holder_s(seed):
    rng = random.Random(seed)
    texts = forest(rng).texts
    rng.shuffle(texts)
    trained = [[rng.random() < 0.2 for _ in text[1:]] for text in texts]
    shared = borrowed(texts, trained) or (NONE,) * len(texts)
    for q, (_, count) in enumerate(shared):
        assert count < len(texts[q]) - 1
        for holder, start, end in path_of(q, count, shared):
            assert texts[holder][start : end + 1] == texts[q][start : end + 1]
    trainers = [
        (holder, token)
        for q, text in enumerate(texts)
        for holder, start, end in path_of(q, len(text) - 1, shared)
        for token in range(start, end)
        if trained[q][token]
    ]
    assert len(set(trainers)) == len(trainers) == sum(map(sum, trained))


@given(st.integers(0, 10**6))
def test_a_forest_without_training_borrows_all_that_it_was_made_to_share(seed):
    grown = forest(random.Random(seed))
    shared = borrowed(grown.texts)
    assert sum(count for _, count in shared) >= sum(count for _, count in grown.borrowed)
