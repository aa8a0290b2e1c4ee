"""Runs of the parity tests, some iterations each: ways to cut the same documents, and the models to train."""

from dataclasses import dataclass

from scripts.parity.cells import Cell

ITERATIONS = 5
MORE_ITERATIONS = 20
"""Iterations of all cases in the set `slow`."""
LEARNED = {ITERATIONS: 0.05, MORE_ITERATIONS: 0.1}
"""Least difference between the first and the last loss of a training that learns, by number of iterations."""


@dataclass(frozen=True)
class Cut:
    """A way to cut and pack the documents, and what its plans must then contain, or the case proves nothing.

    Attributes:
        flags: that ask for it.
        slices: of the longest document of every batch, where it has that many tokens.
        has: a kind of chunk that the first or the last plan must have, since their gradients are compared: ``whole`` (a
            document), ``packed`` (several), ``split`` (a slice) or ``hybrid`` (a slice next to whole documents).
        recompute: shares of a stage's layers, ``none``, ``some`` or ``all``, that recompute somewhere in the plans.
        splits: weight gradients are apart from their backwards.
    """

    flags: str
    slices: int
    has: str
    recompute: tuple[str, ...] = ("none",)
    splits: bool = False


CUTS = {
    "whole": Cut("--epp-planner 1f1b", slices=1, has="whole"),
    "packed": Cut("--epp-slices 1", slices=1, has="packed"),
    "two": Cut("--epp-slices 2", slices=2, has="split"),
    "hybrid": Cut("--epp-slices 3", slices=3, has="hybrid"),
    "seven": Cut("--epp-slices 7", slices=7, has="hybrid"),
    "some recompute": Cut("--epp-slices 7 --epp-recompute 1", slices=7, has="hybrid", recompute=("some",)),
    "all recompute": Cut("--epp-slices 3 --epp-recompute 4", slices=3, has="hybrid", recompute=("all",)),
    "split": Cut("--epp-slices 3 --epp-split-weight-gradient", slices=3, has="hybrid", splits=True),
    "split, some recompute": Cut(
        "--epp-slices 3 --epp-split-weight-gradient --epp-recompute 1", slices=3, has="hybrid", recompute=("some",), splits=True
    ),
    "loss by blocks": Cut("--epp-slices 3 --epp-loss-block-tokens 5", slices=3, has="hybrid"),
    # As much as the cap asks for, so not the same for every chunk.
    "capped": Cut("--epp-slices 3 --epp-memory-cap-gb 0.0006", slices=3, has="hybrid", recompute=("all", "none", "some")),
}

Cases = dict[Cell, dict[str, tuple[str, ...]]]

CASES: Cases = {
    Cell(): {"llama": ("two",)},
    Cell(pp=2): {
        "llama": ("capped",),
        "grouped": ("some recompute",),
        "learned": ("all recompute",),
        "gpt2": ("split, some recompute",),
    },
}
"""Cuts by model, on two stages and one of them on one: every cut but those to which another one only adds something. Whole and
packed documents, and the loss by blocks, are in other rows: of routers, of every two kinds, of masked labels.
"""
MORE_CASES: Cases = {
    Cell(): {"llama": ("two", "packed", "some recompute"), "grouped": ("seven",), "gpt2": ("all recompute", "loss by blocks")},
    Cell(pp=2): {
        "llama": tuple(CUTS),
        "grouped": ("whole", "packed", "some recompute", "split"),
        "learned": ("two", "seven", "all recompute"),
        "gpt2": ("packed", "seven", "all recompute", "split", "split, some recompute"),
    },
}
"""The same and more, for longer, in the set `slow`."""

ALL_STATISTICS = (
    "--make-vocab-size-divisible-by 64 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5 "
    "--moe-z-loss-coeff 0.1 --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-router-bias-update-rate 0.003"
)
"""Flags of routers that add up and count all that they can over tokens, on any number of ranks that share a vocabulary."""
