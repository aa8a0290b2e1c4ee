"""Tokens that sequences of a program's microbatches begin with are found in columns as frameworks have them."""

from types import SimpleNamespace

import pytest
import torch

from megatron_epp.callers.verl import unread
from megatron_epp.features.microbatch_prefixes.sample_tokens import borrowed_of
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed

PROMPT = [*range(1, 41)]
FIRST, SECOND, OTHER = torch.tensor([*PROMPT, 7]), torch.tensor([*PROMPT, 8, 9]), torch.tensor([*range(50, 60)])
AGAIN = torch.tensor([*PROMPT, 8, 9, 9])


def jagged(*rows):
    return torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


COLUMNS = {
    "jagged, as verl's": lambda *rows: {"input_ids": jagged(*rows)},
    "a list, as slime's": lambda *rows: {"tokens": [*rows]},
    "one row": lambda *rows: {"tokens": torch.cat(rows)[None]},
    "of an object": lambda *rows: SimpleNamespace(input_ids=torch.cat(rows)),
}


def found(column, *microbatches, most=None, multiple=1, lengths=None):
    lengths = lengths or [tuple(map(len, rows)) for rows in microbatches]
    limits = most or [length - 1 for each in lengths for length in each]
    return borrowed_of([COLUMNS[column](*rows) for rows in microbatches], lengths, limits, multiple)


@pytest.mark.parametrize("column", COLUMNS)
def test_a_sequence_borrows_the_most_of_an_earlier_one_that_has_it(column):
    assert found(column, [FIRST, OTHER], [SECOND, AGAIN]) == (
        NOTHING_BORROWED,
        NOTHING_BORROWED,
        Borrowed(0, 40),
        Borrowed(2, 42),
    )


def test_nothing_is_borrowed_of_later_ones_nor_below_the_least_nor_beyond_limits():
    assert found("one row", [AGAIN], [SECOND]) == (NOTHING_BORROWED, Borrowed(0, 41))  # its last token runs itself
    assert found("one row", [FIRST, SECOND], most=[40, 35]) == (NOTHING_BORROWED, Borrowed(0, 35))
    assert found("one row", [FIRST, SECOND], multiple=16) == (NOTHING_BORROWED, Borrowed(0, 32))
    assert found("one row", [FIRST, SECOND], most=[40, 31]) == ()
    assert found("one row", [FIRST, OTHER]) == ()


def test_padding_is_no_tokens_of_sequences():
    assert found("jagged, as verl's", [FIRST], [SECOND], lengths=[(48,), (48,)]) == (NOTHING_BORROWED, Borrowed(0, 40))
    padded = found("a list, as slime's", [FIRST], [SECOND], lengths=[(41, 87), (42, 86)])
    assert padded == (NOTHING_BORROWED, NOTHING_BORROWED, Borrowed(0, 40), NOTHING_BORROWED)


@pytest.mark.parametrize(
    "item",
    [{}, {"tokens": torch.zeros(2, 21, dtype=torch.int64)}, {"tokens": "text"}, {"tokens": [torch.zeros(100)]}],
    ids=["no tokens", "rows of several sequences", "no tensor", "longer than it says"],
)
def test_where_tokens_are_not_found_nothing_is_shared(item):
    assert borrowed_of([{"tokens": FIRST}, item], [(41,), (42,)], [40, 41], 1) == ()


def test_verls_prompts_are_unread_but_for_their_last_tokens_where_they_are_jagged():
    prompts, padded = jagged(FIRST, SECOND), torch.zeros(2, 50, dtype=torch.int64)
    assert unread({"prompts": prompts, "responses": prompts}) == [40, 41]
    assert unread({"prompts": padded, "responses": padded}) is None
    assert unread({"input_ids": prompts}) is None
