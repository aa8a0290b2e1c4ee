"""Stock 1F1B of whole sequences: each padded to the context length, or packed up to it, interleaved or not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_epp.cost.blocks import LAYER, PREDICTION
from megatron_epp.cost.model import Costs
from megatron_epp.plan import Chunk, InfeasibleError, Op, PlanError, Remedy
from megatron_epp.plan.first_fit import pack_whole
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.planner.baselines.contest import Contest, context_tokens, even_rows
from megatron_epp.planner.baselines.seq1f1b import enter_uniform, seq1f1b_order
from megatron_epp.planner.chunks.chunker import round_up, whole_sequences
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.fit import fit_recompute, is_within, peaks_bytes, uniform_steps
from megatron_epp.planner.order import Order, arranged, slice_groups, stand_in
from megatron_epp.planner.orders.patterns import looped, one_warm_up
from megatron_epp.planner.orders.warm_up import elastic_1f1b
from megatron_epp.planner.service.replica_balance import sequence_work
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.planner.validation import require_whole

MLP_AGAIN = ("mlp",)  # recompute of norms and MLPs or experts, which Megatron has for all layers or none


@dataclass(frozen=True, slots=True)
class UniformDecisions(Decisions):
    """Decisions by which all layers recompute in groups (method ``uniform``): a backward keeps a group's input, and has the
    activations of one group at a time. Recompute steps are of groups.
    """

    group: int = 1  # layers of each; a stage's last may have fewer, and counts as if it had as many as the others

    def tables(self, problem: Problem, costs: Costs) -> Tables:
        return Decisions.tables(self, problem, _of_groups(costs, self.group))


def _of_groups(costs: Costs, group: int) -> Costs:
    """Return costs with so many layers counted as one."""
    stages = []
    for stage in costs.stages:
        own, groups = stage.layers, -(-stage.num_layers // group)
        times = {name: getattr(own, name).scaled(own.count / max(1, groups)) for name in ("forward", "backward", "weight")}
        sizes = {name: getattr(own, name) for name in ("bytes_per_token", "full_bytes_per_token", "attended_bytes_per_token")}
        sizes = {name: None if size is None else min(group, own.count) * size for name, size in sizes.items()}
        stages.append(stage.changed(LAYER, count=groups, recompute={}, **times, **sizes) if groups else stage)
    return replace(costs, stages=tuple(stages))


def padded_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """One sequence per micro-batch, in batch order, each padded to `options.context`; the least uniform recompute that fits.

    The plan says so by its token multiple: padding takes time and memory, and travels in the messages, like any token; only
    attention is cheaper than in the original. Raises `InfeasibleError` if no recompute fits, or a sequence is longer than a
    row.
    """
    contest = Contest(problem, costs, options)
    row = context_tokens(problem, options)
    require_whole(options, row)
    enter_uniform(contest, whole_sequences(problem.lengths), row)
    return contest.result()


def packed_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Megatron's 1F1B at its best, interleaved where ranks have several stages, of rows up to `options.context` tokens.

    Rows are by first fit, longest first, or of about equal work. Recompute is the fastest that fits of what Megatron's flags
    say: none, norms and MLPs or experts in all layers (``recompute_modules``), or the least number of whole layers of every
    stage (method ``block``). Recompute of core attention alone frees next to nothing behind a fused kernel.

    Kinder than the original: rows are not padded, sequences of a row do not attend to each other, and the number of rows suits
    each batch. Raises `InfeasibleError` if no row fits the cap, or there are fewer rows than ranks (`rows_together`), and
    `PlanError` if stages are placed otherwise than Megatron places them.
    """
    return packed_contest(problem, costs, options).result()


def packed_contest(
    problem: Problem,
    costs: Costs,
    options: Options,
    *,
    first_fit: bool = False,
    by_chunk: bool = False,
    in_groups: bool = False,
) -> Contest:
    """Judge the rows of `packed_1f1b`, without writing a plan. Raises what it raises, but where no row fits the cap.

    Args:
        first_fit: only rows by first fit, in the size asked for.
        by_chunk: recompute as plans choose it, for every row and stage by itself.
        in_groups: all layers may recompute in groups, too, which no plan can run.
    """
    own = looped(problem)
    if problem.placement != own.rank_of:
        raise PlanError(
            f"planner {options.planner!r} is Megatron's, whose stages go round the ranks; it cannot use placement "
            f"{list(problem.placement)} (leave out the flags that place them otherwise)"
        )
    contest = Contest(problem, costs, options, any_placement=True)
    row = context_tokens(problem, options)
    require_whole(options, round_up(max(problem.lengths), problem.token_multiple))
    if options.chunk_tokens is not None:
        row = min(row, options.chunk_tokens // problem.token_multiple * problem.token_multiple)
    least, tables = problem.num_ranks if own.num_chunks > 1 else 1, [pack_whole(problem.lengths, row)]
    if not first_fit:
        tables += _even_tables(problem, costs, row, len(tables[0]))
    tables = [chunks for chunks in tables if len(chunks) >= least]
    if not tables:
        raise InfeasibleError(
            f"planner {options.planner!r} has {len(problem.lengths)} sequences for {least} ranks, and Megatron's interleaved "
            "schedule needs a microbatch for each rank",
            Remedy("raise", "global_batch_size", least),
        )
    for chunks in tables:
        arranged_chunks = arranged(chunks, problem.loss_groups)
        if by_chunk:
            _enter_by_chunk(contest, arranged_chunks, megatron_order(arranged_chunks, problem, own))
        else:
            _enter_megatron(contest, arranged_chunks, own, in_groups)
    return contest


def _even_tables(problem: Problem, costs: Costs, row: int, count: int) -> Iterator[tuple[Chunk, ...]]:
    """Yield rows of about equal work: as many as first fit needs, and the next two multiples of the ranks."""
    work, ranks = sequence_work(problem, costs), problem.num_ranks
    multiple = -(-count // ranks) * ranks
    for number in dict.fromkeys((count, multiple, multiple + ranks)):
        if (even := even_rows(problem.lengths, work, row, number)) is not None:
            yield even


def rows_together(rows: int, ranks: int) -> int:
    """Return the fewest rows that may stay together on a stage: Megatron leaves over none, or as many as ranks."""
    return next(size for size in range(ranks, rows + 1) if rows % size == 0 or rows % size >= ranks)


def megatron_order(chunks: tuple[Chunk, ...], problem: Problem, own: Placement) -> Order:
    groups = slice_groups(chunks, problem.loss_groups)
    if own.num_chunks == 1:
        return seq1f1b_order(groups, problem.num_stages, problem.forward_only)
    order = one_warm_up(groups, own, rows_together(len(chunks), own.num_ranks))
    if problem.forward_only:
        return tuple(tuple(action for action in row if action.op is Op.F) for row in order)
    return order


def _enter_megatron(contest: Contest, chunks: tuple[Chunk, ...], own: Placement, in_groups: bool) -> None:
    """Judge rows without recompute, else with Megatron's kinds, groups of layers last."""
    problem, costs, order = contest.problem, contest.costs, megatron_order(chunks, contest.problem, own)
    most, tables = max(costs.num_layers), contest.tables(chunks)
    fixed = 0 if problem.forward_only else contest.options.recompute
    if fixed != "auto":
        contest.enter(Decisions(chunks, order, uniform_steps(tables, fixed)), tables)
        return
    least = bisect_left(
        range(most), True, key=lambda n: is_within(peaks_bytes(order, tables, uniform_steps(tables, n)), problem.cap_bytes)
    )
    fits = contest.enter(Decisions(chunks, order, uniform_steps(tables, least)), tables)
    predicts = any(block.kind == PREDICTION for stage in costs.stages for block in stage.blocks)  # Megatron refuses groups then
    for group in range(2, most + 1) if in_groups and not (fits or predicts) else ():
        if most % group == 0:
            decisions = UniformDecisions(chunks, order, [], group=group)
            of_groups = decisions.tables(problem, costs)
            decisions = replace(decisions, recompute_steps=uniform_steps(of_groups, most))
            if contest.enter(decisions, of_groups):
                break
    if least and MLP_AGAIN[0] in contest.options.modes(costs.recompute_modes):
        tables = tabulate(chunks, problem, costs, MLP_AGAIN)
        contest.enter(Decisions(chunks, order, uniform_steps(tables, most), MLP_AGAIN), tables)


def _enter_by_chunk(contest: Contest, chunks: tuple[Chunk, ...], order: Order) -> None:
    modes = contest.options.modes(contest.costs.recompute_modes)
    tables = tabulate(chunks, contest.problem, contest.costs, modes)
    fit = fit_recompute(order, tables, contest.problem.cap_bytes, contest.options)
    if fit.recompute_steps is None:
        contest.would_do(fit.needed_bytes)
    else:
        contest.enter(Decisions(chunks, order, fit.recompute_steps, modes), tables)


def whole_1f1b(problem: Problem, costs: Costs, options: Options) -> Decisions:
    """Whole sequences, one per chunk in batch order; recompute as the caps ask for. Raises `InfeasibleError`."""
    contest = Contest(problem, costs, options)
    require_whole(options, round_up(max(problem.lengths), problem.token_multiple))
    chunks = arranged(whole_sequences(problem.lengths), problem.loss_groups)
    order = elastic_1f1b(stand_in(chunks, problem.loss_groups), problem.num_stages, problem.forward_only)
    _enter_by_chunk(contest, chunks, order)
    return contest.result()
