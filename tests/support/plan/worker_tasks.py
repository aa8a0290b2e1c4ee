"""Tasks that the tests of the worker run in its process."""

import os
import sys
import time
from functools import partial

from megatron_epp.plan import InfeasibleError


def adder(start):
    return partial(add, [start])


def add(total, number):
    """Adds up what it is called with."""
    total[0] += number
    return total[0]


def misbehaving():
    return misbehave


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


def sleeper():
    return time.sleep
