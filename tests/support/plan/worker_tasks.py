"""Tasks that the tests of the worker run in its process."""

import os
import sys
import time

from megatron_epp.plan import InfeasibleError

_numbers: list[int] = []


def add(number):
    _numbers.append(number)
    return sum(_numbers)


def misbehave(how):
    if how == "refuse":
        raise InfeasibleError("needs 12 GB")
    if how == "bug":
        return {}["key"]
    if how == "die":
        os._exit(3)
    if how == "print":
        print("noise")
    return sorted(name for name in ("torch", "megatron", "numpy", "psutil") if name in sys.modules)


def ending(*_):
    """Planner that ends its process, as a lack of memory does."""
    os._exit(9)


def sleep(seconds):
    time.sleep(seconds)
