"""Costs learnt from the first iterations of a training: measured times and bytes of chunks on every stage and shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from megatron_epp.cost.blocks import HEAD, INPUT, LAYER, UNKNOWN_BYTES, StageCosts
from megatron_epp.cost.model import BACKWARD_COPIES, PipelineCosts
from megatron_epp.cost.output_layer import VocabularyShards
from megatron_epp.cost.work import LinearTime, causal_pairs
from megatron_epp.features import batch_target
from megatron_epp.features.learnt_costs.timed import Learnt, Timed, fitted_line, ratio_to, undetermined
from megatron_epp.plan import NO_RECOMPUTE, Action, Op, Plan

OutputShare = Callable[[int], float]
"""Function from a chunk to the share of its tokens that pass the output layer and the loss."""


@dataclass(slots=True)
class Learner:
    """Collector of times and bytes of actions, iteration by iteration."""

    seen: int = 0
    learnt: Learnt = field(default_factory=Learnt)

    def add(
        self,
        plan: Plan,
        events: Sequence[tuple[str, float, float, float | None]],
        kept_bytes: Mapping[tuple[Op, int, int], int],
        peak_bytes: int = 0,
        offloadable_share: float | None = None,
        output_share: OutputShare | None = None,
        collectives: Iterable[tuple[Action, float]] = (),
        span_tokens: Callable[[int], float] | None = None,
    ) -> None:
        """Add a training iteration.

        Args:
            events: of this rank: action, start, end and processor time in microseconds.
            kept_bytes: bytes that each forward (F) left allocated, or each backward for its weight gradient (W), by operation,
                stage and chunk; empty where memory is not measured.
            peak_bytes: most bytes allocated on this rank so far; 0 where memory is not measured.
            offloadable_share: share of the kept bytes that can be offloaded; None where it is not measured.
            output_share: of chunks, on a rank with the output layer or a shard of it; None where all tokens pass it.
            collectives: of vocabulary shards, each with its time on this rank in microseconds.
            span_tokens: tokens that take the first stage as long as a chunk's spans; None where there are none.
        """
        took_us = {Action.parse(text): end_us - start_us for text, start_us, end_us, _ in events}
        joined = {action for row in plan.ranks for step in row if step.also for action in step.actions}
        has_shards = any(action.op is Op.S for action in took_us)
        work = (make := batch_target(plan, "work")) and make(plan.chunks, plan, plan.lengths, plan.token_multiple)
        for action, time_us in took_us.items():
            op, stage, chunk = action
            if op in (Op.S, Op.T):
                self.learnt.times.setdefault((stage, op), []).append(_of_shard(plan, chunk, time_us, output_share))
            if op not in (Op.F, Op.B, Op.W) or joined & {action, action._replace(op=Op.W)}:
                continue  # the actions of a step take turns, so each lasts longer than by itself
            recompute = NO_RECOMPUTE
            if op is Op.B:
                time_us += took_us.get(action._replace(op=Op.W), 0.0)
                recompute = plan.recompute[stage][chunk]
            has_output = stage == plan.num_stages - 1 and not has_shards
            share = output_share(chunk) if output_share and has_output else 1.0
            tokens, pairs, reads = size_of(plan, chunk)
            if span_tokens is not None and stage == 0 and op is not Op.W:
                tokens += round(span_tokens(chunk))
            timed = Timed(tokens, pairs, time_us, recompute, share, reads, int(work.gathered_tokens[chunk]) if work else 0)
            self.learnt.times.setdefault((stage, op), []).append(timed)
        self.learnt.peak_bytes = max(peak_bytes, self.learnt.peak_bytes)
        self.learnt.offloadable_share = offloadable_share
        for (op, stage, chunk), size in kept_bytes.items():
            self.learnt.sizes.setdefault((stage, op), []).append((size_of(plan, chunk)[0], size))
        for action, time_us in collectives:
            timed = _of_shard(plan, action.chunk, time_us, output_share)
            self.learnt.collectives[action.op, self.seen, action.chunk] = timed
        self.seen += 1

    def skip(self) -> None:
        """Count a training iteration that is not recorded, or in which this rank runs nothing: all ranks count the same."""
        self.seen += 1


def _of_shard(plan: Plan, chunk: int, time_us: float, output_share: OutputShare | None) -> Timed:
    share = output_share(chunk) if output_share else 1.0
    return Timed(round(share * plan.padded_tokens(chunk)), 0, time_us)


def size_of(plan: Plan, chunk: int) -> tuple[int, int, int]:
    """Padded tokens of a chunk, its causal query-key pairs, and the tokens ahead of its slice."""
    segments = plan.chunks[chunk].segments
    pairs = sum(causal_pairs(start, end) for _, start, end in segments)
    return plan.padded_tokens(chunk), pairs, sum(start for _, start, _ in segments)


def fitted_costs(base: PipelineCosts, everyone: Sequence[Learnt], *, keeps_weights: bool = False) -> PipelineCosts:
    """Fit costs to the measurements of all ranks, together where they share a stage or have the same vocabulary shard.

    Layers, messages and static bytes of `base` stay. With `keeps_weights`, weight gradients that were never split keep their
    share of the backward; otherwise they are unknown.
    """

    def per_token(stage: int, op: Op) -> list[float]:
        return [size / tokens for learnt in everyone for tokens, size in learnt.sizes.get((stage, op), ())]

    stages = []
    for number, stage in enumerate(base.stages):
        times = {op: _times_of(everyone, number, op) for op in (Op.F, Op.B, Op.W)}
        known = _with_times(base, number, times, keeps_weights)
        if kept_bytes := per_token(number, Op.F):
            known = _with_bytes(known, max(kept_bytes))
        if kept_bytes := per_token(number, Op.W):
            of_layer = max(0.0, *kept_bytes) / max(1, stage.num_layers)
            known = known.changed(weight_bytes_per_token=0.0).changed(LAYER, weight_bytes_per_token=of_layer)
        stages.append(known)
    before, after = (
        sum(s.line("forward").per_token_us + s.line("backward").per_token_us for s in of) for of in (base.stages, stages)
    )
    if (vocabulary := base.vocabulary) is not None:  # what was not measured stays as by formula
        spread, gather = (_collectives(op, len(vocabulary.shares), everyone) for op in (Op.SPREAD, Op.GATHER))
        vocabulary = replace(
            vocabulary,
            logits=_fitted_pass(vocabulary, Op.S, vocabulary.logits, everyone),
            gradient=_fitted_pass(vocabulary, Op.T, vocabulary.gradient, everyone),
            spread=fitted_line(vocabulary.spread, spread, pairs=False),
            gather=fitted_line(vocabulary.gather, gather, pairs=False),
        )
    shares = [learnt.offloadable_share for learnt in everyone if learnt.offloadable_share is not None]
    return replace(
        base,
        name="learnt",
        stages=tuple(stages),
        copy_us_per_byte=base.copy_us_per_byte * (after / before if before else 1.0),
        vocabulary=vocabulary,
        offloadable_share=min(shares, default=base.offloadable_share),
    )


def untold(base: PipelineCosts, ranks: Sequence[Learnt]) -> tuple[str, ...]:
    """Return the coefficients of forwards whose ratio to the others `fitted_costs` leaves as by formula, on some stage."""
    names: dict[str, None] = {}
    for number, stage in enumerate(base.stages):
        names |= dict.fromkeys(undetermined(stage.line("forward"), _times_of(ranks, number, Op.F)))
    return tuple(names)


def _times_of(everyone: Sequence[Learnt], stage: int, op: Op) -> list[Timed]:
    return [timed for learnt in everyone for timed in learnt.times.get((stage, op), ())]


def _with_times(base: PipelineCosts, number: int, times: Mapping[Op, Sequence[Timed]], keeps_weights: bool) -> StageCosts:
    stage, forwards = base.stages[number], _with_all_tokens(base, number, "forward", times[Op.F])
    factor = ratio_to(stage.line("forward"), forwards)
    modes = {name: replace(mode, again=mode.again.scaled(factor)) for name, mode in stage.layers.recompute.items()}
    known = stage.with_lines("forward", *_shared(stage, "forward", fitted_line(stage.line("forward"), forwards)))
    known = replace(known.changed(LAYER, recompute=modes), unlike=stage.unlike)
    once = [timed._replace(time_us=max(0.0, timed.time_us - _again_us(known, timed))) for timed in times[Op.B]]
    once = _with_all_tokens(base, number, "backward", once)
    backward = _shared(stage, "backward", fitted_line(stage.line("backward"), once))
    factor = ratio_to(stage.line("backward"), once) if keeps_weights else 0.0
    split, earlier = _with_all_tokens(base, number, "weight", times[Op.W]), stage.line("weight")
    weight = _shared(stage, "weight", fitted_line(earlier, split, False) if split else earlier.scaled(factor))
    return known.with_lines("backward", *backward).with_lines("weight", *map(LinearTime.within, weight, backward))


def _with_all_tokens(base: PipelineCosts, number: int, name: str, times: Sequence[Timed]) -> list[Timed]:
    """Scale measured times of a pass to all tokens passing the output layer, by the ratio that the earlier lines give.

    Copies of keys and values count as tokens that take as long by earlier costs.
    """
    scaled, earlier, extra = [], base.stages[number].line(name), base.stages[number].line_of_ends(name)
    copy_us = {"forward": 1, "backward": BACKWARD_COPIES}.get(name, 0) * base.copy_us_per_byte
    copy_us *= base.stages[number].num_caches * base.stages[number].kv.bytes_per_token
    per_copy = copy_us / earlier.per_token_us if earlier.per_token_us else 0.0
    for timed in times:
        less_us = extra.per_token_us * timed.tokens * (1.0 - timed.output_share)
        timed = timed._replace(tokens=timed.tokens + round(per_copy * timed.gathered))
        whole_us, device_us = earlier.time_us(*timed.size), earlier.device_us(*timed.size)
        part_us = earlier.launched(device_us - less_us)
        scaled.append(timed._replace(time_us=timed.time_us * (whole_us / part_us if part_us > 0 else 1.0)))
    return scaled


def _again_us(stage: StageCosts, timed: Timed) -> float:
    modes = ((count, stage.layers.mode(name)) for name, count in timed.recompute.by_mode())
    return sum(count * mode.again.time_us(*timed.size) for count, mode in modes if mode is not None)


def _shared(stage: StageCosts, name: str, whole: LinearTime) -> tuple[LinearTime, LinearTime, LinearTime]:
    """Share the line of a pass between the stage's blocks, every coefficient as by earlier costs."""
    (layer, inner, extra), num_layers = stage.lines(name), stage.num_layers
    shares = [
        (of_layers / (of_layers + rest) if of_layers + rest > 0 else 1.0) if num_layers else 0.0
        for of_layers, rest in zip(astuple(layer.scaled(num_layers)), astuple(inner + extra), strict=True)
    ]
    coefficients = list(zip(astuple(whole), shares, strict=True))
    own = LinearTime(*(value * share / max(1, num_layers) for value, share in coefficients))
    rests = [value * (1.0 - share) for value, share in coefficients]
    of_inner = [part / (part + rest) if part > 0 else 0.0 for part, rest in zip(astuple(inner), astuple(extra), strict=True)]
    first = LinearTime(*(rest * share for rest, share in zip(rests, of_inner, strict=True)))
    return own, first, LinearTime(*(rest * (1.0 - share) for rest, share in zip(rests, of_inner, strict=True)))


def _with_bytes(stage: StageCosts, kept_per_token: float) -> StageCosts:
    """Share the bytes that a stage was measured to keep per token between its layers, which keep their inputs at least."""
    own, inner = stage.layers, sum(block.bytes_per_token for block in stage.inner)
    rest = stage.ends_bytes_per_token + inner
    of_layers = max(kept_per_token - rest, stage.num_layers * own.input_bytes_per_token) if stage.num_layers else 0.0
    left = max(0.0, kept_per_token - of_layers)
    known = stage.changed(working_bytes_per_token=0.0).changed(HEAD, bytes_per_token=0.0)
    for block in stage.inner:
        size = min(block.bytes_per_token, left)
        known, left = known.changed(block.kind, bytes_per_token=size), left - size
    of_layer = of_layers / max(1, stage.num_layers)
    known = known.changed(INPUT, bytes_per_token=left).changed(LAYER, bytes_per_token=of_layer, **UNKNOWN_BYTES)
    return replace(known, unlike=())


def _fitted_pass(shards: VocabularyShards, op: Op, earlier: LinearTime, everyone: Sequence[Learnt]) -> LinearTime:
    """Fit the line of an operation for the whole vocabulary: that of the slowest shard, for which a collective waits."""
    lines, tokens = [], []
    for rank in range(len(shards.shares)):
        if times := _times_of(everyone, rank, op):
            lines.append(shards.of_whole(fitted_line(shards.of_shard(earlier, rank), times, pairs=False), rank))
            tokens += [timed.tokens for timed in times]
    return max(lines, key=lambda line: line.time_us(fmean(tokens), 0), default=earlier)


def _collectives(op: Op, num_ranks: int, everyone: Sequence[Learnt]) -> list[Timed]:
    """Return the time of each collective that all ranks measured: the least, of the rank that waits for no other."""
    by_chunk: dict[tuple[int, int, int], list[Timed]] = {}
    for learnt in everyone:
        for (name, iteration, chunk), timed in learnt.collectives.items():
            if name is op:
                by_chunk.setdefault((learnt.pipeline, iteration, chunk), []).append(timed)
    return [min(times, key=lambda timed: timed.time_us) for times in by_chunk.values() if len(times) == num_ranks]


class CostDeviation(NamedTuple):
    """Ratios of learnt times to the earlier costs': over all stages, of one at least and at most, and of vocabulary shards."""

    overall: float
    least: float
    largest: float
    shards: float | None = None
    collectives: float | None = None

    def __str__(self) -> str:
        text = f"{self.overall:.2f} of the time by formulas (stages {self.least:.2f} to {self.largest:.2f}"
        if self.shards is not None:
            text += f", vocabulary shards {self.shards:.2f}"
        return f"{text}, their collectives {self.collectives:.2f})" if self.collectives is not None else f"{text})"


def deviation(base: PipelineCosts, learnt: PipelineCosts, sizes: Sequence[tuple[int, int, int]]) -> CostDeviation:
    """Compare the learnt time of chunks of these sizes (`size_of`), forwards and backwards, with that by the earlier costs."""

    def total_us(lines: Iterable[LinearTime]) -> float:
        return sum(line.time_us(*size) for line in lines for size in sizes)

    def ratio(then: Iterable[LinearTime], now: Iterable[LinearTime]) -> float | None:
        return total_us(now) / then_us if (then_us := total_us(then)) > 0 else None

    before, after = ([total_us((s.line("forward"), s.line("backward"))) for s in costs.stages] for costs in (base, learnt))
    ratios = [now / then for now, then in zip(after, before, strict=True) if then > 0] or [1.0]
    result = CostDeviation(sum(after) / (sum(before) or 1.0), min(ratios), max(ratios))
    if (then := base.vocabulary) is None or (now := learnt.vocabulary) is None:
        return result
    return result._replace(
        shards=ratio((then.logits, then.gradient), (now.logits, now.gradient)),
        collectives=ratio((then.spread, then.gather), (now.spread, now.gather)),
    )
