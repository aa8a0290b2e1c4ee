"""The parts of `check` for the tables of a plan (shapes, ranges, every token in exactly one chunk) and for its predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_epp.plan.action import Op
from megatron_epp.plan.chunk import NOTHING_BORROWED, path_of
from megatron_epp.plan.columns import Booleans, Floats, PlanColumns, entries, positions
from megatron_epp.plan.kv_offload import slices_of
from megatron_epp.plan.plan import Plan, Prediction
from megatron_epp.plan.simulation import Timeline
from megatron_epp.plan.violation import Violation, fault

NOISE = 1e-9
"""Largest relative difference between equal sums of times that are added in another order."""


def check_tables(plan: Plan, columns: PlanColumns) -> Iterator[Violation]:
    """Yield violations of shapes and ranges, for everything but the chunk table. Later checks index without testing again."""
    for reason in (
        *_shapes(plan),
        *_sizes(plan),
        *_ranges(plan),
        *_message_times(plan),
        *_message_sizes(plan),
        *_choices(plan),
        *_recompute_times(plan, columns),
    ):
        yield fault(reason)
    is_right = _is_time(columns.time_us) & (columns.alloc_bytes >= 0) & (columns.free_bytes >= 0)
    for number in np.flatnonzero(~is_right).tolist():
        rank, position = columns.where(number)
        step, in_copies = columns.steps[number], number >= columns.num_compute
        reason = f"allocates {step.alloc_bytes} and frees {step.free_bytes} bytes; neither is below zero"
        if not 0.0 <= step.time_us < math.inf:
            reason = f"takes {step.time_us} us"
        yield Violation(rank, position, step.action, reason, in_copies)


def _is_time(time_us: Floats) -> Booleans:
    return (time_us >= 0.0) & (time_us < math.inf)


def check_tokens(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless every token is in exactly one chunk, and every chunk has at most one slice, at its beginning, or
    two: the end of a sequence, and at the chunk's end another one's beginning.

    Slices but a sequence's last fill whole multiples of the padding, so that no padding is between two of them. Where sequences
    share prefixes, every token is in one chunk of the sequence that holds it, behind those before it, and slices are free.
    """
    held: list[list[tuple[int, int, int]]] = [[] for _ in plan.lengths]
    if faults := [*check_borrowed(plan)]:
        yield from faults
        return
    borrowed = plan.borrowed or (NOTHING_BORROWED,) * len(plan.lengths)
    for c, chunk in enumerate(plan.chunks):
        if not chunk.segments:
            yield fault(f"chunk {c} is empty")
        slices = []
        for position, (sequence, start, end) in enumerate(chunk.segments):
            if not 0 <= sequence < len(plan.lengths):
                yield fault(f"chunk {c} holds sequence {sequence}; there are {len(plan.lengths)}")
                continue
            length, first = plan.lengths[sequence], borrowed[sequence].tokens
            if not first <= start < end <= length:
                own = f", {first} of them in sequence {borrowed[sequence].sequence}" if first else ""
                yield fault(f"chunk {c} holds tokens {start} to {end} of sequence {sequence}, which has {length}{own}")
                continue
            held[sequence].append((start, end, c))
            if plan.borrowed:
                continue
            if start > 0 or end < length:
                slices.append((position, start > 0, end < length))
            if end < length and end % plan.token_multiple:
                yield fault(
                    f"chunk {c} ends a slice of sequence {sequence} at token {end}, which is no multiple of "
                    f"{plan.token_multiple} (token_multiple); only the last slice of a sequence may"
                )
        if slices and slices[0][0] > 0:
            yield fault(f"chunk {c} has its slice at position {slices[0][0]}; a slice comes first in its chunk")
        elif len(slices) > 1 and slices != [(0, True, False), (len(chunk.segments) - 1, False, True)]:
            reason = "two can run in a chunk if the first segment ends one and the last begins one"
            yield fault(f"chunk {c} holds {len(slices)} slices of longer sequences; {reason}")
        if plan.borrowed:
            yield from _not_behind(plan, c)
    for sequence, parts in enumerate(held):
        yield from _coverage(sequence, borrowed[sequence].tokens, plan.lengths[sequence], sorted(parts))


def check_borrowed(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless every sequence that borrows has tokens of its own and borrows from one that holds the last of
    these tokens: so no sequence borrows from itself through others, each of which would borrow less than the one before.
    """
    if plan.borrowed and len(plan.borrowed) != len(plan.lengths):
        yield fault(f"borrowed has {len(plan.borrowed)} entries for {len(plan.lengths)} sequences")
        return
    for sequence, (lender, tokens) in enumerate(plan.borrowed):
        if (lender, tokens) == NOTHING_BORROWED:
            continue
        if not 0 <= lender < len(plan.lengths) or lender == sequence:
            yield fault(f"sequence {sequence} borrows from sequence {lender}; there are {len(plan.lengths)}")
        elif not plan.borrowed[lender].tokens < tokens <= plan.lengths[lender]:
            own = f"from {plan.borrowed[lender].tokens} to {plan.lengths[lender]}"
            yield fault(f"sequence {sequence} borrows {tokens} tokens of sequence {lender}, which holds those {own} itself")
        elif tokens >= plan.lengths[sequence]:
            yield fault(f"sequence {sequence} borrows {tokens} of its {plan.lengths[sequence]} tokens; one at least is its own")


def _not_behind(plan: Plan, c: int) -> Iterator[Violation]:
    """Yield violations unless segments of a chunk are behind those in it that have the tokens before theirs."""
    segments = plan.chunks[c].segments
    for position, (sequence, start, _) in enumerate(segments):
        before, later = path_of(sequence, start, plan.borrowed)[-1:], segments[position + 1 :]
        if any(other == before[0].sequence and begin < start <= stop for other, begin, stop in later if before):
            yield fault(f"chunk {c} holds tokens of sequence {sequence} from {start} on ahead of the one before them")


def check_extensions(plan: Plan) -> Iterator[Violation]:
    for extension in plan.extensions:
        yield from map(fault, extension.faults(plan.chunks, plan.lengths))


def check_kv_offload(plan: Plan) -> Iterator[Violation]:
    """Yield violations unless KV offload is of sequences that `slices_in` lists, at most once per stage and sequence."""
    slices, seen = slices_of(plan), set()
    for stage, sequence, *sizes in plan.kv_offload:
        name = f"keys and values of sequence {sequence} in host memory of stage {stage}"
        if not 0 <= stage < plan.num_stages:
            yield fault(f"{name}: there are {plan.num_stages} stages")
        elif sequence not in slices:
            what = "read by no other" if plan.borrowed else "not cut into slices that come first in their chunks"
            yield fault(f"{name}: the sequence is {what}")
        elif (stage, sequence) in seen:
            yield fault(f"{name} are there twice")
        elif min(sizes) < 0:
            yield fault(f"{name} take {sizes[0]} bytes and their gradient {sizes[1]}; neither is below zero")
        seen.add((stage, sequence))


def _coverage(sequence: int, first: int, length: int, parts: Sequence[tuple[int, int, int]]) -> Iterator[Violation]:
    done, last = first, None
    for start, end, c in parts:
        if start > done:
            yield fault(f"tokens {done} to {start} of sequence {sequence} are in no chunk")
        elif start < done:
            yield fault(f"tokens {start} to {min(done, end)} of sequence {sequence} are in chunk {last} and in chunk {c}")
        if end > done:
            done, last = end, c
    if done < length:
        yield fault(f"tokens {done} to {length} of sequence {sequence} are in no chunk")


def _shapes(plan: Plan) -> Iterator[str]:
    stages, chunks, ranks = plan.num_stages, len(plan.chunks), plan.num_ranks
    for name, row, size, unit in (
        ("num_layers", plan.num_layers, stages, "stages"),
        ("static_bytes", plan.static_bytes, ranks, "ranks"),
        ("cap_bytes", plan.cap_bytes, ranks, "ranks"),
        ("predicted.peak_bytes", plan.predicted.peak_bytes, ranks, "ranks"),
        ("copies", plan.copies or ((),) * ranks, ranks, "ranks"),
        ("host_cap_bytes", plan.host_cap_bytes or (0,) * ranks, ranks, "ranks"),
        ("host_links", plan.host_links or (0,) * ranks, ranks, "ranks"),
        ("message_bytes", plan.message_bytes or (0,) * ranks, ranks, "ranks"),
        ("messages.num_bytes", plan.messages.num_bytes or (0,) * chunks, chunks, "chunks"),
    ):
        if len(row) != size:
            yield f"{name} has {len(row)} entries for {size} {unit}"
    for name, table, rows in (
        ("recompute", plan.recompute, stages),
        ("recompute_us", plan.recompute_us, stages),
        ("offload_share", plan.offload_share, stages),
        ("messages.activation_us", plan.messages.activation_us, max(stages - 1, 0)),
        ("messages.gradient_us", plan.messages.gradient_us, max(stages - 1, 0)),
    ):
        shape = sorted({len(row) for row in table})
        if len(table) != rows or (rows > 0 and shape != [chunks]):
            yield f"{name} has {len(table)} rows of {shape} entries; expected {rows} rows of {chunks}"


def _sizes(plan: Plan) -> Iterator[str]:
    for name, row, what in (
        ("placement", plan.placement, "stage"),
        ("lengths", plan.lengths, "sequence"),
        ("chunks", plan.chunks, "chunk"),
    ):
        if not row:
            yield f"{name} is empty: a plan needs at least one {what}"
    for name, row, unit in (
        ("num_layers", plan.num_layers, "stage"),
        ("static_bytes", plan.static_bytes, "rank"),
        ("cap_bytes", plan.cap_bytes, "rank"),
        ("host_cap_bytes", plan.host_cap_bytes, "rank"),
    ):
        for position, value in enumerate(row):
            if value < 0:
                yield f"{name} of {unit} {position} is {value}; it is at least 0"


def _ranges(plan: Plan) -> Iterator[str]:
    for stage, rank in enumerate(plan.placement):
        if not 0 <= rank < plan.num_ranks:
            yield f"placement puts stage {stage} on rank {rank}; there are {plan.num_ranks} ranks"
    for rank, link in enumerate(plan.host_links):
        if not 0 <= link < plan.num_ranks:
            yield f"host_links puts rank {rank} on link {link}; links of {plan.num_ranks} ranks are 0 to {plan.num_ranks - 1}"
    for sequence, length in enumerate(plan.lengths):
        if length < 1:
            yield f"sequence {sequence} has {length} tokens"
    if plan.token_multiple < 1:
        yield f"token_multiple is {plan.token_multiple}; it is at least 1"


def _message_times(plan: Plan) -> Iterator[str]:
    for name, table in (("activation_us", plan.messages.activation_us), ("gradient_us", plan.messages.gradient_us)):
        for stage, c in positions(table, ~_is_time(entries(table))):
            yield f"messages.{name} of stage {stage}, chunk {c} is {table[stage][c]} us"
    for name in ("collective_us", "message_us"):
        for op, times in getattr(plan.messages, name):
            if len(times) != len(plan.chunks):
                yield f"messages.{name} of {op} has {len(times)} entries; there are {len(plan.chunks)} chunks"
            for _, c in positions([times], ~_is_time(entries([times]))):
                yield f"messages.{name} of {op}, chunk {c} is {times[c]} us"
    grouped = [chunk for group in plan.loss_groups for chunk in group]
    if len(set(grouped)) < len(grouped) or not set(grouped) <= set(range(len(plan.chunks))):
        yield f"loss_groups {plan.loss_groups} name a chunk twice, or one that is not there"


def _message_sizes(plan: Plan) -> Iterator[str]:
    for name, row in (("message_bytes", plan.message_bytes), ("messages.num_bytes", plan.messages.num_bytes)):
        if row and min(row) < 0:
            yield f"{name} has {min(row)} bytes; none is below zero"
    for rank, (size, static) in enumerate(zip(plan.message_bytes, plan.static_bytes, strict=False)):
        if size > static:
            yield f"message_bytes of rank {rank} is {size}, a part of static_bytes, which is {static}"
    if plan.message_bytes and not plan.messages.num_bytes:
        yield "message_bytes are set aside, but messages.num_bytes are not there"


def _choices(plan: Plan) -> Iterator[str]:
    for stage, (layers, row) in enumerate(zip(plan.num_layers, plan.recompute, strict=False)):
        wrong = {recompute for recompute in set(row) if min(recompute) < 0 or recompute.num_layers > layers}
        for c, recompute in enumerate(row) if wrong else ():
            if recompute in wrong:
                yield f"stage {stage} recomputes {recompute} layers of chunk {c}; it has {layers}"
    for stage, c in positions(plan.recompute_us, ~_is_time(entries(plan.recompute_us))):
        yield f"stage {stage} recomputes chunk {c} in {plan.recompute_us[stage][c]} us"
    shares = entries(plan.offload_share)
    for stage, c in positions(plan.offload_share, ~((shares >= 0.0) & (shares <= 1.0))):
        yield f"stage {stage} offloads a share of {plan.offload_share[stage][c]} of chunk {c}; a share is within 0 and 1"


def _recompute_times(plan: Plan, columns: PlanColumns) -> Iterator[str]:
    """Yield faults unless recompute is within the time of the action that does it; without costs it is zero."""
    again_us, sizes = entries(plan.recompute_us), np.array([*map(len, plan.recompute_us), 0])
    most_us, starts = np.full(len(again_us), math.inf), np.cumsum(sizes) - sizes
    for op in (Op.B, Op.R):
        actions = columns.of(op)
        site, chunk = columns.site[actions], columns.chunk[actions]
        known = (columns.step[actions] < columns.num_compute) & (site >= 0) & (site < len(sizes) - 1)
        known &= (chunk >= 0) & (chunk < sizes[np.where(known, site, -1)])
        most_us[starts[site[known]] + chunk[known]] = columns.time_us[columns.step[actions[known]]]
    wrong = (again_us > 0) & (again_us > most_us * (1 + NOISE))
    for (stage, c), most in zip(positions(plan.recompute_us, wrong), most_us[wrong].tolist(), strict=True):
        time_us = plan.recompute_us[stage][c]
        yield f"stage {stage} recomputes chunk {c} in {time_us} us, a part of an action that takes {most} us"


def check_predicted(timeline: Timeline) -> Iterator[Violation]:
    """Yield violations unless makespan, bubble and peaks equal the simulator's, and the lower bound is at most the makespan.

    It proves that the numbers follow from the steps' own times and bytes, of which only the range is checked.
    """
    plan, predicted = timeline.plan, timeline.plan.predicted
    if predicted == Prediction.none(plan.num_ranks):
        return
    makespan_us, bubble = timeline.makespan_us, timeline.bubble_fraction
    noise_us = NOISE * makespan_us
    # `not <=` instead of `>`: NaN is a fault too.
    if not abs(predicted.makespan_us - makespan_us) <= noise_us:
        yield fault(f"predicted.makespan_us is {predicted.makespan_us}; the simulator finds {makespan_us}")
    if not 0.0 <= predicted.lower_bound_us <= makespan_us + noise_us:
        reason = f"predicted.lower_bound_us is {predicted.lower_bound_us}; it is within 0 and the makespan of {makespan_us}"
        yield fault(reason)
    if not abs(predicted.bubble_fraction - bubble) <= NOISE:
        yield fault(f"predicted.bubble_fraction is {predicted.bubble_fraction}; the simulator finds {bubble}")
    for rank, (planned, simulated) in enumerate(zip(predicted.peak_bytes, timeline.peak_bytes, strict=True)):
        if planned != simulated:
            yield fault(f"predicted.peak_bytes is {planned}; the simulator finds {simulated}", rank)
