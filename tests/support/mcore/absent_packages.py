"""Modules in place of packages that a machine without a GPU cannot have, while modules of a framework import names from them.

Whatever is taken from one is an empty class, which may be called, subclassed and given attributes. Nothing that a test looks at
may be computed by one.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


@contextlib.contextmanager
def stand_ins(*packages: str, extensions: bool = False) -> Iterator[None]:
    """Let packages and all modules in them be imported meanwhile, if they cannot be otherwise; nothing finds them afterwards.

    Functions are not compiled by torch's just-in-time compiler meanwhile, which does not know what `megatron_epp.mcore.cpu` has
    put in place of torch's own.

    Args:
        packages: names of packages, or of modules in packages that are there.
        extensions: give Megatron's names for layers of Transformer Engine empty classes meanwhile, where they are None.
    """
    from megatron.core.extensions import transformer_engine as layers

    missing = {name: _made(name) for name, layer in vars(layers).items() if extensions and layer is None and name[:2] == "TE"}
    finder = _Finder(packages)
    sys.meta_path.append(finder)
    try:
        with patch.object(torch.jit, "script", lambda function, *rest, **named: function), patch.dict(vars(layers), missing):
            yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]


class _Kind(type):
    """Kind of classes that have every attribute, another such class."""

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)


def _made(name: str) -> _Kind:
    return _Kind(name, (), {"__init__": lambda self, *rest, **named: None})


def _attribute(name: str) -> _Kind:
    if name.startswith("__"):  # which Python asks for to find out what something is
        raise AttributeError(name)
    return _made(name)


class _StandIn(ModuleType):
    __version__ = "99.0"
    __getattr__ = staticmethod(_attribute)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        is_ours = any(f"{fullname}.".startswith(f"{package}.") for package in self._packages)
        return ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass
