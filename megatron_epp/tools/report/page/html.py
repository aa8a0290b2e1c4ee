"""A page of plans and runs: one file with its style, scripts and data, which needs no network.

Its data are plans and runs as columns of numbers. A *lane* is a list of boxes on one rank and stream. All lanes of an iteration
stand one after the other: `lanes` has the number of boxes of each, and each other column an entry per box. Boxes are numbered
along these columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from megatron_epp.plan import critical_path as paths
from megatron_epp.plan.action import Action
from megatron_epp.plan.boxes import COMPUTE, COPY, FAR_WITH_ZOOM, LINK, far_from, measured_boxes, recompute_in_backward
from megatron_epp.plan.chunk import path_of
from megatron_epp.plan.critical_path import BindingDependency, DependencyKind
from megatron_epp.plan.document import digest
from megatron_epp.plan.errors import PlanError
from megatron_epp.plan.graph import Graph, build_graph
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.memory_breakdown import MemoryBreakdown
from megatron_epp.plan.operations import ANYWHERE, of_stages, operations
from megatron_epp.plan.plan import Copy, Plan, is_unlimited
from megatron_epp.plan.plan_figures import is_calibrated, recompute_share
from megatron_epp.plan.simulation import Timeline, simulate
from megatron_epp.plan.writing import write_text
from megatron_epp.tools.report.gantt import item_colours, strengths_of
from megatron_epp.tools.report.text import batch_text, headline

PageColumns = dict[str, Any]

_STREAMS = (COMPUTE, COPY, LINK)
_DECIMALS = 3  # times in microseconds are rounded to nanoseconds
SCRIPTS = ("model.js", "text.js", "state.js", "lanes.js", "memory.js", "table.js", "pane.js", "main.js")
"""Scripts in the order in which they run, in one scope."""


class Shown(NamedTuple):
    name: str  # its title
    plan: Plan  # it is simulated
    measured: Measured | None = None  # a run of it
    breakdown: MemoryBreakdown | None = None  # its memory by item


def plan_columns(shown: Shown) -> PageColumns:
    """Return all that a page shows of a plan and a run. Raises `PlanError` for a deadlock, or a run of another plan."""
    plan = shown.plan
    timeline, graph = simulate(plan), build_graph(plan)
    about: PageColumns = {"name": shown.name, "digest": digest(plan)[:12], "headline": headline(plan)}
    about |= {"recompute_share": recompute_share(plan), "calibrated": is_calibrated(plan), "num_ranks": plan.num_ranks}
    return about | {
        "stages": [plan.stages_of(rank) for rank in range(plan.num_ranks)],
        "lengths": plan.lengths,
        "borrowed": plan.borrowed,
        "roots": [path_of(q, length, plan.borrowed)[0].sequence for q, length in enumerate(plan.lengths) if plan.borrowed],
        "chunks": {
            "kind": [chunk.kind(plan.lengths) for chunk in plan.chunks],
            "tokens": [chunk.num_tokens for chunk in plan.chunks],
            "padded": [plan.padded_tokens(c) for c in range(len(plan.chunks))],
            "segments": [[number for segment in chunk.segments for number in segment] for chunk in plan.chunks],
            "strength": [round(strength, 3) for strength in strengths_of(plan)],
        },
        "planned": _planned(timeline, graph),
        "memory": _memory_columns(timeline, graph),
        "items": None if shown.breakdown is None else item_columns(shown.breakdown),
        "measured": None if shown.measured is None else _measured(plan, shown.measured, graph),
    }


def _planned(timeline: Timeline, graph: Graph) -> PageColumns:
    plan, (starts, ends) = timeline.plan, paths.times_of(timeline)
    binding = paths.binding_dependencies(graph, starts, ends)
    lanes = _lanes([step.action for step in graph.steps], [len(numbers) for numbers in graph.tracks], starts, ends)
    also = {number: [str(action) for action in step.actions[1:]] for number, step in enumerate(graph.steps) if step.actions[1:]}
    return lanes | {
        "makespan_us": timeline.makespan_us,
        "bubble": timeline.bubble_fraction,
        "alloc": [step.alloc_bytes for step in graph.steps],
        "free": [step.free_bytes for step in graph.steps],
        "also": also,
        **_recompute(plan, graph),
        **_reasons(graph, binding, ends, range(len(graph.steps))),
    }


def _measured(plan: Plan, measured: Measured, graph: Graph) -> PageColumns:
    """Columns of a run, with the planned box of each of its boxes (`planned`; -1 for a message)."""
    boxes = measured_boxes(plan, measured)
    boxes.sort(key=lambda box: (_STREAMS.index(box.stream), box.rank, box.start_us))
    numbers = [-1 if (number := graph.listed.number(box.action)) is None else number for box in boxes]
    starts, ends = [paths.ABSENT_US] * len(graph.steps), [paths.ABSENT_US] * len(graph.steps)
    box_of = {number: i for i, number in enumerate(numbers) if number >= 0}
    for number, i in box_of.items():
        starts[number], ends[number] = boxes[i].start_us, boxes[i].end_us
    of_lanes = Counter((box.stream, box.rank) for box in boxes)
    counts = [of_lanes[stream, rank] for stream in _STREAMS for rank in range(plan.num_ranks)]
    times = [box.start_us for box in boxes], [box.end_us for box in boxes]
    lanes = _lanes([box.action for box in boxes], counts, *times)
    return lanes | {
        "makespan_us": measured.makespan_us,
        "bubble": measured.bubble_fraction,
        "planned": numbers,
        **_reasons(graph, paths.binding_dependencies(graph, starts, ends), ends, numbers),
    }


def _lanes(actions: Sequence[Action], counts: Sequence[int], starts: Sequence[float], ends: Sequence[float]) -> PageColumns:
    index = {op: number for number, op in enumerate(each.op for each in operations())}
    return {
        "lanes": counts,
        "op": [index[action.op] for action in actions],
        "stage": [action.stage for action in actions],
        "chunk": [action.chunk for action in actions],
        "start_us": _times(starts),
        "time_us": _times(end_us - start_us for start_us, end_us in zip(starts, ends, strict=True)),
    }


def _times(values: Iterable[float]) -> list[float]:
    """Round times; whole numbers become integers, which are shorter as text."""
    return [int(value) if value == int(value) else value for value in (round(value, _DECIMALS) for value in values)]


def _reasons(graph: Graph, binding: Sequence[BindingDependency], ends: Sequence[float], numbers: Sequence[int]) -> PageColumns:
    """Columns with how far back the box is for which each waited (0 for none), given its step, and the critical path."""
    box_of = {number: i for i, number in enumerate(numbers) if number >= 0}
    none = BindingDependency(DependencyKind.START)
    of_boxes = [binding[number] if number >= 0 else none for number in numbers]
    transfers = paths.transfers_between(graph)
    carried = {
        i: transfers[dependency.number, numbers[i]].carries.text
        for i, dependency in enumerate(of_boxes)
        if dependency.kind is DependencyKind.TRANSFER
    }
    names = sorted(set(carried.values()))
    return {
        "because": [i - box_of.get(dependency.number, i) for i, dependency in enumerate(of_boxes)],
        "cause": [int(dependency.kind) for dependency in of_boxes],
        "transfers": names,
        "carried": [names.index(carried[i]) if i in carried else -1 for i in range(len(of_boxes))] if carried else [],
        "critical": [box_of[number] for number in paths.critical_path(binding, ends) if number in box_of],
    }


def _recompute(plan: Plan, graph: Graph) -> PageColumns:
    shares = recompute_in_backward(plan)
    times_us = {number: share * step.time_us for number, step in enumerate(graph.steps) if (share := shares.get(step.action))}
    actions = [graph.steps[number].action for number in times_us]
    modes = [str(plan.recompute[stage][chunk]) for _, stage, chunk in actions]
    names = sorted(set(modes))
    of_boxes = {"box": [*times_us], "time_us": _times(times_us.values()), "mode": [*map(names.index, modes)], "modes": names}
    return {"recompute": of_boxes}


def _memory_columns(timeline: Timeline, graph: Graph) -> PageColumns:
    """Columns with the memory of every rank, which allocates and frees box by box without copies.

    Others do in the order of `events`: `code` is twice the number of a box, plus one if it is the release.
    """
    plan = timeline.plan
    events: dict[int, PageColumns] = {}
    for rank, copies in enumerate(plan.copies):
        if not copies:
            continue
        issued = timeline.memory_events(rank)
        first = {False: graph.tracks[rank].start, True: graph.tracks[plan.num_ranks + rank].start}
        codes = [2 * (first[isinstance(event.step, Copy)] + event.position) + event.at_end for event in issued]
        events[rank] = {"code": codes, "time_us": _times(event.time_us for event in issued)}
    return {
        "static": plan.static_bytes,
        "cap": [None if is_unlimited(cap) else cap for cap in plan.cap_bytes],
        "peak": timeline.peak_bytes,
        "events": events,
    }


def item_columns(breakdown: MemoryBreakdown) -> PageColumns:
    """Columns with the memory of every rank by item; `changes` has the moment, the item and the added bytes of each change."""
    colours = item_colours(breakdown)
    index = {name: number for number, name in enumerate(colours)}
    ranks = []
    for rank in range(breakdown.timeline.plan.num_ranks):
        times: list[float] = []
        changes: list[int] = []
        before: dict[str, int] = {}
        for moment in breakdown.moments(rank):
            for name in colours:
                if delta := moment.items.get(name, 0) - before.get(name, 0):
                    changes += [len(times), index[name], delta]
            times.append(moment.time_us)
            before = moment.items
        ranks.append({"time_us": _times(times), "changes": changes})
    return {"names": list(colours), "colours": list(colours.values()), "ranks": ranks}


def page(shown: Sequence[Shown]) -> str:
    """Return plans below each other on one time axis, as HTML. Raises `PlanError` as `plan_columns` does, and for none."""
    if not shown:
        raise PlanError("there is no plan to draw: no planner found one")
    batches = list(dict.fromkeys(batch_text(each.plan) for each in shown))
    title = batches[0] if len(batches) == 1 else f"{len(batches)} batches"
    # In the order to which the column `op` of boxes refers, with the names and colours of pictures.
    of_operations = [
        {
            "op": str(each.op),
            "text": each.text,
            "colour": each.colour,
            "site": "stage" if each.sites is of_stages else "attention" if ANYWHERE in each.sites((0, 0)) else "shard",
        }
        for each in operations()
    ]
    data = {
        "title": title,
        "operations": of_operations,
        "equal_widths": any(each.measured is not None and far_from(each.plan, each.measured, FAR_WITH_ZOOM) for each in shown),
        "plans": list(map(plan_columns, shown)),
    }
    parts = {
        "title": escape(title),
        "style": _asset("page.css"),
        "data": embedded(data),
        "scripts": "\n".join(map(_asset, SCRIPTS)),
    }
    frame = _asset("page.html")
    for name, text in parts.items():
        frame = frame.replace(f"<!--{name}-->", text, 1)
    return frame


def save_page(shown: Sequence[Shown], path: str | Path) -> None:
    write_text(path, page(shown))


def embedded(data: object) -> str:
    """Format data as JSON that can stand in a `script` element: texts in it cannot end the element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
