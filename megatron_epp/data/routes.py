"""Experts that a rollout chose for tokens: a column of samples, which routers replay, and the part of it that a chunk has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megatron_epp.plan.errors import EppError

if TYPE_CHECKING:
    from megatron_epp.plan.chunk import Segment

ROUTES = "routes"  # key of a sample with its routes


class Routing(NamedTuple):
    """Experts of a model, or of a rank's part of it."""

    experts: int
    per_token: int  # how many of the `experts` of a layer a token passes (top-k)
    # numbers, from 0, of the layers that have experts; of a rank's stages alone where a rank reads routes
    layers: tuple[int, ...]
    num_layers: int  # of the whole model
    obstacle: str = ""  # why its routers cannot replay; empty if they can


def read_routes(
    record: Mapping[str, Any], what: str, num_tokens: int, num_inputs: int, routing: Routing | None
) -> dict[int, np.ndarray]:
    """Return the routes of a sample, int16 ``[inputs, per_token]`` by number of layer; empty without routes.

    `ROUTES` are ``[tokens or inputs, layers, per_token]`` experts, of layers with experts or all. Raises `EppError` if they
    have another shape, name an expert that there is not, or one twice for a token; or the model's routers cannot replay.
    """
    if (values := record.get(ROUTES)) is None:
        return {}
    if (obstacle := "the model has no experts: leave them out" if routing is None else routing.obstacle) or routing is None:
        raise EppError(f"{what} has {ROUTES}, and {obstacle}")
    try:
        routes = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except ValueError as error:
        raise EppError(f"{what}: {ROUTES}: {error}") from error
    lengths, layers, width = (num_inputs, num_tokens), (len(routing.layers), routing.num_layers), (routing.per_token,)
    if routes.ndim != 3 or any(size not in sizes for size, sizes in zip(routes.shape, (lengths, layers, width), strict=True)):
        shape = " x ".join(map(str, routes.shape)) or "one number"
        wanted = f"{len(routing.layers)} layers with experts x {routing.per_token} experts of a token"
        raise EppError(f"{what}: {ROUTES} is {shape}; it must be {num_tokens} tokens x {wanted}")
    if not np.issubdtype(routes.dtype, np.integer):
        raise EppError(f"{what}: {ROUTES} must be numbers of experts")
    routes = routes[:num_inputs] if routes.shape[1] == len(routing.layers) else routes[:num_inputs, list(routing.layers)]
    for token, number, at in np.argwhere((routes < 0) | (routes >= routing.experts))[:1]:
        where = f"for token {token} in layer {routing.layers[number]} (both from 0)"
        known = f"there are experts 0 to {routing.experts - 1}"
        raise EppError(f"{what}: {ROUTES} has expert {routes[token, number, at]} {where}; {known}")
    ascending = np.sort(routes.astype(np.int16), axis=2)
    for token, number, at in np.argwhere(ascending[..., 1:] == ascending[..., :-1])[:1]:  # dispatchers count on different ones
        where = f"for token {token} in layer {routing.layers[number]} (both from 0)"
        raise EppError(f"{what}: {ROUTES} has expert {ascending[token, number, at]} twice {where}")
    return {layer: routes[:, number].astype(np.int16) for number, layer in enumerate(routing.layers)}


def routes_of_chunk(
    dataset: Any, indices: Sequence[int], segments: Sequence[Segment], num_tokens: int, asked: Routing
) -> torch.Tensor:
    """Return the routes of segments in some layers, int16 ``[layers, per_token, num_tokens]``; any experts for padding."""
    routes = np.empty((len(asked.layers), asked.per_token, num_tokens), dtype=np.int16)
    routes[:] = np.arange(asked.per_token)[:, None]  # dispatchers count on as many experts for padding
    at = 0
    for row, start, end in segments:
        here = slice(at, at := at + end - start)
        for number, layer in enumerate(asked.layers):
            if layer not in (own := dataset[indices[row]].routes):
                raise EppError(f"the model has experts in layer {layer}, counted from 0, of which samples have no {ROUTES}")
            routes[number, :, here] = own[layer][start:end].T
    return torch.from_numpy(routes)
