"""The schedules and planners of others, as planners of ours: same costs, same caps, same plans."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_epp.contrib.flexsp.degrees import flexsp
from megatron_epp.contrib.helix.helixpipe import HelixOrder, helixpipe
from megatron_epp.contrib.papers.chronos import chronos, longest_lived_first
from megatron_epp.contrib.papers.chunkflow import chunkflow
from megatron_epp.contrib.papers.copies import copied
from megatron_epp.contrib.papers.dualpipe_v import dualpipe_v
from megatron_epp.contrib.papers.dynapipe import cyclic, sorted_microbatches
from megatron_epp.contrib.papers.fixed_order import FixedOrder
from megatron_epp.contrib.papers.gpipe import gpipe
from megatron_epp.contrib.papers.hanayo import hanayo
from megatron_epp.contrib.papers.infinipipe.planner import infinipipe
from megatron_epp.contrib.papers.interleaved import interleaved
from megatron_epp.contrib.papers.kfkb import kfkb
from megatron_epp.contrib.papers.pipeoffload import generalised_interleaved
from megatron_epp.contrib.papers.sliced_1f1b import one_f_one_b
from megatron_epp.contrib.papers.slimpipe import even_slices, slimpipe
from megatron_epp.contrib.papers.sppo import sequence_aware_shares
from megatron_epp.contrib.papers.stp import stp
from megatron_epp.contrib.papers.terapipe import slices_of_least_latency
from megatron_epp.contrib.papers.v_blocks import v_half, v_min
from megatron_epp.contrib.papers.zero_bubble import zb_h1, zb_h2, zb_v
from megatron_epp.features.copies.ahead import longest_lived_shares
from megatron_epp.plan.planners import PlannerEntry


def _order(planner: FixedOrder, summary: str, source: str, **more: Any) -> PlannerEntry:
    """Return the entry of an order, for which `fitted` or the schedule's own rule chooses copies to the host."""
    return PlannerEntry(planner, summary, source, may_offload=True, **more)


PLANNERS: dict[str, PlannerEntry] = {
    "1f1b-sliced": _order(FixedOrder(one_f_one_b), "1F1B over slices that take equal time", "2006.09503, 2406.03488"),
    "gpipe": _order(FixedOrder(gpipe), "all forwards, then all backwards", "1811.06965"),
    "terapipe": _order(
        FixedOrder(gpipe, tables=slices_of_least_latency),
        "GPipe over slices of least latency, by dynamic programming",
        "2102.07988",
    ),
    "kfkb": _order(FixedOrder(kfkb), "k forwards and k backwards in turn, the best k", "Ada-Grouper, 2303.01675"),
    "interleaved": _order(FixedOrder(interleaved, chunks_per_rank=None), "1F1B, several stages per rank", "2104.04473"),
    "breadth-first": _order(
        FixedOrder(gpipe, chunks_per_rank=None), "all chunks on a rank's first stage, then on its next", "2211.05953"
    ),
    "zb-h1": _order(FixedOrder(zb_h1), "weight gradients fill bubbles, memory of 1F1B", "2401.10241", splits_weight=True),
    "zb-h2": _order(FixedOrder(zb_h2), "no bubble between a rank's ends, twice the memory", "2401.10241", splits_weight=True),
    "zb-v": _order(
        FixedOrder(zb_v, "v", 2), "waits for the first forward alone, two stages in a V", "2401.10241", splits_weight=True
    ),
    "v-min": _order(FixedOrder(v_min, "v", 2), "a third of the memory of 1F1B", "2405.15362", splits_weight=True),
    "v-half": _order(FixedOrder(v_half, "v", 2), "half of the memory of 1F1B", "2405.15362", splits_weight=True),
    "dualpipe-v": _order(FixedOrder(dualpipe_v, "v", 2), "DualPipe in a V", "DualPipe, 2412.19437", splits_weight=True),
    "stp": _order(
        FixedOrder(stp, "v", 2), "exchanges behind compute, two stages in a V", "2510.27257", splits_weight=True, joins=True
    ),
    "hanayo": _order(FixedOrder(hanayo, "v", 2), "waves: what is ready runs, two stages in a V", "2308.15762"),
    "helixpipe": PlannerEntry(
        HelixOrder(helixpipe, chunks_per_rank=None),
        "attention of several microbatches on all ranks at once",
        "2507.00394",
        has_own_size=True,
        placement="ring",
        problems="megatron_epp.contrib.helix:problems",
    ),
    "chronos": _order(
        FixedOrder(chronos, chunks_per_rank=2, fit=longest_lived_first),
        "short lifetimes on two stages, shallow ones recompute and offload",
        "ChronosPipe, 2503.03182",
        offloads=True,
    ),
    "pipeoffload": _order(
        FixedOrder(generalised_interleaved, chunks_per_rank=None, fit=partial(copied, longest_lived_shares)),
        "interleaved, activations with the longest lifetimes offloaded",
        "2503.01328",
        splits_weight=True,
        offloads=True,
    ),
    "sppo": _order(
        FixedOrder(one_f_one_b, fit=partial(copied, sequence_aware_shares)),
        "1F1B over slices, an offload share for each",
        "2503.10377",
        offloads=True,
    ),
    "dynapipe": _order(
        FixedOrder(cyclic, tables=sorted_microbatches),
        "whole sequences of similar length together, one B and one F a cycle",
        "2311.10418",
    ),
    "slimpipe": _order(
        FixedOrder(slimpipe, chunks_per_rank=None, tables=even_slices),
        "slices of equal length on all stages of a rank, then the next",
        "2504.14519",
    ),
    "chunkflow": PlannerEntry(
        chunkflow, "chunks of one size, activations of the last few kept", "2503.02356", has_own_size=True
    ),
    "flexsp": PlannerEntry(
        flexsp,
        "a context-parallel degree for every sequence, the slowest group as fast as possible",
        "2412.01523",
        has_own_size=True,
        problems="megatron_epp.contrib.flexsp:problems",
    ),
    "infinipipe": PlannerEntry(
        infinipipe, "slices of equal time, recompute by integer programs", "2509.21275", has_own_size=True
    ),
}
"""By their names in `Options.planner`."""
