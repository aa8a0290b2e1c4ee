"""A disk that fails at one step: the n-th call of the operating system that writes of the package make."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

STEPS = ("open", "write", "fsync", "replace", "ftruncate", "fstat")
MOST_STEPS = 100


@contextmanager
def failing(at: int) -> Iterator[list[str]]:
    """Let the n-th of these calls fail as on a full disk; the list has the calls made."""
    made: list[str] = []

    def of(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **named: object) -> object:
            made.append(name)
            if len(made) == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "elsewhere")
            return call(*args, **named)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, of(name, getattr(os, name)))
        yield made


def swept[T](run: Callable[[], T]) -> Iterator[T | OSError]:
    """Run with the first call failing, then with the second, until all have failed; yield each answer, or the error."""
    for at in range(1, MOST_STEPS):
        answer: T | OSError
        with failing(at) as made:
            try:
                answer = run()
            except OSError as error:
                answer = error
        if len(made) < at:
            return
        yield answer
    pytest.fail(f"more than {MOST_STEPS} steps")
