"""Writes the tables of docs/communicators.md: `python -m scripts.write_communicators`. A test checks that they are current."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_epp.plan.communicators import LARGEST_MESH, directions, link_ctas, most_links, tree_of
from megatron_epp.plan.placement import Placement
from scripts.tables import table, with_tables

TARGET = Path(__file__).resolve().parent.parent / "docs" / "communicators.md"
SMS = 132
PIPELINES = 4, 8, 16, 32, 64
TENSOR_AND_CONTEXT = 8
_MIB = 2**20
# Sources: NCCL's user guide (NCCL_BUFFSIZE, NCCL_MAX_CTAS), and for what it does not say NCCL's code: buffers of the three
# protocols in src/init.cc (computeBuffSizes), channels of messages, which CTAs serve and which are powers of two, in
# src/graph/paths.cc (ncclTopoComputeP2pChannels). Nothing here has been measured on a GPU.
NVLINK_CTAS = 16
"""CTAs that NCCL gives to a large message over NVLink of an H100, without a maximum."""
_STEPS = 8
"""Messages in a buffer (NCCL_STEPS)."""
_SIMPLE_BYTES = 4 << 20
"""Buffer of the protocol Simple (NCCL_BUFFSIZE)."""
_LL_BYTES = 8 * 512 * _STEPS * 16
"""Buffer of the protocol LL: lines of a thread, threads, steps, bytes of a line."""
_LL128_BYTES = 120 * 640 * _STEPS * 8
"""Buffer of the protocol LL128: elements of a thread, threads, steps, bytes of an element."""
CHANNEL_BYTES = _SIMPLE_BYTES + _LL_BYTES + _LL128_BYTES
"""Device memory of a channel between two ranks, on the side that holds its buffers: the receiver, over a network both."""
FORMULAS = (
    ("communicators of a rank", "directions of messages that begin or end at it", "`megatron_epp/plan/communicators.py`"),
    (
        "CTAs of a communicator",
        "4, or the power of two with which all communicators of a rank hold at most a quarter of the SMs",
        "`link_ctas` in `megatron_epp/plan/communicators.py`",
    ),
    (
        "SMs of a rank",
        "its communicators x CTAs, if all wait at the same time",
        "one CTA on an SM; NCCL_MAX_CTAS in NCCL's user guide",
    ),
    (
        "memory of a rank",
        f"its communicators x CTAs x {CHANNEL_BYTES / _MIB:.1f} MiB, the buffers of a channel: 4 MiB for the protocol Simple, "
        "0.5 MiB for LL, 4.7 MiB for LL128",
        "NCCL_BUFFSIZE in NCCL's user guide; `src/init.cc` of NCCL",
    ),
)
STAGES = (("one per rank", "looped", 1), ("two per rank, looped", "looped", 2), ("two per rank, V", "v", 2))


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Communicators, SMs and device memory of a pipeline's links.

    Attributes:
        num_links: communicators of a rank, on the rank with the most.
        num_communicators: all of the pipeline, each between two ranks.
        ctas: of one communicator, at most.
        num_sms: SMs that a rank's links hold while all of them wait.
        num_bytes: device memory of a rank's buffers, at most.
    """

    num_links: int
    num_communicators: int
    ctas: int
    num_sms: int
    num_bytes: int


def link_use(placement: Placement, num_sms: int, ctas: int | None = None) -> LinkUse:
    """Count communicators, SMs and memory of a pipeline's links on devices with `num_sms` SMs.

    Args:
        ctas: CTAs of one link; as training sets them if None.
    """
    used = directions(placement.rank_of)
    links = most_links(used)
    each = link_ctas(links, num_sms) if ctas is None else ctas
    return LinkUse(links, len(used), each, links * each, links * each * CHANNEL_BYTES)


def num_connections(num_ranks: int, position: int, largest: int = LARGEST_MESH) -> int:
    """Return the number of ranks to which the rank at `position` is connected in the tree of groups."""
    return sum(len(group) - 1 for level in tree_of(num_ranks, largest) for group in level if position in group)


def document() -> str:
    """Return the page with its tables as they are now."""
    links, control = [], []
    for num_ranks in PIPELINES:
        for name, kind, num_chunks in STAGES:
            placement = Placement(kind, num_ranks, num_chunks)
            ours, by_nccl = link_use(placement, SMS), link_use(placement, SMS, NVLINK_CTAS)
            figures = ours.num_links, ours.num_communicators, ours.ctas, ours.num_sms, round(ours.num_bytes / _MIB)
            links.append((num_ranks, name, *figures, by_nccl.num_sms, round(by_nccl.num_bytes / _MIB)))
        members = num_ranks * TENSOR_AND_CONTEXT
        control.append((num_ranks, members, num_connections(members, 0), members - 1))
    of_rank = "communicators of a rank", "of the pipeline", "CTAs of a communicator", "SMs of a rank", "memory of a rank (MiB)"
    titles = "PP", "stages", *of_rank, "SMs by NCCL", "memory by NCCL (MiB)"
    tables = table(("figure", "formula", "source"), FORMULAS), table(titles, links)
    groups = table(("PP", "ranks of the group", "connections of a rank", "in one group"), control)
    return with_tables(TARGET.read_text(encoding="utf-8"), (*tables, groups))


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
