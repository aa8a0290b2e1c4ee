"""What every way into Megatron does first."""

import contextlib
import functools
import importlib.util
import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator

from megatron_epp.mcore import compat, cpu, patching, without_apex
from megatron_epp.mcore.patching import Patch
from megatron_epp.schedule.errors import EppError


def prepare() -> None:
    """Make this machine and the installed Megatron ready to train, with or without `--epp`. Idempotent.

    Call it before megatron is imported. Raises EppError if Megatron is missing or unknown.
    """
    allow_unknown = "--epp-allow-unknown-megatron" in sys.argv  # needed long before the arguments are parsed
    compat.check_megatron(allow_unknown)
    if cpu.activate():
        patching.apply(cpu.patches(), allow_unknown=allow_unknown, level=logging.DEBUG)
    patching.apply((*without_apex.patches(), *_patches()), allow_unknown=allow_unknown)
    if importlib.util.find_spec("megatron_epp.mcore.install") is not None:
        from megatron_epp.mcore import install

        install.apply(allow_unknown=allow_unknown)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with exit code 1 and the message alone where this package refuses something."""
    try:
        yield
    except EppError as error:
        raise SystemExit(f"megatron_epp, rank {os.environ.get('RANK', '0')}: {error}") from None


@functools.cache
def _patches() -> tuple[Patch, ...]:
    from megatron.core.datasets import utils

    flags = Patch("megatron.training.arguments:add_megatron_arguments", _with_epp_flags, "adds the --epp flags", wraps=True)
    makefile = os.path.join(os.path.dirname(os.path.abspath(utils.__file__)), "Makefile")
    if os.path.exists(makefile) or importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return (flags,)
    return (
        flags,
        Patch(
            "megatron.core.datasets.utils:compile_helpers",
            _use_what_is_shipped,
            "the wheel ships the compiled dataset helpers and no Makefile, and Megatron exits when make fails",
        ),
    )


def _with_epp_flags(original: Callable[[ArgumentParser], ArgumentParser]) -> Callable[[ArgumentParser], ArgumentParser]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        from megatron_epp.mcore.args import add_epp_args

        return add_epp_args(original(parser))

    return add_megatron_arguments


def _use_what_is_shipped() -> None:
    pass
