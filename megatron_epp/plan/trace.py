"""Chrome trace of a plan, as simulated and as measured, for ui.perfetto.dev or chrome://tracing.

One process per rank; in it one thread per stream (planned compute, planned copy, measured compute, ...), boxes named as in the
plan (``2F5``), an arrow for every message between ranks, and a counter of live bytes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from megatron_epp.plan.action import Action
from megatron_epp.plan.boxes import COMPUTE, COPY, LINK, Box, measured_boxes, planned_boxes
from megatron_epp.plan.graph import Transfer, build_graph
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.operations import Role, Track, is_compute, operation
from megatron_epp.plan.plan import Plan
from megatron_epp.plan.simulation import Timeline, simulate
from megatron_epp.plan.writing import write_text

TraceEvent = dict[str, Any]

_THREADS = tuple((source, stream) for source in ("planned", "measured") for stream in (COMPUTE, COPY, LINK))


def trace(plan: Plan, measured: Measured | None = None) -> dict[str, Any]:
    """Return the trace in Chrome's event format, ready for JSON; times in microseconds.

    Raises `PlanError` if the order deadlocks, or the measurement is of another plan.
    """
    timeline = simulate(plan)
    sources = {"planned": planned_boxes(timeline)}
    if measured is not None:
        sources["measured"] = measured_boxes(plan, measured)
    ids = count(1)
    events = [*_names(sources)]
    for source, boxes in sources.items():
        events += [_complete(plan, source, box) for box in boxes]
        events += _arrows(plan, source, boxes, ids)
    events += _live_bytes(timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(plan: Plan, path: str | Path, measured: Measured | None = None) -> None:
    """Write `trace` to a file. Raises the errors of `trace`."""
    write_text(path, json.dumps(trace(plan, measured), separators=(",", ":")) + "\n")


def _thread(source: str, stream: str) -> int:
    return _THREADS.index((source, stream))


def _names(sources: dict[str, list[Box]]) -> Iterator[TraceEvent]:
    ranks = sorted({box.rank for boxes in sources.values() for box in boxes})
    for rank in ranks:
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    used = sorted({(box.rank, _thread(source, box.stream)) for source, boxes in sources.items() for box in boxes})
    for rank, thread in used:
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": " ".join(_THREADS[thread])}}
        yield {"ph": "M", "pid": rank, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _complete(plan: Plan, source: str, box: Box) -> TraceEvent:
    action, chunk = box.action, plan.chunks[box.action.chunk]
    args = {"stage": action.stage, "chunk": action.chunk, "kind": chunk.kind(plan.lengths), "tokens": chunk.num_tokens}
    kind = operation(action.op)
    if kind.in_layers and kind.role is not Role.OPENS:
        args["recompute"] = str(plan.recompute[action.stage][action.chunk])
    if kind.track is Track.COPY and plan.host_links:
        args["link"] = plan.host_links[box.rank]
    return {
        "ph": "X",
        "pid": box.rank,
        "tid": _thread(source, box.stream),
        "ts": box.start_us,
        "dur": box.end_us - box.start_us,
        "name": "+".join(map(str, box.actions)),
        "cat": f"{source},{kind.text if kind.track is not Track.LOWERED else 'message'}",
        "args": args,
    }


def _arrows(plan: Plan, source: str, boxes: Sequence[Box], ids: Iterator[int]) -> Iterator[TraceEvent]:
    """Yield an arrow per message, from just before the end of its producer to the start of its consumer on another rank."""
    by_action = {action: box for box in boxes if is_compute(box.action.op) for action in box.actions}
    transfers: dict[Action, list[Transfer]] = defaultdict(list)
    for transfer in build_graph(plan).transfers:
        transfers[transfer.target].append(transfer)
    for action, consumer in by_action.items():
        for transfer in transfers[action]:
            producer, name = by_action.get(transfer.source), transfer.carries.text
            if producer is None or producer.rank == consumer.rank:
                continue
            common = {"id": next(ids), "name": name, "cat": f"{source},message"}
            inside_us = min(1.0, (producer.end_us - producer.start_us) / 2)
            thread = _thread(source, COMPUTE)
            yield {"ph": "s", "pid": producer.rank, "tid": thread, "ts": producer.end_us - inside_us, **common}
            yield {"ph": "f", "bp": "e", "pid": consumer.rank, "tid": thread, "ts": consumer.start_us, **common}


def _live_bytes(timeline: Timeline) -> Iterator[TraceEvent]:
    for rank in range(timeline.plan.num_ranks):
        for time_us, num_bytes in timeline.live_bytes(rank):
            yield {"ph": "C", "pid": rank, "ts": time_us, "name": "planned live bytes", "args": {"bytes": num_bytes}}
