"""Costs of the model to be trained: memory is measured on the model; times come from formulas or a file."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_epp.cost.blocks import HEAD, INPUT, LAYER, PREDICTION, StageCosts
from megatron_epp.cost.casts import casts_of
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.optimizer import Parameters
from megatron_epp.cost.work import LinearTime
from megatron_epp.mcore.arguments.layout import LAYOUT_FLAG, vocabulary_shares
from megatron_epp.mcore.arguments.table import names_of
from megatron_epp.mcore.costs import stored as stored_costs
from megatron_epp.mcore.costs.megatron_facts import FORMULAS, Ask, costs_file, optimizer_bytes, run_facts, trained_share
from megatron_epp.mcore.costs.memory_probe import measure_bytes, message_bytes, run_other_size
from megatron_epp.mcore.model.stage import CASTS, MegatronStage, Snapshot
from megatron_epp.plan.errors import Names, as_setting
from megatron_epp.plan.sizing import MOST_ROUNDED_SLICES, sums_in_fp32
from megatron_epp.port.run_facts import AttentionSizes
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.links.objects import from_each_of_job, made_by_first

logger = logging.getLogger(__name__)

type Step = Literal[
    "reading costs",
    "counting layers",
    "measuring bytes",
    "warming up layers",
    "measuring what can go to the host",
    "exchanging costs",
    "looking for learnt costs",
    "exchanging memory caps",
]
"""A step in settling costs and caps, in which a rank may hold up all others. Runs skip some."""


def pipeline_costs(
    args: argparse.Namespace,
    stages: Mapping[int, MegatronStage],
    links: Links,
    ask: Ask,
    measured: Callable[[PipelineCosts], PipelineCosts],
    note: Callable[[Step], None] = lambda step: None,
) -> PipelineCosts:
    """Return the costs of the whole pipeline, the same on every rank of the run, since replicas divide batches by them.

    Bytes are always measured, by counting what autograd keeps in a forward of a small chunk: they do not vary, and a profile
    may be of another precision. Times come from formulas or from the profile that `--epp-costs` names. A file with costs of a
    whole pipeline is used unchanged, but for the numbers of heads and the precision of sums of keys' and values' gradients; one
    of another precision is refused. `measured` adds what features measure, and `note` is called ahead of each step.
    """
    note("reading costs")
    source = stored_costs.named(args, ask)
    token_bytes = message_bytes(next(iter(stages.values())))
    note("counting layers")
    mine = {number: (stage.num_layers, stage.depths > 0, trained_share(stage)) for number, stage in stages.items()}
    layers, predicts, trained = zip(*by_stage(mine, links), strict=True)
    facts = cache(partial(run_facts, args, ask))  # asked for on the first rank alone
    sizes: AttentionSizes = made_by_first(lambda: ask(f"{FORMULAS}:attention_sizes", facts()))
    if source is not None:
        share = source.fragmentation_share if args.epp_fragmentation_share is None else args.epp_fragmentation_share
        stored_costs.check_costs(args, source, [*zip(layers, predicts, strict=True)], token_bytes)
        split = tuple(_with_heads(stage, sizes, **_sums(args, sizes, stage)) for stage in source.stages)
        return replace(source, stages=split, fragmentation_share=share)
    _tell_frozen(args, trained)
    shares = vocabulary_shares(args)
    by_formula, product = made_by_first(lambda: ask(f"{FORMULAS}:prior", facts(), costs_file(args), layers, trained, shares))
    base = _with_bytes(by_formula, token_bytes, names_of(args))
    with _undisturbed(stages.values()):
        note("measuring bytes")
        bytes_of = _with_largest_workspaces(
            {number: _measured_bytes(args, sizes, stage, base.stages[number], product) for number, stage in stages.items()}
        )
        if args.epp_warm_up == "on" or (args.epp_warm_up == "auto" and torch.cuda.is_initialized()):
            note("warming up layers")
            for stage in stages.values():
                run_other_size(stage)
        if torch.cuda.is_initialized():
            more = placeholder_bytes(args, stages.values()) // len(stages)  # in equal parts, so that equal stages stay equal
            for number, own in bytes_of.items():
                bytes_of[number] = replace(own, static=replace(own.static, buffers=own.static.buffers + more))
        costs = measured(replace(base, stages=by_stage(bytes_of, links)))
    note("exchanging costs")
    return made_by_first(lambda: ask(f"{FORMULAS}:with_device_memory", facts(), costs))


def _tell_frozen(args: argparse.Namespace, trained: Sequence[float | None]) -> None:
    """Warn of layers that were chosen as if everything trained, before there was a model of which parts are frozen."""
    chosen = getattr(args, "epp_chosen_layout", None)
    if chosen and args.epp_trained_parameters is None and set(trained) != {1.0} and args.rank == 0:
        logger.warning(
            "%s %s chose the layers of stages as if all parameters trained, and some are frozen: give %s how many train",
            *(LAYOUT_FLAG, chosen, names_of(args)["trained_parameters"]),
        )


def _measured_bytes(
    args: argparse.Namespace, sizes: AttentionSizes, stage: MegatronStage, base: StageCosts, product: LinearTime
) -> StageCosts:
    blocks = stage.block_loss
    base = _with_workspace(base, 0) if blocks is None else _by_blocks(base, product, blocks.workspace_bytes)
    measured = measure_bytes(stage, base) if stage.has_gradient else base.without_backward()
    if stage.is_last and not stage.has_loss:  # its output is there until the backward, and autograd does not keep it
        (received, *_) = measured.ends
        measured = measured.changed(INPUT, bytes_per_token=received.bytes_per_token + message_bytes(stage))
    return replace(_with_heads(measured, sizes), static=_static(args, stage))


def _with_heads(costs: StageCosts, sizes: AttentionSizes, **changes: Any) -> StageCosts:
    """Set this rank's numbers of heads in attention, which determine how much of a prefix's gradient is computed at once."""
    changes |= {"heads": sizes.kv_heads_on_rank, "queries_per_key": sizes.queries_per_key}
    changes |= {"expanded_heads": sizes.expanded_heads, "expanded_bytes_per_token": sizes.expanded_bytes_per_token}
    return costs.changed(LAYER, PREDICTION, kv=replace(costs.kv, **changes))


def _with_workspace(costs: StageCosts, num_bytes: int) -> StageCosts:
    return costs.changed(INPUT, workspace_bytes=0).changed(HEAD, workspace_bytes=num_bytes)


def _sums(args: argparse.Namespace, sizes: AttentionSizes, costs: StageCosts) -> dict[str, Any]:
    """Return the bytes per token of a layer's key and value gradients, for sequences with few and with many slices."""
    narrow = costs.kv.bytes_per_token
    wide = narrow * torch.float32.itemsize / sizes.bytes_per_value
    few, many = (
        wide if sums_in_fp32(args.epp_fp32_kv_gradients, count) else narrow
        for count in (MOST_ROUNDED_SLICES, MOST_ROUNDED_SLICES + 1)
    )
    return {"gradient_bytes_per_token": few, "many_gradient_bytes_per_token": many}


def _with_largest_workspaces(stages: dict[int, StageCosts]) -> dict[int, StageCosts]:
    """Replace every stage's workspace bytes by the largest on any rank of the job. A collective call of all ranks.

    Plans are made for all replicas, and a rank on which the loss kernel is missing or fails needs more workspace.
    """
    of_ranks = from_each_of_job({number: costs.workspace_bytes for number, costs in stages.items()})
    return {
        number: _with_workspace(costs, max(sizes[number] for sizes in of_ranks if number in sizes))
        for number, costs in stages.items()
    }


def _by_blocks(costs: StageCosts, product: LinearTime, workspace_bytes: int) -> StageCosts:
    """Return the costs of a last stage that computes its loss by blocks.

    Its backward has one more matrix product (`product`), which takes as long as that for the gradient of a weight that trains,
    and its weight gradient cannot be split off. Times of a profile that assumes blocks already stay as they are.
    """
    layer, inner, ends = costs.lines("backward")
    costs = costs.changed(INPUT, HEAD, weight=LinearTime()).with_lines("backward", layer, inner, ends + product)
    return _with_workspace(costs, workspace_bytes)


def _with_bytes(costs: PipelineCosts, token_bytes: float, names: Names) -> PipelineCosts:
    """Set a profile's bytes of a message per token to this run's, with a warning if they differ."""
    if not math.isclose(costs.hidden_bytes_per_token, token_bytes) and dist.get_rank() == 0:
        logger.warning(
            "profile %s has %s: bytes are measured on the model, but times are the profile's (or %s)",
            costs.name,
            stored_costs.other_bytes(costs, token_bytes),
            as_setting(names["costs"], "learn"),
        )
    return replace(costs, hidden_bytes_per_token=token_bytes)


def by_stage[T](local: dict[int, T], links: Links) -> tuple[T, ...]:
    """Gather one value per stage of the pipeline from all ranks, in the order of stages."""
    values_of_stages = {number: value for values in gathered(local, links) for number, value in values.items()}
    return tuple(values_of_stages[number] for number in sorted(values_of_stages))


def gathered[T](local: T, links: Links, choose: Callable[[list[T]], T] = itemgetter(0)) -> list[T]:
    """Gather one value per pipeline rank, in pipeline order; `choose` picks among ranks that share layers (the first)."""
    values: dict[int, list[T]] = {}
    for position, _, value in sorted(links.control.from_each((links.position, dist.get_rank(), local)), key=itemgetter(0, 1)):
        values.setdefault(position, []).append(value)
    return [choose(values[i]) for i in range(len(links.ranks))]


def _static(args: argparse.Namespace, stage: MegatronStage) -> Static:
    optimizer = optimizer_bytes(args)
    weights = [*stage.model.parameters()]
    static = optimizer.static(_parameters_of(weights), _parameters_of(weight for weight in weights if weight.requires_grad))
    buffers = new_gradient_bytes(args, stage) if torch.cuda.is_initialized() else 0
    copied = sum(table.numel() for table in stage.more_weights)  # whose gradients are in fp32
    copies = sum(table.numel() for table in stage.more_weights if table.requires_grad) * torch.float32.itemsize
    held = static.weights + int(copied * optimizer.weight) + _cast_bytes(args, stage)
    return replace(static, weights=held, gradients=static.gradients + copies, buffers=buffers)


def _parameters_of(weights: Iterable[torch.nn.Parameter]) -> Parameters:
    """Count parameters by the way in which ranks share the optimizer's states of them."""
    counts, largest = dict.fromkeys(("matrices", "experts", "others"), 0), {"matrices": 0, "others": 0}
    for weight in weights:
        is_matrix = weight.dim() == 2 and not getattr(weight, "is_embedding_or_output_parameter", False)
        is_shared = getattr(weight, "allreduce", True)  # not so where expert-parallel ranks have experts of their own
        kind = "matrices" if is_matrix else "others"
        counts[kind if is_shared else "experts"] += weight.numel()
        largest[kind] = max(largest[kind], weight.numel())
    return Parameters(**counts, largest=largest["matrices"], largest_other=largest["others"])


def _cast_bytes(args: argparse.Namespace, stage: MegatronStage) -> int:
    """Bytes of the casts of matrices to FP8 that Transformer Engine's layers keep."""
    if (casts := casts_of(vars(args))) is None:
        return 0
    modules = (module for module in stage.decoder.modules() if hasattr(module, CASTS))
    weights = (weight for module in modules for weight in module.parameters(recurse=False) if weight.dim() == 2)
    return int(casts.weight_bytes * sum(weight.numel() for weight in weights))


def new_gradient_bytes(args: argparse.Namespace, stage: MegatronStage) -> int:
    """Bytes of gradients that autograd creates, a module's at once, before they are added up. Fused layers create none."""
    inside = {id(weight) for weight in stage.decoder.parameters()} if args.gradient_accumulation_fusion else set()
    created = (
        sum(weight.nbytes for weight in module.parameters(recurse=False) if weight.requires_grad and id(weight) not in inside)
        for module in stage.model.modules()
    )
    return max(created, default=0)


def placeholder_bytes(args: argparse.Namespace, stages: Iterable[MegatronStage]) -> int:
    """Bytes of what a rank's fused layers give to autograd as gradients: one of every shape (`get_dummy_wgrad`)."""
    fused = [stage for stage in stages if args.gradient_accumulation_fusion]
    weights = (weight for stage in fused for weight in stage.decoder.parameters() if weight.requires_grad)
    return sum({weight.shape: weight.nbytes for weight in weights if weight.dim() == 2}.values())


@contextmanager
def _undisturbed(stages: Iterable[MegatronStage]) -> Iterator[None]:
    """Return a context that restores random states, gradients, buffers and the routers' counts on exit."""
    models: list[Any] = [stage.model for stage in stages]
    before = Snapshot(models)
    with torch.enable_grad(), ExitStack() as held:
        # Otherwise hooks of data parallelism would count these backwards as the first iteration's, whose number of gradients
        # per parameter starts the reductions of all later ones.
        for model in models:
            if hasattr(model, "no_sync"):
                held.enter_context(model.no_sync())
        yield
    before.restore()
