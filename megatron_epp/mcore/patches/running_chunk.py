"""Chunk that a thread runs, as routers of experts see it (`routers`): its functions are imported when they have one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from megatron_epp.plan.attributes import having


class _Running(threading.local):
    """Chunk of a thread: its `routers.RealTokens`, and `replayed_routes.ChunkRoutes`; each action of a step has a thread."""

    real: Any = None
    routes: Any = None
    layer: int = -1


running = _Running()


def chunk(real: Any, routes: Any = None) -> AbstractContextManager[None]:
    """Return a context in which routers see a chunk, and replay its routes; None for Megatron's own behaviour."""
    return having(running, real=real, routes=routes)


def runs_chunk() -> bool:
    return running.real is not None


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
