"""What every way into Megatron does first."""

import functools
import importlib.util
import os
from collections.abc import Callable

from megatron_epp.mcore import cpu


def prepare() -> None:
    """Make this machine and the installed Megatron ready for training. Idempotent; call before importing megatron."""
    cpu.activate()
    _use_shipped_dataset_helpers()


def _use_shipped_dataset_helpers() -> None:
    # The wheel ships the compiled helpers and no Makefile, and Megatron exits when `make` fails.
    from megatron.core.datasets import utils

    folder = os.path.dirname(os.path.abspath(utils.__file__))
    shipped = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if shipped and not os.path.exists(os.path.join(folder, "Makefile")):
        utils.compile_helpers = _no_compilation(utils.compile_helpers)


def _no_compilation(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        pass

    return compile_helpers
