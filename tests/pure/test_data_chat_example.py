"""A sample of a conversation is shown with what is trained marked, and of what is long the beginning and the end."""

from collections.abc import Sequence

import numpy as np

from megatron_epp.data.chat import example_lines


def decode(ids: Sequence[int]) -> str:
    """Return text whose tokens are lines by their numbers."""
    return "".join(f"line {number}\n" for number in ids)


def lines_of(trained: Sequence[int]) -> list[str]:
    mask = np.array(trained, dtype=np.uint8)
    return example_lines(np.arange(len(mask)), mask, decode)


def test_parts_that_train_are_marked_and_line_breaks_of_the_text_are_written_out():
    assert lines_of([0, 1, 1]) == [f"{'':9} | line 0\\n", "  trained | line 1\\n", "  trained | line 2\\n"]


def test_of_a_long_part_the_first_and_the_last_lines_are_shown_and_how_many_are_not():
    shown = [line.rpartition("| ")[2] for line in lines_of([1] * 20)]
    assert shown == [*(rf"line {number}\n" for number in range(5)), "... 13 lines ...", r"line 18\n", r"line 19\n"]


def test_of_many_parts_the_first_and_the_last_ones_are_shown_and_how_many_are_not():
    shown = lines_of([0, 1] * 20)
    assert [line.rpartition("| ")[2] for line in shown] == [
        *(rf"line {number}\n" for number in range(7)),
        "... 29 parts ...",
        *(rf"line {number}\n" for number in range(36, 40)),
    ]
