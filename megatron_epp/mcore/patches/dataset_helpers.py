"""Patch that uses Megatron's compiled dataset helpers where they exist instead of compiling them at every start."""

import functools
import importlib.util
import sys
import sysconfig
from pathlib import Path

from megatron_epp.mcore.patches.patching import Patch

_NAME = "megatron.core.datasets.helpers_cpp"


@functools.cache
def patches() -> tuple[Patch, ...]:
    """Return the patch that stops Megatron from running `make`; none if no compiled helpers are available.

    The wheel ships them without a Makefile, and Megatron ends the process when `make` fails. A fresh clone has a Makefile that
    needs pybind11 and a compiler; where a wheel is installed as well, its helpers serve the clone.
    """
    from megatron.core.datasets import utils

    if importlib.util.find_spec(_NAME) is None:
        usable = _borrow()
    else:
        usable = not (Path(utils.__file__).parent / "Makefile").exists()
    if not usable:
        return ()
    return (Patch("megatron.core.datasets.utils:compile_helpers", _compile_nothing, "the compiled helpers are there already"),)


def _borrow() -> bool:
    """Load the helpers of another Megatron on the path under the name that this one imports. Returns True if there are any."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        for path in Path(folder, "megatron/core/datasets").glob(f"helpers_cpp{suffix}"):
            spec = importlib.util.spec_from_file_location(_NAME, path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[_NAME] = module
                return True
    return False


def _compile_nothing() -> None:
    pass
