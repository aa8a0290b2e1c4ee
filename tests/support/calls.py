"""Calls of which tests look at the outcome: refusals in a line, programs in a process of their own, and what takes its time."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from megatron_epp.plan.errors import EppError


def refusal(call: Callable[..., object], *args: Any, error: type[EppError] = EppError, **named: Any) -> str:
    """Return the one line in which a call is refused."""
    with pytest.raises(error) as refused:
        call(*args, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def run_python(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that imports what this process can."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


def wait_for(
    happened: Callable[[], object], limit_s: float, what: str, tell: Callable[[], object] = str, pause_s: float = 0.1
) -> None:
    """Look again and again until it has happened. Raises AssertionError with what `tell` returns."""
    end_s = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end_s, f"after {limit_s:.0f} s it is not so that {what}: {tell()}"
        time.sleep(pause_s)
