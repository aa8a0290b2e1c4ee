"""Changes of one flag with which a batch would fit into memory, each tried before it is named."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron_epp.cli.inputs import cluster_of, costs_of, costs_source, flags_of, has_costs_of_stages, problem_of
from megatron_epp.cli.layout import BALANCED, EVEN, chosen_layout, pipeline_ranks
from megatron_epp.cli.lengths import limited
from megatron_epp.cli.terminal import progress
from megatron_epp.cost import PipelineCosts
from megatron_epp.mcore.arguments.parser import names_of, options_from
from megatron_epp.mcore.arguments.table import ROWS
from megatron_epp.plan.errors import EppError, InfeasibleError
from megatron_epp.plan.units import format_gib
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.problem import static_bytes
from megatron_epp.planner.search.least import is_told_by_one_order, least_cap_bytes, least_plan
from megatron_epp.planner.search.limits import Limits

type Change = dict[str, Any]
"""Settings of the table of flags, and their values."""
_MOST_REPLICAS = 64
"""Most data-parallel replicas that are tried."""
_DEVICES_PER_NODE = 8
"""Most tensor-parallel ranks that are tried where no cluster says how many devices a node has."""
_MOST_CONTEXTS = 8
"""Most contexts that are tried."""
_TRIED = ("num_stages", "tensor_parallel", "vocab_parallel", "data_parallel", "offload", "recompute", "context")
"""Settings of which one at a time is changed."""


def with_alternatives(error: InfeasibleError, args: Namespace, lengths: tuple[int, ...]) -> InfeasibleError:
    """Return the error of a batch that does not fit, with what would; as it is where memory is not the obstacle.

    Args:
        error: the planner's refusal.
        args: parsed flags of a command that plans.
        lengths: tokens of every sequence of the batch.
    """
    if not error.least_cap_bytes:
        return error
    with progress("looking for what would fit"):
        found = list(_fitting(args, lengths))
    memory_gb = None if (cluster := cluster_of(args)) is None else cluster.device_memory_gb
    beyond = memory_gb is not None and error.least_cap_bytes > memory_gb * 2**30
    names = names_of(args.parser)
    line = f"Would fit, each by itself: {', '.join(found)}."
    if not found:
        tried = ", ".join(names[setting] for setting in _TRIED if setting in names)
        line = f"No change of one of {tried} was found to do; `megatron-epp advise` tries them together."
    if beyond:
        line = f"A device of {memory_gb:g} GiB has less. {line}"
    kept = error.without(*_TRIED, *(("cap_bytes",) if beyond else ()))
    return kept.within(after=f" {line}" if kept.remedies else f"\n{line}")


def _fitting(args: Namespace, lengths: tuple[int, ...]) -> Iterator[str]:
    """Yield flags with their least value that fits, and the bytes of the fullest rank."""
    names = names_of(args.parser)
    for changes in _changes(args):
        largest = changes[-1] if changes else None
        if largest is None or not _may_fit(_changed(args, largest), lengths):
            continue
        for change in changes:
            if (needed_bytes := _needed_bytes(_changed(args, change), lengths)) is not None:
                flags = (names[setting] if value is True else f"{names[setting]} {value}" for setting, value in change.items())
                yield f"{' '.join(flags)} ({format_gib(needed_bytes)})"
                break
    if args.context is None and (context := _longest(args, lengths)):
        yield f"{names['context']} {context}"


def _changes(args: Namespace) -> Iterator[list[Change]]:
    """Yield the changes to try of every setting, from the one that helps least to the one that helps most."""
    ranks = pipeline_ranks(args)
    if args.layout in (EVEN, BALANCED) and not has_costs_of_stages(args):
        _, num_layers = costs_source(args, 1)
        yield [{"num_stages": stages} for stages in _doubled(ranks, num_layers)]
    if args.costs is None:
        cluster, tensor = cluster_of(args), flags_of(args).get("tensor_model_parallel_size") or 1
        devices = _DEVICES_PER_NODE if cluster is None else cluster.devices_per_node
        yield [{"tensor_parallel": more, "sequence_parallel": True} for more in _doubled(tensor, devices)]
    if ranks > 1 and args.vocab_parallel == "off":
        yield [{"vocab_parallel": "on"}]
    if not has_costs_of_stages(args):
        yield [{"data_parallel": replicas} for replicas in _doubled(args.data_parallel, _MOST_REPLICAS)]
    if args.recompute != "auto":
        yield [{"recompute": "auto"}]
    elif args.offload == "off":
        yield [{"offload": "on"}]


def _doubled(value: int, most: int) -> list[int]:
    found = []
    while (value := 2 * value) <= most:
        found.append(value)
    return found


def _changed(args: Namespace, change: Change) -> Namespace:
    return Namespace(**vars(args) | {ROWS[setting].short_dest: value for setting, value in change.items()})


def _planned(args: Namespace, lengths: tuple[int, ...]) -> tuple[Problem, PipelineCosts, Options]:
    layout = chosen_layout(args, [lengths]).layout
    return problem_of(args, lengths, layout.placement), costs_of(args, lengths, layout), options_from(args, planner="greedy")


def _may_fit(args: Namespace, lengths: tuple[int, ...]) -> bool:
    """Return False if no plan under the caps exists, which is quicker to know than a plan, or the flags do not go together."""
    try:
        problem, costs, options = _planned(args, lengths)
        cap = min(problem.cap_bytes)
        if max(static_bytes(problem, costs)) > cap:
            return False
        return not is_told_by_one_order(problem, options) or least_cap_bytes(problem, costs, options, cap) <= cap
    except EppError:
        return False


def _needed_bytes(args: Namespace, lengths: tuple[int, ...]) -> int | None:
    """Return the peak of the fullest rank of a plan under the caps; None if there is none."""
    if not _may_fit(args, lengths):
        return None
    problem, costs, options = _planned(args, lengths)
    try:
        made = (least_plan if is_told_by_one_order(problem, options) else plan)(problem, costs, options)
    except EppError:
        return None
    return max(made.predicted.peak_bytes)


def _longest(args: Namespace, lengths: tuple[int, ...]) -> int | None:
    """Return a context that fits, from the longest on that would for one sequence of it and the others; None if none is found.

    A shorter context makes more sequences of a document, whose messages may need more room.
    """
    problem, costs, options = _planned(args, lengths)
    if not problem.has_one_stage_per_rank or max(static_bytes(problem, costs)) > min(problem.cap_bytes):
        return None
    try:
        found = Limits(problem, lambda _: costs, options).context(sorted(lengths)[:-1])
    except EppError:
        return None
    if found.value is None or found.value >= max(lengths):
        return None
    step = max(found.step, problem.token_multiple)
    for context in range(found.value, 0, -step)[:_MOST_CONTEXTS]:
        changed = Namespace(**vars(args) | {"context": context})
        if _needed_bytes(changed, limited(lengths, changed)) is not None:
            return context
    return None
