"""Preparation that every entry point does before it uses Megatron."""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator

from megatron_epp.launch import lifetime
from megatron_epp.mcore import cpu
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.mcore.patches import compat, dataset_helpers, helpers, install, patching, plain_torch
from megatron_epp.plan.errors import EppError


def prepare() -> None:
    """Make this machine and the installed Megatron ready to train, with or without `--epp`. Idempotent.

    Call it before megatron is imported. Raises EppError if Megatron is missing or unknown.
    """
    lifetime.end_with_launcher()
    lifetime.keep_sockets_in_folder()
    allow_unknown = "--epp-allow-unknown-megatron" in sys.argv  # needed long before the arguments are parsed
    compat.check_megatron(allow_unknown)
    if cpu.activate():
        patching.apply(cpu.patches(), allow_unknown=allow_unknown, level=logging.DEBUG)
    patching.apply((*plain_torch.patches(), *dataset_helpers.patches()), allow_unknown=allow_unknown)
    patching.apply(helpers.PATCHES, level=logging.DEBUG)
    install.apply(allow_unknown=allow_unknown)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with exit code 1 and only the message if this package raises an `EppError`.

    If the error was caused by another kind of error, the traceback of that one is printed first, for debugging.
    """
    try:
        yield
    except EppError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, EppError):
            traceback.print_exception(error.__cause__)
        raise SystemExit(f"megatron_epp, rank {os.environ.get('RANK', '0')}: {error.text(TRAINING)}") from None
