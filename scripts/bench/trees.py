"""Compares batches whose sequences share prefixes with other ways to train them on 8 GPUs of 72 GiB, on paper.

    python -m scripts.bench.trees                           all cases of Llama 3 8B
    python -m scripts.bench.trees --only GRPO               some of them

separate    every sequence by itself, by the planner greedy at PP 8, as without shared prefixes
one level   the planner's trees, but a sequence shares only what all sequences of its tree begin with
PP 8        shared inside each microbatch of whole sequences, at the best of many sizes, with this package's orders and
            recompute on 8 stages: a prefix runs again in each microbatch that needs it
PP 1        the same on 8 replicas of one stage and a distributed optimizer, each with whole trees; without the time of
            reducing gradients
trees       the planner's choice at PP 8

Prompts have a fixed length, responses are log-normal; agents' calls leave out the thinking of earlier ones, so each call is a
branch; agents that keep it are one sequence for each session, and share the first prompt alone. Times are by formulas for
H100s. Prints times as multiples of the trees', and the time of planning as a multiple of that of separate sequences.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import fmean
from time import process_time

from megatron_epp.cost.model import Costs
from megatron_epp.features.trees.choice import divisible
from megatron_epp.features.trees.tree_cuts import depth_first
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed, path_of
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.service.replica_balance import divide, sequence_work
from megatron_epp.tools.formulas import analytic_profile
from megatron_epp.tools.formulas.hardware import H100_NODE
from megatron_epp.tools.formulas.library import balanced_layers, load_flags, shape_of
from scripts.bench.frame import Bench, Figures
from scripts.tables import table

GPUS, CAP_BYTES = 8, 72 << 30
SIZES = 2048, 4096, 8192, 16384, 32768, 65536, 131072
"""Tokens of a microbatch that are tried."""


@dataclass(slots=True)
class Batch:
    """Lengths of sequences and what they borrow."""

    lengths: list[int] = field(default_factory=list)
    borrowed: list[Borrowed] = field(default_factory=list)

    def add(self, length: int, borrowed: Borrowed = NOTHING_BORROWED) -> int:
        self.lengths.append(length)
        self.borrowed.append(borrowed)
        return len(self.lengths) - 1


def groups(count: int, size: int, prompt: int, response: float, spread: float = 0.8) -> Callable[[Random], Batch]:
    """Groups of responses to one prompt."""

    def drawn(random: Random) -> Batch:
        batch = Batch()
        for _ in range(count):
            mean = math.log(response) - spread**2 / 2
            responses = [max(16, int(random.lognormvariate(mean, spread))) for _ in range(size)]
            first = batch.add(prompt + responses[0])
            for tokens in responses[1:]:
                batch.add(prompt + tokens, Borrowed(first, prompt))
        return batch

    return drawn


def agents(sessions: int, calls: tuple[int, int], tool: float, answer: float, thinking: float) -> Callable[[Random], Batch]:
    """Sessions of calls; later prompts have a third of a call's output, its answer."""

    def drawn(random: Random) -> Batch:
        batch = Batch()
        for _ in range(sessions):
            end, branches = 8192, list[tuple[int, int]]()
            for _ in range(random.randint(*calls)):
                end += 20 + int(random.expovariate(1 / tool))
                output = 30 + int(random.expovariate(1 / thinking) + random.expovariate(1 / answer))
                branches.append((end, output))
                end += output // 3
            trunk = batch.add(sum(branches[-1]))
            for prompt, output in branches[:-1]:
                batch.add(prompt + output, Borrowed(trunk, prompt))
        return batch

    return drawn


def searched(random: Random) -> Batch:
    """Two trees of thoughts, 7 levels deep, of one to three branches at each."""
    batch = Batch()

    def grow(begin: int, borrowed: Borrowed, level: int) -> int:
        end = begin + 600 + int(random.expovariate(1 / 900))
        if level == 7:
            return batch.add(end, borrowed)
        first = grow(end, borrowed, level + 1)
        for _ in range(random.choice((0, 1, 1, 2))):
            grow(end, Borrowed(first, end), level + 1)
        return first

    for _ in range(2):
        grow(6000, NOTHING_BORROWED, 1)
    return batch


CASES = {
    "DPO, 32 pairs, 1.5K + 500": groups(32, 2, 1536, 500, 0.5),
    "GRPO 8 x 8, 2K + 4K": groups(8, 8, 2048, 4096),
    "GRPO 4 x 16, 2K + 4K": groups(4, 16, 2048, 4096),
    "GRPO 4 x 8, 16K + 4K": groups(4, 8, 16384, 4096),
    "4 agents, 20 to 30 calls": agents(4, (20, 30), 600, 200, 500),
    "2 agents, 20 to 70 calls": agents(2, (20, 70), 900, 300, 600),
    "GRPO 2 x 8 of linear agents, 12K + 30K": groups(2, 8, 12288, 30000, 0.6),
    "tree search, 7 levels": searched,
    "64 samples, nothing in common": groups(64, 1, 0, 6000),
}


class Ways:
    """One batch by every way."""

    def __init__(self, batch: Batch) -> None:
        self.shape = shape_of(load_flags("llama3-8b") | {"seq_length": max(batch.lengths)})
        self.profile = analytic_profile(self.shape, H100_NODE)
        self.separate = Problem(tuple(batch.lengths), tuple(range(GPUS)), (CAP_BYTES,) * GPUS)
        self.costs = self.profile.costs(balanced_layers(self.profile, self.shape.num_layers, GPUS, [self.separate]))
        shares = any(count for _, count in batch.borrowed)
        self.trees = replace(self.separate, borrowed=tuple(batch.borrowed)) if shares else self.separate

    def run(self) -> Figures:
        (separate, separate_s), (trees, trees_s) = (_timed(problem, self.costs) for problem in (self.separate, self.trees))
        one_level, _ = _timed(replace(self.trees, borrowed=one_level_of(self.trees)), self.costs)
        tokens = sum(self.trees.lengths)
        return {
            "separate": separate.predicted.makespan_us,
            "one level": one_level.predicted.makespan_us,
            "PP 8": in_microbatches(self.trees, self.costs),
            "PP 1": self._on_replicas(),
            "trees": trees.predicted.makespan_us,
            "saved": tokens / (tokens - sum(count for _, count in self.trees.borrowed)),
            "busy": 1 - trees.predicted.bubble_fraction,
            "planning": trees_s / separate_s,
        }

    def _on_replicas(self) -> float:
        costs = self.profile.costs([self.shape.num_layers], state_bytes_per_parameter=6 + 12 / GPUS)
        batch = divisible(replace(self.trees, placement=(0,), cap_bytes=(CAP_BYTES,)), GPUS)
        alone = tuple((replica,) for replica in range(GPUS))
        shares = divide(batch, costs, alone, lambda of: sum(sequence_work(of[0], costs))).shares
        return max(in_microbatches(batch.part(share), costs) for share in shares)


def _timed(problem: Problem, costs: Costs) -> tuple[Plan, float]:
    begin_s = process_time()
    return plan(problem, costs), process_time() - begin_s


def one_level_of(trees: Problem) -> tuple[Borrowed, ...]:
    """Return what sequences borrow if all of a tree borrow the same tokens, of the one that borrows nothing."""
    borrowed = [NOTHING_BORROWED] * len(trees.lengths)
    for unit in trees.indivisible:
        first = next(q for q in unit if not trees.first_token(q))
        common = min((_in_common(first, q, trees) for q in unit if q != first), default=0)
        for q in unit:
            borrowed[q] = Borrowed(first, common) if q != first and common else NOTHING_BORROWED
    return tuple(borrowed) if any(count for _, count in borrowed) else ()


def in_microbatches(trees: Problem, costs: Costs) -> float:
    """Return the makespan of microbatches of whole sequences, of the best size, which share prefixes inside alone."""
    order = depth_first(range(len(trees.lengths)), trees.borrowed) if trees.borrowed else range(len(trees.lengths))
    problems = {_microbatches(trees.part(order), most) for most in SIZES}
    return min(_makespan_us(problem, costs) for problem in problems)


def _microbatches(trees: Problem, most: int) -> Problem:
    borrowed, numbers = [NOTHING_BORROWED] * len(trees.lengths), list[int]()
    members, tokens = list[int](), 0
    for q, length in enumerate(trees.lengths):
        common, near = max(((_in_common(q, other, trees), other) for other in members), default=(0, -1))
        if members and tokens + length - common > most:
            members, tokens, common = [], 0, 0
        if common:
            borrowed[q] = Borrowed(path_of(near, common, borrowed)[-1].sequence, common)
        numbers.append(numbers[-1] if members else q)
        members, tokens = [*members, q], tokens + length - common
    shares = any(count for _, count in borrowed)
    return replace(trees, borrowed=tuple(borrowed) if shares else (), microbatches=tuple(numbers))


def _in_common(q: int, other: int, trees: Problem) -> int:
    """Return the tokens that two sequences of a tree begin with in common."""
    common = 0
    for own, others in zip(*(path_of(at, trees.lengths[at], trees.borrowed) for at in (q, other)), strict=False):
        if own[:2] != others[:2]:
            break
        common = min(own.end, others.end)
    return common


def _makespan_us(problem: Problem, costs: Costs) -> float:
    try:
        return plan(problem, costs, Options(shares=True)).predicted.makespan_us
    except InfeasibleError:
        return math.inf


def row(args: Namespace, draw: Callable[[Random], Batch]) -> Figures:
    return {"draws": [Ways(draw(Random(seed))).run() for seed in range(1 if args.reduced else args.draws)]}


def text(args: Namespace, rows: Sequence[Figures]) -> str:
    """Format the trees' time, other ways as multiples of it, and planning as a multiple of that of separate sequences."""
    others = "separate", "one level", "PP 8", "PP 1"

    def cells(row: Figures) -> list[object]:
        draws = row["draws"]
        mean = {name: fmean(draw[name] for draw in draws) for name in ("trees", "saved", "busy", "planning")}
        ratios = [fmean(draw[name] / draw["trees"] for draw in draws) for name in others]
        own = row["case"], f"{mean['saved']:.2f}x", f"{mean['trees'] / 1e3:.0f} ms", f"{mean['busy']:.2f}"
        return [
            *own,
            *("no plan fits" if math.isinf(ratio) else f"{ratio:.2f}x" for ratio in ratios),
            f"{mean['planning']:.2f}x",
        ]

    return table(["batch", "tokens", "trees", "busy", *others, "planning"], map(cells, rows))


BENCH = Bench(
    about=__doc__,
    cases=lambda args: dict([*CASES.items()][:1]) if args.reduced else CASES,
    row=row,
    text=text,
    flags={"draws": {"type": int, "default": 3, "help": "batches of a case (default: 3)"}},
    reduced="one batch of the first case: shows that it runs",
    takes_jobs=True,
)

if __name__ == "__main__":
    raise SystemExit(BENCH.main())
