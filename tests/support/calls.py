"""Calls of which tests look at the outcome: what is refused in a line, and programs in a process of their own."""

import os
import subprocess
import sys
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
