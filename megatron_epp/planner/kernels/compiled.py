"""Compile with numba where it is installed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, MutableSequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from megatron_epp import COMPILED_VARIABLE

logger = logging.getLogger(__name__)

_njit: Any = None
_UNCOUNTED: dict[str, bool] = {}
"""Option of numba that leaves the counting of references away; it is not documented, so a numba may come without it."""
if os.environ.get(COMPILED_VARIABLE) != "0":
    with contextlib.suppress(ImportError):
        from numba import njit as _njit
    with contextlib.suppress(ImportError):
        from numba.core.options import DefaultOptions

        _UNCOUNTED = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

IntegerList = MutableSequence[int]
"""A column of 64-bit integers: an array when compiled, a list when not, because plain Python indexes lists faster."""
FloatList = MutableSequence[float]
"""A column of floats, likewise."""
Numbers = np.ndarray[Any, np.dtype[Any]]


def is_compiled() -> bool:
    return _njit is not None


def compiled[F: Callable[..., Any]](function: F) -> F:
    """Compile a function on its first call and keep the result on disk; other threads run meanwhile.

    No fast math: sums are taken in the order written, so results are equal to the last digit with and without. References to
    columns are not counted, for that can take ten times as long as all else: the function may make neither lists nor columns
    (`compiled_with_lists`), and its caller keeps the columns.
    """
    return _compiled(function, **_UNCOUNTED)


def compiled_with_lists[F: Callable[..., Any]](function: F) -> F:
    return _compiled(function, **dict.fromkeys(_UNCOUNTED, True))  # or it would take the option from who calls it


def inlined[F: Callable[..., Any]](function: F) -> F:
    """Compile a function, like `compiled`, into its callers. A call, which copies all columns, takes ten times as long."""
    return _compiled(function, forceinline=True, **_UNCOUNTED)


def _compiled[F: Callable[..., Any]](function: F, **options: bool) -> F:
    if _njit is None:
        return function
    name = function.__qualname__
    # numba names the file after the function and looks at its own source alone. A loop that is inlined, or a record of columns,
    # may have changed in another file: an upgrade in place would run the old code, or fail to read it.
    function.__qualname__ = f"{name}-{_sources()}"
    try:
        return cast(F, _njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        _tell_not_kept()
        return cast(F, _njit(nogil=True, **options)(function))
    finally:
        function.__qualname__ = name


@functools.cache
def _sources(folder: Path = Path(__file__).parent) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:12]


@functools.cache
def _tell_not_kept() -> None:
    logger.warning(
        "every process compiles the planner's loops again, for up to 25 s of a core: neither the package's folder nor ~/.cache "
        "can be written to; set NUMBA_CACHE_DIR to a folder that can"
    )


def _listen() -> None:
    from numba.core import event

    def on_start(_: object, compiling: Any) -> None:
        if compiling.data["dispatcher"].py_func.__module__.startswith(__package__):
            _tell_compiling()

    events: Any = event  # without types
    listener = type("Listener", (events.Listener,), {"on_start": on_start, "on_end": lambda _, compiling: None})
    events.register("numba:compile", listener())


@functools.cache
def _tell_compiling() -> None:
    if not _tell_not_kept.cache_info().currsize:
        # A warning, because a planning process shows no less; with the name, because it shows nothing else.
        logger.warning("megatron-epp compiles the planner's loops, once for this machine: 10 to 25 s of a core")


if is_compiled():
    _listen()


def integers(values: Iterable[int] | Numbers) -> IntegerList:
    return cast(IntegerList, _column(values, np.int64))


def floats(values: Iterable[float] | Numbers) -> FloatList:
    return cast(FloatList, _column(values, np.float64))


def integer_zeros(count: int) -> IntegerList:
    return cast(IntegerList, np.zeros(count, dtype=np.int64) if _njit is not None else [0] * count)


def float_zeros(count: int) -> FloatList:
    return cast(FloatList, np.zeros(count) if _njit is not None else [0.0] * count)


def _column(values: Any, dtype: type) -> object:
    if not isinstance(values, (list, np.ndarray)):
        values = list(values)
    if _njit is not None:
        return np.array(values, dtype=dtype)
    return values.tolist() if isinstance(values, np.ndarray) else list(values)


def numbers[N: (int, float)](column: MutableSequence[N]) -> list[N]:
    """A column as numbers of Python's own, or a part of one."""
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
