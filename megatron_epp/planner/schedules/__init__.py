"""The schedules and planners of others, as planners of ours: same costs, same caps, same plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megatron_epp.cost import Costs
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.memory.ahead import longest_lived_shares
from megatron_epp.planner.problem import Options, Problem
from megatron_epp.planner.schedules.breadth_first import breadth_first
from megatron_epp.planner.schedules.chronos import chronos, longest_lived_first
from megatron_epp.planner.schedules.chunkflow import chunkflow
from megatron_epp.planner.schedules.copies import copied
from megatron_epp.planner.schedules.dualpipe_v import dualpipe_v
from megatron_epp.planner.schedules.dynapipe import cyclic, sorted_microbatches
from megatron_epp.planner.schedules.fixed_order import FixedOrder
from megatron_epp.planner.schedules.flexsp import flexsp
from megatron_epp.planner.schedules.gpipe import gpipe
from megatron_epp.planner.schedules.hanayo import hanayo
from megatron_epp.planner.schedules.helixpipe import helixpipe
from megatron_epp.planner.schedules.infinipipe.search import infinipipe
from megatron_epp.planner.schedules.interleaved import interleaved
from megatron_epp.planner.schedules.kfkb import kfkb
from megatron_epp.planner.schedules.pipeoffload import generalised_interleaved
from megatron_epp.planner.schedules.seq1f1b import one_f_one_b, seq1f1b
from megatron_epp.planner.schedules.slimpipe import even_slices, slimpipe
from megatron_epp.planner.schedules.sppo import sequence_aware_shares
from megatron_epp.planner.schedules.stock_1f1b import packed_1f1b, padded_1f1b
from megatron_epp.planner.schedules.stp import stp
from megatron_epp.planner.schedules.terapipe import slices_of_least_latency
from megatron_epp.planner.schedules.v_blocks import v_half, v_min
from megatron_epp.planner.schedules.zb_v import zb_v
from megatron_epp.planner.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule or planner of others.

    Attributes:
        plan: the planner.
        summary: one line on what it does.
        source: paper or code that it follows.
        splits_weight: its order has weight gradients of their own, which run so with `Options.split_weight`.
        lacks: what training lacks to run its plans; empty if it runs them.
        offloads: it has copies of its own, with `Options.offload`.
        joins: its order has steps of two actions, which the greedy planner has with `Options.overlap_exchanges`.
    """

    plan: Callable[[Problem, Costs, Options], Decisions]
    summary: str
    source: str
    splits_weight: bool = False
    lacks: str = ""
    offloads: bool = False
    joins: bool = False

    @property
    def order(self) -> FixedOrder | None:
        """The order and its placement, for schedules that are one; None for planners of one stage per rank."""
        return self.plan if isinstance(self.plan, FixedOrder) else None


SCHEDULES: dict[str, Schedule] = {
    "1f1b-padded": Schedule(padded_1f1b, "1F1B, a sequence per microbatch, padded to the context", "Megatron-LM"),
    "1f1b-packed": Schedule(packed_1f1b, "1F1B, whole sequences packed up to the context", "Megatron-LM"),
    "1f1b-sliced": Schedule(FixedOrder(one_f_one_b), "1F1B over slices that take equal time", "2006.09503, 2406.03488"),
    "gpipe": Schedule(FixedOrder(gpipe), "all forwards, then all backwards", "1811.06965"),
    "terapipe": Schedule(
        FixedOrder(gpipe, tables=slices_of_least_latency),
        "GPipe over slices of least latency, by dynamic programming",
        "2102.07988",
    ),
    "kfkb": Schedule(FixedOrder(kfkb), "k forwards and k backwards in turn, the best k", "Ada-Grouper, 2303.01675"),
    "interleaved": Schedule(FixedOrder(interleaved, chunks_per_rank=None), "1F1B, several stages per rank", "2104.04473"),
    "breadth-first": Schedule(
        FixedOrder(breadth_first, chunks_per_rank=None), "all chunks on a rank's first stage, then on its next", "2211.05953"
    ),
    "zb-h1": Schedule(FixedOrder(zb_h1), "weight gradients fill bubbles, memory of 1F1B", "2401.10241", splits_weight=True),
    "zb-h2": Schedule(FixedOrder(zb_h2), "no bubble between a rank's ends, twice the memory", "2401.10241", splits_weight=True),
    "zb-v": Schedule(
        FixedOrder(zb_v, "v", 2), "waits for the first forward alone, two stages in a V", "2401.10241", splits_weight=True
    ),
    "v-min": Schedule(FixedOrder(v_min, "v", 2), "a third of the memory of 1F1B", "2405.15362", splits_weight=True),
    "v-half": Schedule(FixedOrder(v_half, "v", 2), "half of the memory of 1F1B", "2405.15362", splits_weight=True),
    "dualpipe-v": Schedule(FixedOrder(dualpipe_v, "v", 2), "DualPipe in a V", "DualPipe, 2412.19437", splits_weight=True),
    "stp": Schedule(
        FixedOrder(stp, "v", 2),
        "exchanges behind compute, two stages in a V",
        "2510.27257",
        splits_weight=True,
        joins=True,
    ),
    "hanayo": Schedule(FixedOrder(hanayo, "v", 2), "waves: what is ready runs, two stages in a V", "2308.15762"),
    "helixpipe": Schedule(
        FixedOrder(helixpipe, "helix", None),
        "attention of several microbatches on all ranks at once",
        "2507.00394",
        lacks="attention of a layer on another rank than its weights",
    ),
    "chronos": Schedule(
        FixedOrder(chronos, chunks_per_rank=2, fit=longest_lived_first),
        "short lifetimes on two stages, shallow ones recompute and offload",
        "ChronosPipe, 2503.03182",
        offloads=True,
    ),
    "pipeoffload": Schedule(
        FixedOrder(generalised_interleaved, chunks_per_rank=None, fit=partial(copied, longest_lived_shares)),
        "interleaved, activations with the longest lifetimes offloaded",
        "2503.01328",
        splits_weight=True,
        offloads=True,
    ),
    "sppo": Schedule(
        FixedOrder(one_f_one_b, fit=partial(copied, sequence_aware_shares)),
        "1F1B over slices, an offload share for each",
        "2503.10377",
        offloads=True,
    ),
    "dynapipe": Schedule(
        FixedOrder(cyclic, tables=sorted_microbatches),
        "whole sequences of similar length together, one B and one F a cycle",
        "2311.10418",
    ),
    "seq1f1b": Schedule(seq1f1b, "1F1B over slices of one size, uniform recompute", "2406.03488"),
    "slimpipe": Schedule(
        FixedOrder(slimpipe, chunks_per_rank=None, tables=even_slices),
        "slices of equal length on all stages of a rank, then the next",
        "2504.14519",
    ),
    "chunkflow": Schedule(chunkflow, "chunks of one size, activations of the last few kept", "2503.02356"),
    "flexsp": Schedule(
        flexsp,
        "a context-parallel degree for every sequence, the slowest group as fast as possible",
        "2412.01523",
        lacks="groups of context-parallel ranks that change with every chunk",
    ),
    "infinipipe": Schedule(infinipipe, "slices of equal time, recompute by integer programs", "2509.21275"),
}
"""By their names in `Options.planner`."""

BASELINES = {name: schedule.plan for name, schedule in SCHEDULES.items() if schedule.order is None and not schedule.lacks}
"""Planners of one stage per rank that choose their chunks by their own rules, and whose plans run."""

COPYING = {"greedy", "milp", *(name for name, schedule in SCHEDULES.items() if schedule.order is not None)}
"""Planners whose plans may have copies, with `Options.offload`."""
