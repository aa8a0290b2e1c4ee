"""Prefixes that samples share are found from their tokens, at any depth, and each label is trained for one sample."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.features.trees.batch_prefixes import borrowed_of
from megatron_epp.features.trees.prefixes import shared_prefixes
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.proof.plan_tables import check_borrowed
from tests.support.plan.random_forests import forest
from tests.support.plan.small_plans import make_plan, whole

NONE = NOTHING_BORROWED


def borrowed(texts, first_trained=None, least=1):
    first = [len(text) - 1 for text in texts] if first_trained is None else first_trained
    return shared_prefixes([np.array(text) for text in texts], first, least)


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


def test_an_input_whose_label_a_sample_trains_is_its_own():
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]]
    assert borrowed(texts, [0, 2, 4]) == (NONE, Borrowed(0, 2), Borrowed(1, 3))
    assert borrowed(texts, [4, 0, 1]) == (NONE, NONE, Borrowed(1, 1))


def test_a_prefix_too_short_to_pay_is_not_borrowed():
    assert borrowed([[1, 2, 3, 4], [1, 2, 3, 5]], least=3) == ()


@given(st.integers(0, 10**6))
def test_in_random_forests_every_borrowed_input_and_its_label_are_the_holder_s(seed):
    rng = random.Random(seed)
    texts = forest(rng).texts
    rng.shuffle(texts)
    trained = [rng.randint(0, len(text) - 1) for text in texts]
    shared = borrowed(texts, trained) or (NONE,) * len(texts)
    lengths = tuple(len(text) - 1 for text in texts)
    assert [*check_borrowed(replace(make_plan(["0F0 0B0"], whole(1)), lengths=lengths, borrowed=shared))] == []
    for q, (_, count) in enumerate(shared):
        assert count <= trained[q]
        for holder, start, end in path_of(q, count, shared):
            assert texts[holder][start : end + 1] == texts[q][start : end + 1]


@given(st.integers(0, 10**6))
def test_a_forest_without_training_borrows_all_that_it_was_made_to_share(seed):
    grown = forest(random.Random(seed))
    shared = borrowed(grown.texts)
    assert sum(count for _, count in shared) >= sum(count for _, count in grown.borrowed)


class Masked:
    """Sequences of which the first tokens are not trained, and reads of their tokens are counted."""

    def __init__(self, texts, untrained):
        self.texts, self.untrained, self.reads = [np.array(text) for text in texts], untrained, 0
        self.lengths = [len(text) - 1 for text in texts]

    def tokens(self, index, start=0, end=None):
        self.reads += 1
        return self.texts[index][start:end]

    def trained(self, index, start, end):
        count = self.untrained[index]
        return None if count is None else (np.arange(len(self.texts[index])) >= count).astype(np.uint8)[start:end]


PROMPT = list(range(40))
ANSWERS = [[*PROMPT, *rest] for rest in ([50, 51], [50, 60, 61], [70])]


def test_what_a_batch_shares_is_found_in_what_it_does_not_train_and_without_masks_no_token_is_read():
    masked = Masked([*ANSWERS, [1, 2]], [40, 40, 40, 0])
    assert borrowed_of(masked, [0, 1, 2]) == (NONE, Borrowed(0, 39), Borrowed(0, 39))
    assert borrowed_of(masked, [3, 2, 3, 1]) == (NONE, Borrowed(3, 39), NONE, NONE)
    for untrained in ([None] * 3, [31] * 3, [0, None, 20]):
        plain = Masked(ANSWERS, untrained)
        assert (borrowed_of(plain, [0, 1, 2]), plain.reads) == ((), 0)


def claiming(parents, untrained=(40, 41, 40)):
    dataset = Masked(ANSWERS, untrained)
    dataset.borrowed = lambda indices: parents
    return dataset


def test_a_dataset_may_say_what_its_sequences_share_and_is_checked_token_by_token():
    assert borrowed_of(claiming(((-1, 0), (0, 40), (1, 30))), [0, 1, 2]) == (NONE, Borrowed(0, 40), Borrowed(0, 30))
    assert borrowed_of(claiming(()), [0, 1, 2]) == ()
    wrong = {
        ((-1, 0), (2, 41), (-1, 0)): "sequence 1 of 42 tokens shares 41 with its parent, sequence 2, which has 40",
        ((1, 39), (0, 39), (-1, 0)): "sequences 0, 1 are parents of each other, in a circle",
        ((-1, 0), (0, 3)): "the dataset names parents of 2 sequences of a batch of 3",
        ((-1, 0), (0, 41), (-1, 0)): "sequence 1 of the batch (1 of the dataset) trains token 41, and can share the 40 before",
    }
    for parents, says in wrong.items():
        with pytest.raises(EppError, match=re.escape(says)):
            borrowed_of(claiming(parents), [0, 1, 2])
    other = claiming(((-1, 0), (0, 35)))
    other.texts[2][33] = 7
    says = (
        "sequence 1 of the batch (2 of the dataset) begins with 35 tokens of sequence 0 of the batch (1 of the dataset) by its "
    )
    with pytest.raises(EppError, match=re.escape(f"{says}dataset, but token 33 is 7, and 33 there")):
        borrowed_of(other, [1, 2])
