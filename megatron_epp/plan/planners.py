"""Planners by name, and facts of theirs that flags ask for. A planner is imported when it plans, not when it is looked up."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from megatron_epp.plan.problem import Options, Problem

if TYPE_CHECKING:
    from megatron_epp.plan.layout import Layout

Planner = Callable[[Problem, Any, Options], Any]
"""Function that plans a batch, given its costs (`cost.Costs`); returns `planner.Decisions`."""


@runtime_checkable
class FixedPlacement(Protocol):
    """Planner of a schedule for one kind of placement; `chunks_per_rank` is None for two or more, `stages` says it in words."""

    @property
    def kind(self) -> str: ...

    @property
    def chunks_per_rank(self) -> int | None: ...

    @property
    def stages(self) -> str: ...

    def layout(self, num_layers: int, num_ranks: int, count: int = 2) -> Layout:
        """Return even layers at the placement; `count` stages per rank, where the schedule takes any number."""
        ...

    def __call__(self, problem: Problem, costs: Any, options: Options) -> Any: ...


@dataclass(frozen=True, slots=True)
class PlannerEntry:
    """A planner and what commands and training need to know of it."""

    plan: Planner | str  # the planner, or where it is, as ``module:function``
    summary: str = ""  # one line on what it does
    source: str = "this package"  # paper or code that it follows
    begins_with_greedy: bool = False  # it starts from the plan of "greedy", so takes any layout and all settings of that
    splits_weight: bool = False  # its order has weight gradients of their own, which run so with `Options.split_weight`
    may_offload: bool = False  # its plans may have copies to the host, with `Options.offload`
    offloads: bool = False  # copies are part of its method, so that comparisons give it `Options.offload`
    has_own_size: bool = False  # it tries sizes of chunks itself, has none, or searches too long to be asked with several
    keeps_groups: bool = False  # it orders the sequences of a loss group (`Problem.loss_groups`) as slices of one
    interleaves: bool = False  # it takes several stages on each rank if they go round the ranks, as Megatron's do
    joins: bool = False  # its order has steps of two actions, which "greedy" has with `Options.overlap_exchanges`
    # What `planner.plan` runs; `plan` is for planners that start from these decisions
    plans: str = "megatron_epp.planner.other_planners:plan_by_name"
    placement: str = "looped"  # of its stages, where no flag says another
    lacks: str = ""  # why training does not run its plans; empty if it does
    problems: str = ""  # from flags of a training to what does not go with it, ``module:function``; empty for nothing

    @property
    def planner(self) -> Planner:
        planner: Planner = resolve_name(self.plan) if isinstance(self.plan, str) else self.plan
        return planner

    @property
    def fixed(self) -> FixedPlacement | None:
        return self.plan if isinstance(self.plan, FixedPlacement) else None


class Planners(MutableMapping[str, Planner]):
    """Planners by name. Tables, modules with a mapping `PLANNERS`, are imported one by one while a name is not known."""

    def __init__(self, entries: dict[str, PlannerEntry], *tables: str) -> None:
        self._entries, self._tables = dict(entries), list(tables)

    def entry(self, name: str) -> PlannerEntry | None:
        while name not in self._entries and ":" not in name and self._tables:
            self._import()
        return self._entries.get(name)

    def entries(self) -> dict[str, PlannerEntry]:
        """Return all planners, the package's own first."""
        while self._tables:
            self._import()
        return dict(self._entries)

    def __getitem__(self, name: str) -> Planner:
        if (entry := self.entry(name)) is None:
            raise KeyError(name)
        return entry.planner

    def __setitem__(self, name: str, planner: Planner) -> None:
        self._entries[name] = PlannerEntry(planner)

    def __delitem__(self, name: str) -> None:
        self.entry(name)
        del self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries())

    def __len__(self) -> int:
        return len(self.entries())

    def _import(self) -> None:
        planners = importlib.import_module(self._tables.pop(0)).PLANNERS
        self._entries |= {name: entry for name, entry in planners.items() if name not in self._entries}


OWN = {
    "greedy": PlannerEntry(
        "megatron_epp.planner.result:greedy",
        "the default: slices of equal time, packed short sequences, the best of several orders, recompute and copies",
        plans="megatron_epp.planner.result:plan_alone",
        begins_with_greedy=True,
        has_own_size=True,
        may_offload=True,
        keeps_groups=True,
    ),
    "1f1b": PlannerEntry(
        "megatron_epp.planner.baselines.whole:whole_1f1b",
        "1F1B of whole sequences in the order of the batch, recompute as the cap requires",
        has_own_size=True,
        keeps_groups=True,
    ),
    "1f1b-padded": PlannerEntry(
        "megatron_epp.planner.baselines.whole:padded_1f1b",
        "1F1B, a sequence per microbatch, padded to the context",
        "Megatron-LM",
        keeps_groups=True,
    ),
    "1f1b-packed": PlannerEntry(
        "megatron_epp.planner.baselines.whole:packed_1f1b",
        "1F1B, interleaved or not, whole sequences packed up to the context",
        "Megatron-LM",
        keeps_groups=True,
        interleaves=True,
    ),
    "seq1f1b": PlannerEntry(
        "megatron_epp.planner.baselines.seq1f1b:seq1f1b",
        "1F1B over slices of one size, uniform recompute",
        "2406.03488",
        has_own_size=True,
        keeps_groups=True,
    ),
}
PLANNERS = Planners(OWN, "megatron_epp.contrib.exact", "megatron_epp.contrib.papers.table")
"""Every planner, by its name in `Options.planner`, which takes ``module:function`` too, for one that is not here.

A new one is a function and an entry: docs/your-own-schedule.md.
"""


def begins_with_greedy(name: str) -> bool:
    """Return True for "greedy", and for planners that improve its plans."""
    return bool(getattr(PLANNERS.entry(name), "begins_with_greedy", False))
