"""What the parity tests train: models, ways to cut the same documents, and layouts of processes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

ITERATIONS = 20
CONTEXT = 64
VOCABULARY = 95

# Training positions of the documents: a few long (two of them longer than the context), most short, as real text is.
# fmt: off
LENGTHS = (
    70, 5, 2, 41, 9, 3, 14, 1, 52, 6, 22, 4, 11, 64, 2, 7, 33, 3, 18, 1, 8, 47, 5, 13, 29, 6, 58, 2, 10, 24, 3, 16,
    12, 81, 4, 37, 2, 9, 6, 20,
)
# fmt: on

# Adam divides a gradient by its own size, so where a gradient happens to be next to nothing, rounding decides the step. With
# the default epsilon of 1e-8, one weight of 4096, its first gradient 8e-9 (the median is 2e-3), carried 99 % of its tensor's
# difference after 20 iterations, 4e-5 of the norm. The keys' bias is the extreme of it: it moves all scores of a query alike,
# so its true gradient is zero. An epsilon of the size of an ordinary gradient makes steps a smooth function of gradients.
COMMON = shlex.split(
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {CONTEXT} --max-position-embeddings {CONTEXT} "
    f"--transformer-impl local --micro-batch-size 1 --global-batch-size 8 --train-iters {ITERATIONS} --lr 3e-3 --adam-eps 1e-3 "
    f"--lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 32 "
    "--split 80,20,0 --eval-iters 1 --eval-interval 1000 --log-interval 1000 --attention-dropout 0 --hidden-dropout 0 "
    "--calculate-per-token-loss --epp"
)

# Between them: rope and learned positions, layer and RMS norm, tied and untied embeddings, grouped queries, gates, biases.
MODELS = {
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights",
    "grouped": "--position-embedding-type rope --normalization LayerNorm --swiglu --disable-bias-linear "
    "--group-query-attention --num-query-groups 2",
    "learned": "--position-embedding-type learned_absolute --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2",
    "gpt2": "--position-embedding-type learned_absolute --normalization LayerNorm",
}


@dataclass(frozen=True)
class Cut:
    """A way to cut and pack the documents, and what its plans must then contain, or the case proves nothing.

    Attributes:
        flags: that ask for it.
        slices: of the longest document of every batch, where it has that many tokens.
        has: a kind of chunk that the first or the last plan must have, since their gradients are compared: ``whole`` (a
            document), ``packed`` (several), ``split`` (a slice) or ``hybrid`` (a slice beside whole documents).
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
    # As much as the cap asks for, so not the same for every chunk.
    "capped": Cut("--epp-slices 3 --epp-memory-cap-gb 0.0006", slices=3, has="hybrid", recompute=("all", "none", "some")),
}


@dataclass(frozen=True)
class Layout:
    """How the processes share the work, and which cuts of which models are compared there.

    Attributes:
        num_processes: in all.
        sizes: flags that set the parallel sizes. Layouts that agree in both share a launch.
        flags: the others.
        cases: cuts by model.
        context: flags that only the plans run with. Megatron's own attention cannot share out tokens on a CPU: beside it, what
            shares tokens here shares documents.
    """

    num_processes: int
    sizes: str
    flags: str
    cases: dict[str, tuple[str, ...]]
    context: str = ""


PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPPED = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"

LAYOUTS = {
    "pp1": Layout(1, "", "", {"llama": ("packed", "two", "some recompute"), "grouped": ("seven",), "gpt2": ("all recompute",)}),
    "pp2": Layout(
        2,
        PP2,
        "",
        {
            "llama": tuple(CUTS),
            "grouped": ("whole", "packed", "some recompute"),
            "learned": ("two", "seven"),
            "gpt2": ("packed", "seven", "all recompute", "split", "split, some recompute"),
        },
    ),
    "pp4": Layout(4, PP4, "", {"llama": ("seven",), "gpt2": ("all recompute",)}),
    "cp2": Layout(2, "", "", {"llama": ("packed", "seven"), "gpt2": ("some recompute",)}, CP2),
    "cp2 x pp2": Layout(4, PP2, DISTRIBUTED, {"grouped": ("some recompute",)}, CP2),
    "tp2 x pp2": Layout(4, f"{TP2} {PP2}", "", {"grouped": ("some recompute",)}),
    "tp2 sp x pp2": Layout(4, f"{TP2} {PP2}", "--sequence-parallel", {"gpt2": ("some recompute", "split")}),
    "dp2 x pp2": Layout(4, PP2, DISTRIBUTED, {"llama": ("packed", "some recompute")}),
    "dp2 x pp2, overlapped": Layout(4, PP2, OVERLAPPED, {"gpt2": ("seven", "split")}),
}
