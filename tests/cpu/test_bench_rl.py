"""Microbatches of RL frameworks keep to their rules; a measured ratio says what it is worth."""

from argparse import Namespace

import pytest

from megatron_epp.contrib.demos.rounds import Occupancy
from scripts.bench import training
from scripts.bench.rl.rules import RULES, balanced, work

LENGTHS = [900, 30, 450, 450, 10, 700, 100, 320, 640, 60]
BUDGET = 1000


@pytest.mark.parametrize("name", RULES)
def test_every_sequence_is_in_one_microbatch(name):
    rows = RULES[name](LENGTHS, BUDGET)
    left = [length for row in rows for length in row]
    for length in LENGTHS:
        left.remove(length)
    assert (sum(left) == 0) == (name == "verl")
    if name == "slime":
        assert all(sum(row) % 128 == 0 for row in rows)
    if name == "NeMo-RL":
        assert len({sum(row) for row in rows}) == 1


def test_parts_of_equal_work_are_nearly_equal_and_as_many_as_asked_for():
    rows = balanced(LENGTHS, 4)
    assert sorted(length for row in rows for length in row) == sorted(LENGTHS)
    of_rows = [sum(map(work, row)) for row in rows]
    assert len(rows) == 4
    assert max(of_rows) <= 1.1 * sum(of_rows) / 4
    assert [sorted(row) for row in balanced([5, 3], 2)] in ([[5], [3]], [[3], [5]])


def test_verls_largest_microbatch_is_in_the_middle():
    sizes = [sum(map(work, row)) for row in RULES["verl"](LENGTHS, 700)]
    at = sizes.index(max(sizes))
    assert (sizes[: at + 1], sizes[at:]) == (sorted(sizes[: at + 1]), sorted(sizes[at:], reverse=True))


def test_ratios_of_a_training_next_to_other_programs_are_said_to_be_worth_little() -> None:
    def text(others: float) -> str:
        figures = training.figures_of({"1f1b": 2.0, "elastic": 1.0}, Occupancy(others, 2, 2))
        return training.text(Namespace(), [{"case": "uniform"} | figures])

    assert text(1.2).endswith("uniform: ratios are worth little: other programs took 1.2 of 2 cores")
    assert "worth" not in text(0.1)
