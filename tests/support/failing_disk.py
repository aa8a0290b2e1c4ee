"""A disk that fails at one step: the n-th call of the operating system that writes of the package make."""

import builtins
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

from megatron_epp.plan.errors import EppError

STEPS = ("open", "write", "fsync", "replace", "ftruncate", "fstat")
MOST_STEPS = 100


class _Written:
    """A file of Python's that is written to, by others than the package's own writer; every write is a step."""

    def __init__(self, file: Any, step: Callable[..., Callable[..., Any]]) -> None:
        self._file, self.write = file, step("write", file.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@contextmanager
def failing(at: int, error: type[Exception] = OSError) -> Iterator[list[str]]:
    """Let the n-th of these calls fail as on a full disk, or without memory; the list has the calls made."""
    made: list[str] = []

    def of(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **named: Any) -> Any:
            made.append(name)
            if len(made) == at:
                named_file = args[:1] if args and isinstance(args[0], str | os.PathLike) else ()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named_file) if error is OSError else error
            return call(*args, **named)

        return step

    def opened(path: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if "w" not in mode:
            return open_file(path, mode, *args, **named)
        return _Written(of("open", open_file)(path, mode, *args, **named), of)

    open_file = open
    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, of(name, getattr(os, name)))
        patch.setattr(builtins, "open", opened)
        yield made


def swept[T](run: Callable[[], T], error: type[Exception] = OSError) -> Iterator[T | Exception]:
    """Run with the first call failing, then with the second, until all have failed; yield each answer, or the error."""
    for at in range(1, MOST_STEPS):
        answer: T | Exception
        with failing(at, error) as made:
            try:
                answer = run()
            except (OSError, MemoryError, EppError) as raised:
                answer = raised
        if len(made) < at:
            return
        yield answer
    pytest.fail(f"more than {MOST_STEPS} steps")
