"""Pipelines of equal microbatches with unit costs, as papers draw them.

Every stage takes 1 for F, 1 for B and 1 for W of a microbatch; an order without W takes 2 for B. Messages take no time, what a
forward keeps stays until its W, and recompute saves nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron_epp.contrib.helix.costs import ATTENTION, MLP, with_separate_attention
from megatron_epp.contrib.helix.helixpipe import HelixLayout
from megatron_epp.contrib.overlap.joined import JoinedDecisions
from megatron_epp.contrib.papers.fixed_order import Batch, FixedOrder, as_joined
from megatron_epp.cost.blocks import INPUT, LAYER, BlockCosts, StageCosts
from megatron_epp.cost.kv_costs import NO_KV
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, causal_pairs
from megatron_epp.plan import Chunk, Plan, Segment
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.planner import UNLIMITED_BYTES, Decisions, Options, Problem, slice_groups, tabulate
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.fit import held_bytes, peaks_of

TOKENS = 96
PASSES = 3
"""F, B and W, of one unit of time each."""
_PAIRS = causal_pairs(0, TOKENS)


def fewest(name: str, ranks: int) -> int:
    """Return the least number of microbatches that a schedule has an order for, if that is more than twice the ranks."""
    return 3 * ranks - 1 if name == "stp" else 2 * ranks


def unit_costs(num_stages: int, share: float = 1.0, host_us_per_byte: float = math.inf) -> PipelineCosts:
    """Return costs without fixed times, messages, and bytes that recompute could save.

    Args:
        num_stages: of the pipeline, each of one layer.
        share: of the unit of time and of the byte that each of F, B and W of a token takes on a stage.
        host_us_per_byte: time of a copy; infinite if nothing can be offloaded.
    """
    memory: dict[str, Any] = {
        f"{name}_bytes_per_token": share for name in ("full", "apart", "apart_attended", "attended", "weight")
    }
    # No copy moves less than what recompute would keep.
    memory |= {"bytes_per_token": share, "input_bytes_per_token": 0.0 if math.isfinite(host_us_per_byte) else share}
    times = {name: LinearTime(0.0, share * count) for name, count in (("forward", 1), ("backward", 2), ("weight", 1))}
    stage = StageCosts((BlockCosts(kind=INPUT), BlockCosts(kind=LAYER, kv=NO_KV, **memory, **times)))
    return PipelineCosts("unit", (stage,) * num_stages, hidden_bytes_per_token=0.0, host_us_per_byte=host_us_per_byte)


def block_costs(num_layers: int, share: float, attention: float = 0.5) -> PipelineCosts:
    """Return such costs for stages cut inside attention, which runs separately.

    Args:
        num_layers: of the pipeline, which has one stage more.
        share: of the unit of time and of the byte that each of F, B and W of a layer takes.
        attention: share of attention in that; a quarter of the rest precedes it.
    """

    def pass_of(part: float, pairs: float, count: int) -> LinearTime:
        return LinearTime(0.0, share * count * part * (1 - attention), share * count * pairs * attention * TOKENS / _PAIRS)

    def block(kind: str, part: float, pairs: float, **more: Any) -> BlockCosts:
        times = {"forward": pass_of(part, pairs, 1), "backward": pass_of(part, pairs, 2)}
        return BlockCosts(kind=kind, bytes_per_token=part * share, **times, **more)

    received, layer = BlockCosts(kind=INPUT), block(LAYER, 1, 1, kv=NO_KV, input_bytes_per_token=share)
    attention, mlp = block(ATTENTION, 0.25, 1, kv=NO_KV, input_bytes_per_token=share), block(MLP, 0.75, 0)
    none = replace(layer, count=0)
    first, inner, last = map(StageCosts, ((received, none, attention), (received, layer), (received, mlp, none)))
    stages = (first, *(inner,) * (num_layers - 1), last)
    return with_separate_attention(PipelineCosts("unit", stages, hidden_bytes_per_token=0.0), last_in_backward=False)


class Unit:
    """Equal microbatches with unit costs, at the placement of a schedule.

    Args:
        name: of the schedule; a number behind a comma is that of the stages of each rank.
        microbatches: sequences, each in as many slices as given.
        slices: of every sequence.
        link: time in which all that a microbatch keeps on a rank is copied to the host and back, in times of its computation
            there; infinite if nothing can be offloaded.
    """

    def __init__(self, name: str, ranks: int, microbatches: int, slices: int = 1, link: float = math.inf) -> None:
        planner, _, count = name.partition(", ")
        self.splits_weight, self.microbatches = PLANNERS.entries()[planner].splits_weight, microbatches
        order = PLANNERS[planner]
        assert isinstance(order, FixedOrder)
        self.order = order
        per_rank = int(count or order.chunks_per_rank or 2)
        layout = order.layout(ranks * per_rank, ranks, per_rank)
        self.placement = layout.placement
        size = TOKENS // slices
        self.chunks = tuple(Chunk((Segment(q, size * k, size * k + size),)) for q in range(microbatches) for k in range(slices))
        if isinstance(layout, HelixLayout):
            self.costs = block_costs(layout.num_layers, 1 / per_rank)
        else:
            self.costs = unit_costs(self.placement.num_stages, 1 / per_rank, link * PASSES / 2)
        self.problem = Problem((TOKENS,) * microbatches, self.placement.rank_of, (UNLIMITED_BYTES,) * ranks)
        self.tables = tabulate(self.chunks, self.problem, self.costs)

    def of_paper(self, which: int = 0) -> Decisions:
        batch = Batch(self.chunks, slice_groups(self.chunks), self.placement, self.problem, self.costs)
        order, joined = as_joined(list(self.order.orders(batch))[which])
        return JoinedDecisions(self.chunks, order, [[0] * len(self.chunks)] * self.problem.num_stages, joined=joined)

    def with_copies(self, which: int = 0) -> Plan:
        """Return the plan with the copies that the schedule wants."""
        options = Options(planner="fixed", split_weight=True, offload=True)
        order = self.of_paper(which).order
        decisions = self.order.fit(order, self.chunks, self.problem, self.costs, options)
        return build_plan(self.problem, self.costs, options, decisions)

    def makespan_us(self, decisions: Decisions) -> float:
        return decisions.makespan_us(self.problem, self.costs)

    def peak_bytes(self, decisions: Decisions) -> int:
        return max(peaks_of(held_bytes(decisions.order, self.tables, decisions.recompute_steps, decisions.sharing)))

    def waits(self, decisions: Decisions) -> float:
        """Return the time that a rank waits, in units: F, B and W of a microbatch on all stages of a rank take one each."""
        return self.makespan_us(decisions) / TOKENS - 3 * self.microbatches

    def idle_between_ends(self, decisions: Decisions) -> list[float]:
        """Return the time that every rank waits between its first and its last action, in units."""
        played = play(decisions.order, self.tables, decisions.recompute_steps)
        spans = zip(played.start_us, played.end_us, strict=True)
        return [round((ends[-1] - starts[0]) / TOKENS - 3 * self.microbatches, 6) for starts, ends in spans]

    def alive(self, decisions: Decisions) -> float:
        """Return the most microbatches whose activations a rank keeps."""
        return self.peak_bytes(decisions) / TOKENS

    def plan(self) -> Plan:
        """Return the plan of the paper's order."""
        return build_plan(self.problem, self.costs, Options(planner="fixed", split_weight=True), self.of_paper())
