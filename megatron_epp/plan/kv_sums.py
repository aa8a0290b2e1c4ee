"""Precision in which the gradients of a sliced sequence's keys and values are accumulated, for plans and runs."""

from __future__ import annotations

CHOICES = ("auto", "on", "off")
"""Choices for sums in fp32: for sequences with many slices, always, or never."""

MOST_ROUNDED = 8
"""Largest number of slices for which `auto` keeps sums in the run's precision. A sum in bf16 rounds once for every slice. With
8 random slices the error of keys' gradients is 1.3 times that of sums in fp32, which have attention's own rounding only; with
128 it is 2.3 times that, and it grows further.
"""


def in_fp32(choice: str, num_slices: int) -> bool:
    """True if a sequence's sums are in fp32, independent of the precision of the added gradients.

    Args:
        choice: one of `CHOICES`.
        num_slices: of the sequence.
    """
    return choice == "on" or (choice == "auto" and num_slices > MOST_ROUNDED)
