"""Cases of the parity comparison: models, parallel layouts, and rows that cover every pair of choices."""

from __future__ import annotations

import functools
import itertools
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

MOST_PROCESSES = 8
CONTEXT = 64
VOCABULARY = 95

# Training positions of the documents: a few long (two of them longer than the context), most short, as real text is.
# fmt: off
LENGTHS = (
    70, 5, 2, 41, 9, 3, 14, 1, 52, 6, 22, 4, 11, 64, 2, 7, 33, 3, 18, 1, 8, 47, 5, 13, 29, 6, 58, 2, 10, 24, 3, 16,
    12, 81, 4, 37, 2, 9, 6, 20,
)
# fmt: on

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
OPTIMIZERS = {
    "plain": "",
    "distributed": "--use-distributed-optimizer",
    "overlapped": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
EXPERTS = "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --no-bias-gelu-fusion --disable-bias-linear"
PLANS = {
    "packed": "--epp-slices 1",
    "sliced": "--epp-slices 3",
    "recompute": "--epp-slices 7 --epp-recompute 1 --epp-loss-block-tokens 5",  # logits again in backward, too
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Parallel layout of the processes.

    Attributes:
        tp: ranks that share the weights of every layer.
        sp: these share tokens too, between the layers' matrix products.
        cp: ranks that share the tokens.
        dp: ranks that share the documents.
        pp: ranks that share the layers.
        virtual: stages of each of these.
        placement: of several stages.
        split: weight gradients are actions of their own.
        experts: in every layer; 0 for a dense model.
        ep: ranks that share the experts, of those that share documents.
    """

    tp: int = 1
    sp: bool = False
    cp: int = 1
    dp: int = 1
    pp: int = 1
    virtual: int = 1
    placement: str = "looped"
    split: bool = False
    experts: int = 0
    ep: int = 1

    def __str__(self) -> str:
        names = [f"{name}{size}" for name in ("tp", "cp", "dp", "pp") if (size := getattr(self, name)) > 1]
        if self.sp:
            names.insert(1, "sp")
        if self.virtual > 1:
            names.append(f"{self.placement}{self.virtual}")
        if self.split:
            names.append("split")
        if self.experts:
            names.append(f"experts{self.experts}" + (f" ep{self.ep}" if self.ep > 1 else ""))
        return " ".join(names) or "alone"

    @property
    def num_processes(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def flags(self) -> list[str]:
        sizes = {"tensor-model": self.tp, "context": self.cp, "pipeline-model": self.pp}
        flags = [word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size))]
        if self.virtual > 1:
            flags += ["--num-virtual-stages-per-pipeline-rank", str(self.virtual), "--epp-placement", self.placement]
        flags += ["--sequence-parallel"] * self.sp + ["--epp-split-weight-gradient"] * self.split
        if self.experts:
            flags += ["--num-experts", str(self.experts), *EXPERTS.split(), "--expert-model-parallel-size", str(self.ep)]
        if self.ep > 1 and self.tp > 1:  # or tensor-parallel ranks gather unequal parts, which gloo cannot
            flags += ["--expert-tensor-parallel-size", "1"]
        return flags

    @property
    def stock(self) -> Cell:
        """Layout that Megatron's own schedule runs for comparison. Its attention cannot divide tokens on a CPU, so cp is 1.
        It knows only the looped placement, so any other is compared with one stage per rank.
        """
        stages = {} if self.placement == "looped" else {"virtual": 1, "placement": "looped"}
        return replace(self, cp=1, split=False, **stages)


@dataclass(frozen=True)
class Case:
    """One comparison: a cell, a model (of MODELS), the flags of the run with plans alone, and more flags of both.

    With `alone`, stock runs on one process, where nothing is padded.
    """

    cell: Cell
    model: str
    plan: str
    optimizer: str = ""
    both: str = ""
    alone: bool = False

    @property
    def stock(self) -> Cell:
        """Layout of the run without plans."""
        return Cell(experts=self.cell.experts) if self.alone else self.cell.stock

    @property
    def loads(self) -> bool:
        """Stock places stages elsewhere, and so would begin with other weights: it saves them for the run with plans."""
        return self.alone or self.cell.placement != self.stock.placement or "layout" in self.plan or "helix" in self.plan

    def stock_flags(self, common: Iterable[str]) -> tuple[str, ...]:
        own = shlex.split(f"{MODELS[self.model]} {self.both}")
        return (*common, *own, *self.stock.flags, "--epp-schedule", "stock")

    def elastic_flags(self, common: Iterable[str]) -> tuple[str, ...]:
        # Last those of the plan, which may have another dispatcher of tokens than its cell.
        return (*common, *self.cell.flags, *shlex.split(f"{MODELS[self.model]} {self.both} {self.plan} {self.optimizer}"))


EVEN = "--epp-layout even --epp-vocab-parallel off --epp-split-weight-gradient off"
"""Flags with which nothing is chosen: runs begin with the weights of Megatron's stages, and a row is of what it names."""


def common_flags(iterations: int, context: int, batch: int, validates: bool) -> list[str]:
    """Settings that all runs of a comparison share. A document is one sequence, so that a batch of as many is all of them.

    Adam divides a gradient by its own size, so where a gradient happens to be next to nothing, rounding decides the step. With
    the default epsilon of 1e-8, one weight of 4096, its first gradient 8e-9 (the median is 2e-3), carried 99 % of its tensor's
    difference after 20 iterations, 4e-5 of the norm. The keys' bias is the extreme of it: it moves all scores of a query alike,
    so its true gradient is zero. An epsilon of the size of an ordinary gradient makes steps a smooth function of gradients.
    """
    return shlex.split(
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --transformer-impl local --micro-batch-size 1 --lr 3e-3 "
        f"--adam-eps 1e-3 --lr-decay-style constant --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
        "--make-vocab-size-divisible-by 32 --eval-interval 1000 --log-interval 1000 --attention-dropout 0 --hidden-dropout 0 "
        f"--calculate-per-token-loss --epp --train-iters {iterations} --global-batch-size {batch} --seq-length {context} "
        f"--max-position-embeddings {context} --epp-documents truncate {EVEN} "
        + ("--split 80,20,0 --eval-iters 1" if validates else "--split 100,0,0 --eval-iters 0")
    )


# ---- the matrix ------------------------------------------------------------------------------------------------------

_SIZES = ("tp", "cp", "dp", "pp", "stages", "split", "experts")
_TOGETHER = {
    frozenset(pair)
    for pair in (
        *itertools.combinations(_SIZES, 2),
        *itertools.product(("optimizer",), ("cp", "dp", "stages", "split")),
        *itertools.product(("model", "plan"), ("tp", "cp", "pp", "stages", "split")),
        ("plan", "experts"),
    )
}
"""Choices that must meet. The others have nothing to do with each other."""
_START = 3
"""Fixed cost of a row, in processes; of 0 to 20 the value that covers all pairs with the fewest processes."""


@dataclass(frozen=True)
class Row:
    """A row of the matrix: a cell with keys of MODELS, OPTIMIZERS and PLANS."""

    cell: Cell
    model: str
    optimizer: str
    plan: str

    def __str__(self) -> str:
        return f"{self.cell}: {self.model}, {self.plan}, {self.optimizer}"

    @property
    def case(self) -> Case:
        return Case(self.cell, self.model, PLANS[self.plan], OPTIMIZERS[self.optimizer])

    @property
    def pairs(self) -> set[tuple[tuple[str, str], ...]]:
        """Every two choices that meet in it."""
        cell = self.cell
        sizes = {"tp": f"{cell.tp}{' sp' if cell.sp else ''}", "cp": str(cell.cp), "dp": str(cell.dp), "pp": str(cell.pp)}
        sizes |= {"stages": f"{cell.virtual} {cell.placement}", "split": str(cell.split)}
        sizes["experts"] = f"{cell.experts} over {cell.ep}"
        choices = sizes | {"model": self.model, "optimizer": self.optimizer, "plan": self.plan}
        pairs = itertools.combinations(choices.items(), 2)
        return {pair for pair in pairs if frozenset(name for name, _ in pair) in _TOGETHER}


def all_cells() -> list[Cell]:
    """Every cell of the matrix, smallest first. With one stage no plan gains by splitting, so none does. Four layers are enough
    for two stages on each of two ranks.
    """
    pipelines = ((1, 1, "looped"), (2, 1, "looped"), (4, 1, "looped"), (2, 2, "looped"), (2, 2, "v"))
    experts = ((0, 1), (4, 1), (4, 2))
    sizes = itertools.product(((1, False), (2, False), (2, True)), (1, 2), (1, 2), pipelines, (False, True), experts)
    cells = [
        Cell(tp=tp, sp=sp, cp=cp, dp=dp, pp=pp, virtual=virtual, placement=placement, split=split, experts=count, ep=ep)
        for (tp, sp), cp, dp, (pp, virtual, placement), split, (count, ep) in sizes
    ]
    cells = [cell for cell in cells if cell.num_processes <= MOST_PROCESSES and (cell.pp > 1 or not cell.split)]
    # Megatron trains experts with tensor parallelism only where tokens are shared too.
    possible = [cell for cell in cells if cell.ep <= cell.dp and (cell.tp == 1 or cell.sp or not cell.experts)]
    return sorted(possible, key=lambda cell: cell.num_processes)


@functools.cache
def all_rows() -> tuple[Row, ...]:
    """Every cell with every model, plan and optimizer."""
    rows = []
    for cell in all_cells():
        optimizers = OPTIMIZERS if cell.dp * cell.cp > 1 else ("plain",)
        rows += [Row(cell, *others) for others in itertools.product(MODELS, optimizers, PLANS)]
    return tuple(rows)


def full_rows() -> tuple[Row, ...]:
    """Every cell once, with the models, plans and optimizers in turn."""
    of_cells = [tuple(rows) for _, rows in itertools.groupby(all_rows(), key=lambda row: row.cell)]
    return tuple(rows[7 * number % len(rows)] for number, rows in enumerate(of_cells))


@functools.cache
def covering_rows() -> tuple[Row, ...]:
    """Few rows in which every two choices meet that meet anywhere: greedily, most that is new per process, first come."""
    pairs = {row: row.pairs for row in all_rows()}
    missing = set().union(*pairs.values())
    chosen: list[Row] = []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing) / (row.cell.num_processes + _START))
        chosen.append(best)
        missing -= pairs[best]
    for row in sorted(chosen, key=lambda row: -row.cell.num_processes):  # what later rows have made superfluous
        others = [pairs[other] for other in chosen if other is not row]
        if others and pairs[row] <= set().union(*others):
            chosen.remove(row)
    return tuple(sorted(chosen, key=lambda row: row.cell.num_processes))
