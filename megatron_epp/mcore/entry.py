"""What every way into Megatron does first."""

import importlib.util
import os

from megatron_epp.mcore import compat, cpu, patching, without_apex
from megatron_epp.mcore.patching import Patch


def prepare(allow_unknown_megatron: bool = False) -> None:
    """Make this machine and the installed Megatron ready to train. Idempotent; call it before importing megatron.

    Raises EppError if Megatron is missing or of an unknown version.
    """
    compat.check_megatron(allow_unknown_megatron)
    cpu.activate()
    patching.apply((*without_apex.patches(), *_shipped_helpers()), allow_unknown=allow_unknown_megatron)


def _shipped_helpers() -> tuple[Patch, ...]:
    from megatron.core.datasets import utils

    makefile = os.path.join(os.path.dirname(os.path.abspath(utils.__file__)), "Makefile")
    if os.path.exists(makefile) or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return ()
    return (
        Patch(
            "megatron.core.datasets.utils:compile_helpers",
            _use_what_is_shipped,
            "the wheel ships the compiled dataset helpers and no Makefile, and Megatron exits when make fails",
        ),
    )


def _use_what_is_shipped() -> None:
    pass
