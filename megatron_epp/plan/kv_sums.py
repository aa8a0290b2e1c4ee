"""In which precision the gradients of a sliced sequence's keys and values are added up. Plans and runs go by this file."""

from __future__ import annotations

CHOICES = ("auto", "on", "off")
"""In fp32 where a sequence has many slices, always, or never."""

MOST_ROUNDED = 8
"""Slices up to which sums of `auto` keep the run's precision. A sum in bf16 rounds once for every slice. With 8 random slices
the error of keys' gradients is 1.3 times that of sums in fp32, where attention's own rounding is left; with 128 it is 2.3 times
that, and it grows.
"""


def in_fp32(choice: str, num_slices: int) -> bool:
    """Whether a sequence's sums are in fp32, whatever the precision of the gradients that are added.

    Args:
        choice: one of `CHOICES`.
        num_slices: of the sequence.
    """
    return choice == "on" or (choice == "auto" and num_slices > MOST_ROUNDED)
