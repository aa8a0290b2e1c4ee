"""Changes of one flag with which a batch would fit into memory, each tried before it is named, within a limit of work."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatron_epp.cli import lengths as batches
from megatron_epp.cli.layout_flag import BALANCED, EVEN, chosen_layout, pipeline_ranks, without_search
from megatron_epp.cli.planning_flags import cluster_of, costs_of, costs_source, flags_of, has_costs_of_stages, problem_of
from megatron_epp.cli.terminal import progress
from megatron_epp.cost import PipelineCosts
from megatron_epp.formulas.library import DEVICES_PER_NODE
from megatron_epp.mcore.arguments.parser import names_of, offloads, options_from
from megatron_epp.mcore.arguments.table import ROWS
from megatron_epp.plan.errors import EppError, InfeasibleError, Names
from megatron_epp.plan.units import format_gib
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.least import one_order_decides, proof_of
from megatron_epp.planner.validation import static_bytes
from megatron_epp.planner.work_limit import WorkSpentError, limited

type Change = dict[str, Any]
"""Settings of the table of flags, and their values."""
_MOST_REPLICAS = 64
"""Most data-parallel replicas that are tried."""
_MOST_CONTEXTS = 8
"""Most contexts that are tried."""
_TRIED = ("num_stages", "tensor_parallel", "vocab_parallel", "data_parallel", "offload", "recompute", "context")
"""Settings of which one at a time is changed."""
MOST_WORK = 150_000
"""Steps of work of the search for what would fit, about a second of it; plans of large batches take more each."""


def kept_remedies(error: InfeasibleError, args: Namespace) -> InfeasibleError:
    """Return the refusal with the remedies that `alternatives` does not try; unchanged if memory is not the obstacle."""
    if not error.least_cap_bytes:
        return error
    return error.without_remedies(*_TRIED, *(() if _smaller_device(error, args) is None else ("cap_bytes",)))


def alternatives(error: InfeasibleError, args: Namespace, lengths: tuple[int, ...]) -> str:
    """Say which changes of one flag would fit, and which were not tried; empty if memory is not the obstacle.

    Args:
        error, args: as in `kept_remedies`.
        lengths: tokens of every sequence of the batch.
    """
    if not error.least_cap_bytes:
        return ""
    search, names = _Search(Namespace(**vars(args) | without_search(args)), lengths), names_of(args.parser)
    with progress("looking for what would fit"):
        search.run()
    fitting, late = list(search.fitting.values()), [names[setting] for setting in search.late]
    line = f"Would fit, each by itself: {', '.join(fitting)}."
    if not fitting:
        tried = ", ".join(names[setting] for setting in search.tried) or "its flags"
        line = f"No change of one of {tried} was found to do; `megatron-epp advise` tries them together."
    if late:
        line += f" Not tried, since plans of this batch take long: {', '.join(late)}."
    memory_gb = _smaller_device(error, args)
    return line if memory_gb is None else f"A device of {memory_gb:g} GiB has less. {line}"


def _smaller_device(error: InfeasibleError, args: Namespace) -> float | None:
    """Return the memory of the cluster's devices, in GiB, if the smallest sufficient cap is more."""
    memory_gb = None if (cluster := cluster_of(args)) is None else cluster.device_memory_gb
    return memory_gb if memory_gb is not None and error.least_cap_bytes > memory_gb * 2**30 else None


class _Search:
    """Search for changes of one flag with which a batch fits, within `MOST_WORK`.

    All are tried without offload first, which is quick. A value that fits without offload fits with it too, and with offload a
    smaller value may suffice.

    Attributes:
        args: parsed flags of a command that plans.
        lengths: tokens of every sequence of the batch.
        fitting: flag, least value that is known to fit, and bytes of the fullest rank, of each setting.
        tried: settings of which all values were tried.
        late: settings of which no value is known to fit, and not all were tried.
    """

    def __init__(self, args: Namespace, lengths: tuple[int, ...]) -> None:
        self.args, self.lengths = args, lengths
        self.fitting: dict[str, str] = {}
        self.tried: list[str] = []
        self.late: list[str] = []

    def run(self) -> None:
        """Search, and fill `fitting` and `late`."""
        tries = {next(iter(changes[0])): changes for changes in _changes(self.args, max(self.lengths)) if changes}
        self.late = list(tries)
        with suppress(WorkSpentError), limited(MOST_WORK):
            for setting in filter("offload".__ne__, tries):
                self._try(setting, tries[setting], offload=False)
                if not offloads(self.args):
                    self.late.remove(setting)
            for setting in sorted(self.late, key=self.fitting.__contains__):  # settings without a value that fits come first
                self._try(setting, tries[setting], offload=True)
                self.late.remove(setting)
        self.tried = [setting for setting in tries if setting not in self.late]
        self.fitting = {setting: self.fitting[setting] for setting in tries if setting in self.fitting}
        self.late = [setting for setting in self.late if setting not in self.fitting]

    def _try(self, setting: str, changes: list[Change], *, offload: bool) -> None:
        """Find the least change of a setting with which the batch fits, without offload or with it."""
        flags = [_flags(change, names_of(self.args.parser)) for change in changes]
        known = self.fitting.get(setting, "").partition(" (")[0]
        most = flags.index(known) if known else len(flags)
        if most == 0 or (not known and _peak_bytes(_changed(self.args, changes[-1]), self.lengths, offload) is None):
            return
        for change, named in zip(changes[:most], flags[:most], strict=True):
            if (peak_bytes := _peak_bytes(_changed(self.args, change), self.lengths, offload)) is not None:
                self.fitting[setting] = f"{named} ({format_gib(peak_bytes)})"
                return


def _peak_bytes(args: Namespace, lengths: tuple[int, ...], offload: bool) -> int | None:
    """Return the peak of the fullest rank of a plan under the caps; None if none is found, or flags do not go together."""
    try:
        problem, costs, options = _planned(args, batches.limited(lengths, args))
        if max(static_bytes(problem, costs)) > min(problem.cap_bytes):
            return None
        options = replace(options, offload=offload)
        if one_order_decides(problem, options):
            proof = proof_of(problem, costs, options)
            return None if proof is None else proof.peak_bytes
        return max(plan(problem, costs, options).predicted.peak_bytes)
    except EppError:
        return None


def _changes(args: Namespace, longest: int) -> Iterator[list[Change]]:
    """Yield the changes to try of every setting, from the one that helps least to the one that helps most."""
    ranks = pipeline_ranks(args)
    if args.layout in (None, EVEN, BALANCED) and not has_costs_of_stages(args):
        _, num_layers = costs_source(args, 1)
        yield [{"num_stages": stages} for stages in _doubled(ranks, num_layers)]
        if ranks > 1 and args.layout != EVEN:  # balanced ones take equally long, and the first stages hold more
            yield [{"layout": EVEN}]
    if args.costs is None:
        cluster, tensor = cluster_of(args), flags_of(args).get("tensor_model_parallel_size") or 1
        devices = DEVICES_PER_NODE if cluster is None else cluster.devices_per_node
        yield [{"tensor_parallel": more, "sequence_parallel": True} for more in _doubled(tensor, devices)]
    if ranks > 1 and args.vocab_parallel == "off":
        yield [{"vocab_parallel": "on"}]
    if not has_costs_of_stages(args):
        yield [{"data_parallel": replicas} for replicas in _doubled(args.data_parallel, _MOST_REPLICAS)]
    if args.recompute != "auto":
        yield [{"recompute": "auto"}]
    elif not offloads(args):
        yield [{"offload": "on"}]
    if args.context is None:
        yield [{"context": longest >> times} for times in range(1, _MOST_CONTEXTS + 1) if longest >> times]


def _flags(change: Change, names: Names) -> str:
    return " ".join(names[setting] if value is True else f"{names[setting]} {value}" for setting, value in change.items())


def _doubled(value: int, most: int) -> list[int]:
    doubled = []
    while (value := 2 * value) <= most:
        doubled.append(value)
    return doubled


def _changed(args: Namespace, change: Change) -> Namespace:
    return Namespace(**vars(args) | {ROWS[setting].short_dest: value for setting, value in change.items()})


def _planned(args: Namespace, lengths: tuple[int, ...]) -> tuple[Problem, PipelineCosts, Options]:
    layout = chosen_layout(args, [lengths]).layout
    return problem_of(args, lengths, layout.placement), costs_of(args, lengths, layout), options_from(args, planner="greedy")
