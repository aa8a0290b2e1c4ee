"""Routers that replay the experts which samples bring along: where a model has routers, and the routes of a chunk."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_epp.data.routes import Routing
from megatron_epp.mcore import releases
from megatron_epp.mcore.arguments.rule import Door
from megatron_epp.mcore.model.kinds import EXPERTS
from megatron_epp.plan import EppError
from megatron_epp.plan.layer_flags import by_layer, pattern_of


@dataclass(frozen=True, slots=True)
class ChunkRoutes:
    """Routes of a chunk by number of layer, from 0: int16 ``[experts per token, rows]``, this rank's rows with padding."""

    of_layers: Mapping[int, Tensor]
    replayed: set[int] = field(default_factory=set)

    def replay(self, layer: int, original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        """Run Megatron's choice of experts by scores for the router of a layer, which takes those of the chunk instead."""
        if layer not in self.of_layers:  # of multi-token prediction
            return original(*rest, **named)

        def take(scores: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            self.replayed.add(layer)
            experts = self.of_layers[layer].T.long()
            return scores.gather(1, experts), experts

        call = releases.bound(original, *rest, **named)
        # Megatron calls this function of its `RouterReplay`. Fused routing would not.
        call.arguments |= {"router_replay": SimpleNamespace(get_replay_topk=take), "fused": False}
        return original(*call.args, **call.kwargs)

    def check(self) -> None:
        """Raise `EppError` if a router has chosen by itself."""
        if left := sorted(self.of_layers.keys() - self.replayed):
            raise EppError(
                f"the router of layer {left[0]}, counted from 0, has not replayed the routes of samples: its functions are not "
                "Megatron's"
            )


def routed_layers(block: torch.nn.Module) -> tuple[int, ...]:
    """Return the numbers, from 0, of the layers of a model's block that have a router."""
    routers: list[Any] = [getattr(module, "router", None) for module in block.modules()]
    return tuple(sorted({router.layer_number - 1 for router in routers if hasattr(router, "routing")}))


def acting_replay(block: torch.nn.Module) -> str:
    """Return why Megatron's own replay of routes cannot act in slices, if a program has told it to; empty if it has not."""
    for name, module in block.named_modules():
        if getattr(getattr(module, "router_replay", None), "router_replay_action", None) is not None:
            return (
                f"{name}.router_replay would record or hand out routes in the order in which chunks run: clear its action, and "
                "give samples a column routes"
            )
    return ""


def routing_of(settings: Any, layers: Iterable[int], door: Door = Door.SLICED_MODEL) -> Routing | None:
    """Return how layers with these numbers route, by flags or a model's configuration; None if there are none."""
    if not (numbers := tuple(sorted({*layers}))):
        return None
    balancing, obstacle = "moe_router_load_balancing_type", ""
    if getattr(settings, balancing) == "sinkhorn":
        obstacle = f"routers choose by themselves with {door.with_value(balancing, 'sinkhorn')}: leave one of them out"
    experts: int = settings.num_experts if door.has_flags else settings.num_moe_experts
    return Routing(experts, settings.moe_router_topk, numbers, settings.num_layers, obstacle)


def routing_by_flags(args: argparse.Namespace) -> Routing | None:
    """Return how the model of Megatron's flags routes; None without experts."""
    if not args.num_experts:
        return None
    routed = [symbol == EXPERTS for symbol in pattern_of(vars(args))] or by_layer(args.moe_layer_freq or 1, args.num_layers)
    return routing_of(args, (layer for layer, has_experts in enumerate(routed) if has_experts), Door.DOCUMENTS)
