"""Everything a planner decides about a batch; `assemble` turns it into a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, Step
from megatron_epp.plan.plan import Extension
from megatron_epp.plan.problem import Problem
from megatron_epp.plan.recompute import FULL_ONLY
from megatron_epp.planner.evaluate import RecomputeSteps, makespan_us
from megatron_epp.planner.fit import Sharing
from megatron_epp.planner.memory.kv_offload_tables import SHARINGS, Pairs, with_kv_offload
from megatron_epp.planner.memory.offload import Offload, timed
from megatron_epp.planner.order import CopyOrder, Order
from megatron_epp.planner.tables import Tables, tabulate


@dataclass(frozen=True, slots=True)
class Decisions:
    """All a planner decides. A planner with decisions of another kind returns a subclass that says what they mean."""

    chunks: tuple[Chunk, ...]
    order: Order
    recompute_steps: RecomputeSteps  # ``[stage][chunk]``, on the frontiers of `modes`, the available recompute modes
    modes: tuple[str, ...] = FULL_ONLY
    # Chunks are padded to a multiple of this; None for the problem's own. How a planner pads whole sequences.
    token_multiple: int | None = None
    copies: CopyOrder = ()  # offloads and loads of every rank, in order; empty where there are none
    # Share of the kept bytes that is copied away, ``[stage][chunk]``; empty where there are no copies
    offload: tuple[tuple[float, ...], ...] = ()
    kv_offload: Pairs = frozenset()  # stages and sequences whose keys and values are in host memory
    # One of `SHARINGS`: factor by which the link is slower for these, where activations are copied too
    kv_sharing: float = SHARINGS[-1]
    extensions: tuple[Extension, ...] = ()  # parts of the plan that other packages define

    def padded(self, problem: Problem) -> Problem:
        """Return the problem with chunks padded as these are."""
        return problem if self.token_multiple is None else replace(problem, token_multiple=self.token_multiple)

    def tables(self, problem: Problem, costs: Costs) -> Tables:
        tables = tabulate(self.chunks, problem, costs, self.modes)
        if not self.kv_offload:
            return tables
        sharing = self.kv_sharing if any(self.copies) else 1.0
        return with_kv_offload(tables, self.chunks, problem, costs, self.modes, self.kv_offload, sharing)

    def makespan_us(self, problem: Problem, costs: Costs) -> float:
        tables = self.tables(problem, costs)
        return makespan_us(self.order, tables, self.recompute_steps, timed(self.as_offload, tables))

    def reordered(self, order: Order) -> Decisions:
        """Return the same decisions with an order to which actions were added, or from which some were taken out."""
        return replace(self, order=order)

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the fields that a subclass adds."""
        yield from ()

    @property
    def sharing(self) -> Sharing | None:
        """Change of the bytes that the actions of a rank take and give; None if each holds its own while it runs."""
        return None

    def steps(self, row: Sequence[Step], tables: Tables) -> Sequence[Step]:
        """Return the steps of a rank, given one step for each action."""
        del tables
        return row

    @property
    def as_offload(self) -> Offload:
        """Offload of the decisions: recompute, shares and copies; empty shares and copies if nothing is copied."""
        return Offload(self.recompute_steps, self.offload, self.copies)
