"""Routers of experts see the tokens of a chunk without its padding, and replay its routes.

Chunks are padded to a multiple of the ranks that share them. Megatron's routers leave that padding out of all that they add up
or count over tokens: auxiliary and z losses, tokens per expert, capacity, Sinkhorn's balance; losses count as on one rank.
Megatron's own `padding_mask` multiplies each rank's part of a loss by that rank's number of tokens, and before 0.19 by no
number of ranks. Outside of chunks, as for a script's own microbatches, routers are Megatron's.

Where samples have routes, routers take these experts in the way of Megatron's own replay, with probabilities of their own, and
in a recomputed forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_epp.mcore import releases
from megatron_epp.mcore.patches.running_chunk import chunk, running
from megatron_epp.runtime.attention.segments import SegmentTable

if TYPE_CHECKING:
    from megatron_epp.mcore.model.replayed_routes import ChunkRoutes

_METHODS = "routing", "apply_z_loss", "_apply_expert_bias", "sinkhorn_load_balancing"
"""Methods of Megatron's `TopKRouter` that are replaced below: others would count the padding of chunks."""


@dataclass(frozen=True, slots=True)
class RealTokens:
    """Numbers of a chunk's tokens without padding, which is at its end: on all ranks, and on this one; `rows` with it."""

    total: int
    on_rank: int
    rows: int

    @staticmethod
    def of(table: SegmentTable, config: Any) -> RealTokens:
        """Count the tokens of a chunk on this rank, for a model's `TransformerConfig`. Ranks have its tokens in order."""
        from megatron.core import mpu  # not at the top: on a CPU, its compilation is switched off before it is imported

        index, ranks = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        if config.sequence_parallel:
            parts = mpu.get_tensor_model_parallel_world_size()
            index, ranks = index * parts + mpu.get_tensor_model_parallel_rank(), ranks * parts
        rows = table.num_tokens // ranks
        return RealTokens(table.num_real, min(max(table.num_real - index * rows, 0), rows), rows)


@contextmanager
def chunk_of(table: SegmentTable, config: Any, routes: ChunkRoutes | None = None) -> Iterator[None]:
    """Return a context in which a model with this `TransformerConfig` runs the chunk of a table, and replays its routes."""
    with chunk(RealTokens.of(table, config), routes):
        yield
    if routes is not None:
        routes.check()


def need_routing(model: torch.nn.Module) -> None:
    """Tell that every router of a model, some of whose chunks are padded, needs the replaced methods."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_epp.mcore.model.replaced import ALL, mark

    for module in model.modules():
        if isinstance(router := getattr(module, "router", None), torch.nn.Module):
            mark(router, ALL, **{name: vars(TopKRouter)[name] for name in _METHODS})


# ---- in the place of Megatron's functions, while a chunk runs ----------------------------------------------------------


def route(original: Callable[..., Any], router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
    """Tell a router which tokens of a chunk are padding, and remember the layer of which it is."""
    real: RealTokens = running.real
    if running.routes is not None:
        running.layer = -1 if router.is_mtp_layer else router.layer_number - 1
    if real.total < real.rows * router.tp_cp_group.size():
        # On all ranks of the chunk, since their collectives depend on it.
        padding_mask = (torch.arange(real.rows, device=logits.device) >= real.on_rank).unsqueeze(1)
    return original(router, logits, padding_mask=padding_mask)


def replay(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Have a router take the experts that a chunk brings along."""
    routes = running.routes
    return original(*rest, **named) if routes is None else routes.replay(running.layer, original, *rest, **named)


def count_tokens(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Weight a router's loss by the number of the chunk's tokens without padding."""
    per_expert, *_ = original(*rest, **named)
    real: RealTokens = running.real
    ranks = releases.bound(original, *rest, **named).arguments["reduce_group"].size()
    # Megatron multiplies the loss by the second (with per-token losses), and divides by the third.
    return per_expert, releases.router_loss_tokens(real.total, ranks), real.total


def apply_z_loss(original: Callable[..., Any], router: Any, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
    """Add up a router's z loss over the chunk's tokens without padding."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    # Under the same conditions as Megatron: without gradients, as in the first run of a recomputed layer, nothing is added.
    real, coefficient = running.real, router.config.moe_z_loss_coeff
    if coefficient is None or not router.training or not torch.is_grad_enabled():
        return original(router, logits, padding_mask=padding_mask)
    squares = torch.logsumexp(logits, dim=-1).square()
    loss = (squares if padding_mask is None else squares.masked_fill(padding_mask, 0)).sum()
    # As Megatron logs it: layers of multi-token prediction behind the others, and one that runs for all depths once in all.
    num_layers, depths, is_ahead = router.config.num_layers, router.config.mtp_num_layers or 0, router.is_mtp_layer
    logged = loss / real.total / (depths if is_ahead and router.config.mtp_use_repeated_layer else 1)
    number = router.layer_number + num_layers * is_ahead
    get_moe_metrics_tracker().record("z_loss", logged, number, num_layers + depths, reduce_group=router.tp_cp_group)
    return MoEAuxLossAutoScaler.apply(logits, coefficient * loss)


def count_for_bias(original: Callable[..., Any], router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> Any:
    """Count tokens per expert without padding."""
    if padding_mask is None:
        return original(router, routing_map, padding_mask=padding_mask)
    # In 0.18 and 0.19 the original combines [tokens, experts] with [tokens], which torch does not broadcast.
    return original(router, routing_map & ~padding_mask.unsqueeze(1))


def balance(original: Callable[..., Any], router: Any, logits: Tensor) -> Any:
    """Balance tokens over experts (Sinkhorn) without padding."""
    real: RealTokens = running.real
    if real.on_rank in (0, real.rows):
        return original(router, logits)
    # Padding by itself: it needs routes, too, but its logits must not change the balance of the tokens.
    parts = (original(router, part) for part in (logits[: real.on_rank], logits[real.on_rank :]))
    scores, routing_maps = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(routing_maps)


def drop_tokens(original: Callable[..., Any], probs: Tensor, routing_map: Tensor, *rest: Any, **named: Any) -> Any:
    """Give experts a capacity for tokens without padding, which goes to none of them."""
    real: RealTokens = running.real
    if real.on_rank == real.rows:
        return original(probs, routing_map, *rest, **named)
    routes = probs[: real.on_rank], routing_map[: real.on_rank]
    if real.on_rank:
        routes = original(*routes, *rest, **named)
    rest_of = probs[real.on_rank :].detach(), routing_map[real.on_rank :]
    return tuple(torch.cat([own, torch.zeros_like(padding)]) for own, padding in zip(routes, rest_of, strict=True))
