"""Chunk that a thread runs, as routers of experts see it (`routers`): its functions are imported only when they have one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from megatron_epp.mcore.patches.patching import Patch


class _Running(threading.local):
    """Chunk that a thread runs: the two actions of a step run in a thread each.

    `real` are its `routers.RealTokens`, `routes` its `replayed_routes.ChunkRoutes`; None for none.
    """

    real: Any = None
    routes: Any = None
    layer: int = -1


running = _Running()


@contextmanager
def chunk(real: Any, routes: Any = None) -> Iterator[None]:
    """Return a context in which routers see a chunk, and replay its routes; None for Megatron's own behaviour."""
    before = running.real, running.routes
    running.real, running.routes = real, routes
    try:
        yield
    finally:
        running.real, running.routes = before


def in_chunk(target: str, function: str, reason: str) -> Patch:
    """Return the patch of a function of Megatron's by one of `routers`, which takes the original first, while a chunk runs."""

    def call(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        if running.real is None:
            return original(*rest, **named)
        return resolve_name(f"megatron_epp.mcore.patches.routers:{function}")(original, *rest, **named)

    return Patch(target, call, reason, wraps=True)


def keep_chunk(original: Callable[..., Any], function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """Make a recomputed forward see the chunk of its first run."""
    real, routes = running.real, running.routes
    if real is None:
        return original(function, *rest, **named)

    @functools.wraps(function)
    def of_chunk(*args: Any) -> Any:
        with chunk(real, routes):
            return function(*args)

    return original(of_chunk, *rest, **named)
