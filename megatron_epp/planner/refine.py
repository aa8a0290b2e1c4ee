"""OptPipe's manner: run the greedy plan now, let a solver look for a better one meanwhile, use it when the batch comes again.

What a solver finds in a given time depends on the machine, so ranks that plan for themselves would disagree. In training one
rank would have to plan and send its plan to the others, which is not there yet: `--epp` refuses the planners in `TIMED`.
"""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

from megatron_epp.cost import Costs
from megatron_epp.planner.assemble import Decisions, build_plan
from megatron_epp.planner.oracle import oracle
from megatron_epp.planner.problem import Options, Problem, validate
from megatron_epp.planner.search import greedy
from megatron_epp.schedule import Chunk, Plan

TIMED = frozenset({"milp"})
"""Planners whose plans depend on how fast the machine is."""
TIME_LIMIT_S = 10.0
MOST_CHUNKS = 16
"""Longer chunk tables keep the greedy decisions: their programs do not get anywhere in minutes."""
WAITING = 4
"""Batches that may wait for the solver; while that many do, others are not refined."""


def milp(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """The greedy decisions, order and recompute improved by the oracle for `TIME_LIMIT_S`.

    Raises:
        InfeasibleError: the greedy planner finds nothing that fits the caps.
        PlanError: what the oracle does not know (see `oracle`), or scipy is not installed.
    """
    return refine(problem, costs, options, TIME_LIMIT_S)


def refine(problem: Problem, costs: Costs, options: Options, time_limit_s: float) -> Decisions:
    """As `milp`, with a time limit. Evaluations and tables of more than `MOST_CHUNKS` chunks stay as they are."""
    start = greedy(problem, costs, options)
    if problem.forward_only or len(start.chunks) > MOST_CHUNKS:
        return start
    return oracle(start.chunks, problem, costs, options, start=start, time_limit_s=time_limit_s).decisions or start


class Refiner:
    """Plans a batch at once and refines it in a process of its own, for the next batch of equal lengths in any order."""

    def __init__(self, costs: Costs, options: Options, *, time_limit_s: float = 60.0, capacity: int = 1024) -> None:
        """
        Args:
            time_limit_s: for each batch.
            capacity: refined batches kept, more than `WAITING`; the oldest goes first.
        """
        self.costs, self.options = costs, options
        self.time_limit_s, self.capacity = time_limit_s, capacity
        self._jobs: dict[Problem, Future[Decisions]] = {}
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))

    def plan(self, problem: Problem) -> Plan:
        """The refined plan where there is one, else the greedy plan, without waiting.

        Raises what `planner.plan` raises, and what went wrong when this batch was refined.
        """
        validate(problem, self.costs, self.options)
        asked, sequences = canonical(problem)
        job = self._jobs.get(asked)
        made = job.result() if job is not None and job.done() else greedy(asked, self.costs, self.options)
        if job is None:
            self._submit(asked)
        return build_plan(problem, self.costs, self.options, relabelled(made, sequences))

    @property
    def num_refined(self) -> int:
        """Batches that have been refined."""
        return sum(job.done() for job in self._jobs.values())

    def wait(self, timeout_s: float | None = None) -> None:
        """Until everything submitted so far is refined."""
        for job in list(self._jobs.values()):
            job.exception(timeout_s)

    def close(self) -> None:
        """Drop what waits; what is being solved ends by its time limit."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, asked: Problem) -> None:
        if sum(not job.done() for job in self._jobs.values()) >= WAITING:
            return
        if len(self._jobs) >= self.capacity:
            del self._jobs[next(key for key, job in self._jobs.items() if job.done())]
        self._jobs[asked] = self._pool.submit(refine, asked, self.costs, self.options, self.time_limit_s)


def canonical(problem: Problem) -> tuple[Problem, tuple[int, ...]]:
    """The same batch with the longest sequence first, and where each of its sequences stands in the original."""
    lengths = problem.lengths
    sequences = tuple(sorted(range(len(lengths)), key=lambda q: (-lengths[q], q)))
    return replace(problem, lengths=tuple(lengths[q] for q in sequences)), sequences


def relabelled(made: Decisions, sequences: tuple[int, ...]) -> Decisions:
    """Decisions for a canonical batch, told of the original's sequences."""
    chunks = (Chunk(tuple(s._replace(sequence=sequences[s.sequence]) for s in chunk.segments)) for chunk in made.chunks)
    return replace(made, chunks=tuple(chunks))
