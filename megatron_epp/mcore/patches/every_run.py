"""Patches of every run, with or without `--epp`.

Megatron's compiled dataset helpers are used where they exist instead of being compiled at every start. Processes that a rank
starts, such as Megatron's checkpoint writers, end with it.
"""

import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from megatron_epp.launch.lifetime import run_until_parent_ends
from megatron_epp.mcore.patches.patching import Patch, wrapping

_HELPERS = "megatron.core.datasets.helpers_cpp"  # Megatron's compiled dataset helpers


@functools.cache
def patches() -> tuple[Patch, ...]:
    # The one runs `make`, and ends the process where that fails; `multiprocessing` ends processes only where the rank exits by
    # itself, and those of one that is killed would stay.
    has, start = "the compiled helpers are there already", wrapping("multiprocessing.process:BaseProcess.start", _start_ending)
    target = "megatron.core.datasets.utils:compile_helpers"
    return (Patch(target, lambda: None, has), start) if _has_dataset_helpers() else (start,)


def _has_dataset_helpers() -> bool:
    """True if Megatron's dataset helpers are compiled already. If only another Megatron on the path has them, load those.

    The wheel ships them without a Makefile. A fresh clone has a Makefile that needs pybind11 and a compiler; where a wheel is
    installed as well, its helpers serve the clone.
    """
    from megatron.core.datasets import utils

    if importlib.util.find_spec(_HELPERS) is not None:
        return not (Path(utils.__file__).parent / "Makefile").exists()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for folder in sys.path:
        for path in Path(folder, "megatron/core/datasets").glob(f"helpers_cpp{suffix}"):
            spec = importlib.util.spec_from_file_location(_HELPERS, path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[_HELPERS] = module
                return True
    return False


def _start_ending(original: Callable[[BaseProcess], None], self: BaseProcess) -> None:
    """Let processes of checkpoint writers and data loaders end with the rank that started them, even if it is killed."""
    if (target := getattr(self, "_target", None)) is not None:
        self._target = functools.partial(run_until_parent_ends, target)  # type: ignore[attr-defined]
    original(self)
