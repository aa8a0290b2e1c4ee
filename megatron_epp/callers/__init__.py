"""Frameworks that call Megatron's schedules: what each needs so that plans run its microbatches, without a change to it.

A framework's file is loaded by a hook that the framework has. It does something only if the environment variable `MEGATRON_EPP`
is set, and only in processes that train with Megatron.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from megatron_epp.plan.errors import EppError

VARIABLE = "MEGATRON_EPP"
"""Environment variable that switches plans on: ``1``, or settings of `megatron_epp.wrap` with commas or spaces between, as in
``memory_cap_gb=60,offload=on``."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise EppError(f"environment variable {VARIABLE}={os.environ[VARIABLE]}: {message}")


def settings() -> dict[str, Any] | None:
    """Return the environment variable's settings, typed as flags; None if plans are off. Raises `EppError` for a wrong one."""
    text = os.environ.get(VARIABLE, "").strip()
    if text.lower() in ("", "0", "off"):
        return None
    from megatron_epp.mcore.arguments.parser import add_epp_args  # a process without the variable needs none of it
    from megatron_epp.mcore.iteration.wrap import OF_LOOP

    words = [] if text.lower() in ("1", "on") else text.replace(",", " ").split()
    values = dict(word.partition("=")[::2] for word in words)
    flags = [(f"--epp-{name.replace('_', '-')}", value) for name, value in values.items()]
    parser = _Parser(prog=VARIABLE, add_help=False, allow_abbrev=False)
    for name in OF_LOOP:
        parser.add_argument(f"--epp-{name.replace('_', '-')}", type=int)
    flags_of_user = add_epp_args(parser).parse_args([word for flag in flags for word in flag if word])
    names = [name.replace("-", "_") for name in values]
    return {name: getattr(flags_of_user, f"epp_{name}") for name in names}


def install(**more: Any) -> None:
    """Install plans if the environment variable says so. `more` are settings of the framework's own, as `shape_of`."""
    import megatron_epp

    if (own_settings := settings()) is not None:
        megatron_epp.install(**more | own_settings)


def install_behind(module: str, **more: Any) -> None:
    """Install plans (`install`) once a module that only training processes import has been imported.

    Settings are read then: a framework may pass over a plugin's error, but not a module's.
    """
    if os.environ.get(VARIABLE):
        when_imported(module, partial(install, **more))


def when_imported(name: str, run: Callable[[], None]) -> None:
    """Call a function once a module has been imported: now if it has been already."""
    if name in sys.modules:
        run()
    else:
        sys.meta_path.insert(0, _Hook(name, run))


class _Hook(importlib.abc.MetaPathFinder):
    """Finder of one module that lets the others find it, and calls a function behind its execution."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name, self._run = name, run

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, run = spec.loader.exec_module, self._run

        def exec_module(module: ModuleType) -> None:
            execute(module)
            run()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
