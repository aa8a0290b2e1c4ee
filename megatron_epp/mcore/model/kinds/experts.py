"""Experts, in a layer with attention or as a layer of a hybrid model.

Tokens do not meet there, but ranks do: plans of replicas that share experts run in lockstep. Routers see no padding
(`patches.routers`). Where tokens were sent, the flex dispatcher keeps with the graph, so several chunks may be in flight.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.model.kinds import flex_backend
from megatron_epp.mcore.releases import pads_uneven_exchanges
from megatron_epp.plan.planners import begins_with_greedy

if TYPE_CHECKING:
    import torch

_BALANCING = frozenset(("aux_loss", "seq_aux_loss", "sinkhorn", "none"))
"""Load-balancing types that look at one chunk at a time; any other would need replicas that run their chunks in lockstep."""


def problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield why a model with experts cannot be trained as asked."""
    ranks = args.expert_model_parallel_size
    if not args.num_experts:
        yield f"--expert-model-parallel-size {ranks} is for a model with --num-experts: leave it out"
        return
    if args.num_experts % ranks != 0:
        yield (
            f"--num-experts {args.num_experts} cannot be shared evenly by --expert-model-parallel-size {ranks}: make it a "
            f"multiple of {ranks}"
        )
    if ranks > 1:
        yield from _of_lockstep(args, ranks)
    yield from chunk_problems(args, Door.DOCUMENTS)
    sharing = getattr(args, "expert_tensor_parallel_size", None) or args.tensor_model_parallel_size
    if flex_backend(args) == "deepep" and ranks * sharing == 1:
        yield "--moe-token-dispatcher-type flex by deepep needs several ranks, and all experts are on each: use alltoall"
    if flex_backend(args) == "hybridep" and args.moe_pad_expert_input_to_capacity:
        yield (
            "--moe-pad-expert-input-to-capacity counts the tokens with which --moe-flex-dispatcher-backend hybridep has chunks "
            "padded: leave it out"
        )
    if args.moe_pad_expert_input_to_capacity and (padding := _padding_by(args)):
        yield (
            f"--moe-pad-expert-input-to-capacity counts all tokens of a chunk, and its padding, which {padding} needs, goes to "
            "no expert: leave it out"
        )


def router_problems(settings: Any, door: Door, average: str) -> Iterator[str]:
    """Yield why the gradients of routers' own losses would not be divided as those of a loss are, by its `Average`."""
    balancing, coefficients = getattr(settings, "moe_router_load_balancing_type", None), ["moe_z_loss_coeff"]
    if balancing not in ("none", ["none"]):
        coefficients.insert(0, "moe_aux_loss_coeff")
    values = {name: getattr(settings, name, None) for name in coefficients}
    nonzero = [name for name, value in values.items() if any(value if isinstance(value, list | tuple) else [value])]
    if not nonzero:
        return
    without = " and ".join(door.with_value(name, 0) for name in nonzero)
    if not door.has_flags and not settings.calculate_per_token_loss:  # flags imply it
        yield f"losses of routers are divided by microbatches: give {without}, or calculate_per_token_loss=True"
    elif average != "tokens":
        yield f"losses of routers are divided by tokens, the loss by {average}: give {without}, or a loss with Average.TOKENS"


def chunk_problems(settings: Any, door: Door) -> Iterator[str]:
    """Yield why experts cannot have chunks, of which ranks have unequal numbers of tokens, by flags or a configuration."""
    yield from _flex_problems(settings, door)
    if (ranks := settings.expert_model_parallel_size) > 1:
        sharing = door.with_value("expert_model_parallel_size", ranks)
        equal = f"needs equally many tokens on all of {sharing} ranks, and chunks differ"
        if settings.moe_token_dispatcher_type == "allgather":
            yield f"{door.with_value('moe_token_dispatcher_type', 'allgather')} {equal}: use alltoall"
        if settings.moe_pad_expert_input_to_capacity:
            yield f"{door.name_of('moe_pad_expert_input_to_capacity')} {equal}: leave it out"
    balancing = settings.moe_router_load_balancing_type
    if refused := sorted({balancing} - _BALANCING if isinstance(balancing, str) else {*balancing} - _BALANCING):
        types = door.with_value("moe_router_load_balancing_type", " ".join(refused))
        yield f"{door.cannot} {types}; there are {', '.join(sorted(_BALANCING))}"


def _flex_problems(settings: Any, door: Door) -> Iterator[str]:
    """Yield why the flex dispatcher cannot exchange the tokens of chunks."""
    backend = flex_backend(settings)
    refused = door.with_value("moe_flex_dispatcher_backend", backend)
    if backend not in ("", "deepep", "hybridep"):
        refused = f"{door.with_value('moe_token_dispatcher_type', 'flex')} with {refused}"
        yield f"{refused} has buffers for a fixed number of tokens, and chunks differ: use deepep or hybridep"
    if backend == "hybridep" and not pads_uneven_exchanges(settings):
        yield (
            f"{refused} needs equally many tokens on all ranks that share experts, chunks differ, and this Megatron does not "
            "pad them there, as 0.19 does: use deepep"
        )
    if backend == "hybridep" and getattr(settings, "moe_expert_rank_capacity_factor", None) is not None:
        factor = door.with_value("moe_expert_rank_capacity_factor", settings.moe_expert_rank_capacity_factor)
        yield f"{factor} drops tokens by the size of the largest chunk of all ranks: leave it out"


def adopt(model: torch.nn.Module, args: argparse.Namespace) -> None:
    """Have Megatron pad what a layer gives to HybridEP to the largest chunk of all ranks that share experts."""
    for module in model.modules():
        config: Any = getattr(getattr(module, "token_dispatcher", None), "config", None)
        if flex_backend(config) == "hybridep":
            config.moe_hybridep_pad_uneven_dispatch_inputs = True


def _padding_by(args: argparse.Namespace) -> str:
    """Return the flag with which chunks have padding; empty if there is none."""
    if args.context_parallel_size > 1:
        return f"--context-parallel-size {args.context_parallel_size}"
    if args.sequence_parallel and args.tensor_model_parallel_size > 1:
        return "--sequence-parallel"
    return f"--epp-schedule {args.epp_schedule}" if args.epp_schedule in ("padded", "packed") else ""


def _of_lockstep(args: argparse.Namespace, ranks: int) -> Iterator[str]:
    """Yield which schedules cannot run replicas that share experts in lockstep."""
    if args.epp_schedule == "packed":
        yield (
            f"--epp-schedule packed gives replicas unequal numbers of microbatches, which --expert-model-parallel-size {ranks} "
            "cannot run: use padded"
        )
    if args.epp_schedule == "elastic" and not begins_with_greedy(args.epp_planner):
        yield f"with --expert-model-parallel-size {ranks} replicas are planned together, which only --epp-planner greedy does"
