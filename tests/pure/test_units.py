"""Bytes as text: two sizes that differ never look alike together, and what is to suffice does."""

import pytest

from megatron_epp.cli.main import main
from megatron_epp.plan.units import enough_gib, format_bytes, format_gib

GIB = 1 << 30
PAIRS = [(72 * GIB, 72 * GIB + 1), (10_737_418, 11_000_000), (80_745_586_688, 80_745_586_680), (1, 2), (5 << 20, 5 << 30)]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_sizes_that_differ_look_different_side_by_side(pair):
    for shown in (format_bytes, format_gib):
        one, other = (shown(*sizes) for sizes in (pair, pair[::-1]))
        assert one != other
        assert all(text.split()[1] in ("GiB", "MiB", "KiB", "B") for text in (one, other))


@pytest.mark.parametrize("size", [0, *(size for pair in PAIRS for size in pair)], ids=str)
def test_a_limit_raised_to_the_number_suffices_and_small_ones_keep_their_digits(size):
    shown = float(enough_gib(size))
    assert shown * GIB >= size
    assert shown * GIB <= max(size * 1.01, size + 0.01 * GIB)
    if 10_000 < size < GIB:
        assert shown * GIB <= 1.01 * size


def test_equal_sizes_take_no_more_digits():
    assert format_bytes(3 * GIB, 3 * GIB) == format_gib(3 * GIB, 3 * GIB) == "3.00 GiB"
    assert enough_gib((5 << 28) + 1) == "1.26"


def test_a_small_cap_is_told_from_the_least_that_would_do(capsys):
    small = ["--layers", "2", "--hidden", "64", "--ffn", "128", "--heads", "2", "--kv-heads", "2", "--vocab", "128"]
    assert main(["plan", *small, "--lengths", "100", "--stages", "2", "--memory-gb", "0.001"]) == 2
    said = capsys.readouterr().err
    cap, least = said.split("a memory cap of ")[1].split(" per rank")[0], said.split("would do is ")[1].split(" (")[0]
    assert cap == "0.00100 GiB"
    assert float(least.removesuffix(" GiB")) > 0.001
    raised = said.split("Raise --memory-cap-gb to ")[1].split(",")[0].split()[0].rstrip(".")
    assert main(["plan", *small, "--lengths", "100", "--stages", "2", "--memory-gb", raised]) == 0
