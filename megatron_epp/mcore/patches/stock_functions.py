"""Check that the functions a script passes to Megatron are Megatron's own, since `--epp` replaces them by this package's.

A plan runs chunks while a script's `forward_step` takes microbatches, so `forward_step` is not called, nor are the script's
loss, batches and dataset provider. They count as Megatron's own if each of them, and every function of the script that they
name, has a fingerprint in `fingerprints.SCRIPTS`. Anything else is refused, as are other arguments of `pretrain` that `--epp`
would not use.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

from megatron_epp.mcore import features
from megatron_epp.mcore.features import has_user_microbatches
from megatron_epp.mcore.patches.fingerprints import SCRIPTS, attribute_chains, definition, digest, fingerprint, global_names
from megatron_epp.plan.errors import EppError

FORWARD_STEP = "forward_step"
PROVIDER = "train_valid_test_datasets_provider"
EMBEDDING_RANKS = "get_embedding_ranks"
ROLES = (FORWARD_STEP, PROVIDER, EMBEDDING_RANKS)

_REPLACED = {
    FORWARD_STEP: "forward step",
    "loss_func": "loss",
    "get_batch": "batches",
    PROVIDER: "datasets",
    EMBEDDING_RANKS: "choice of embedding ranks",
}
"""Descriptions of the parts that are replaced, by the names of their functions in Megatron's scripts."""
_HERE = str(Path(__file__).resolve().parents[2])
_OTHERS = ("site-packages", "dist-packages")
"""Folders within Python's library folder whose content does not belong to Python's own library."""
_PLAIN = (bool, int, float, str, NoneType, BuiltinFunctionType, ModuleType)
"""Types of values that need no check by themselves; of a module, the attributes that are read from it are checked."""
_REFUSED = ("process_non_loss_data_func", "p2p_communicator")
"""Arguments that `pretrain` passes to schedules and that ours does not support."""
_passed: list[object] = []


def check_call(args: argparse.Namespace, call: Mapping[str, Any]) -> None:
    """Raise `EppError` for arguments of `pretrain`, by the names of its parameters, that are incompatible with these flags."""
    for name in _REFUSED:
        if call.get(name) is not None:
            raise EppError(f"--epp cannot honour {name} of pretrain: leave it out, or start without --epp")
    functions = {role: call[parameter] for role, parameter in _PARAMETERS.items()}
    if args.epp_placement == "v" and call.get("get_embedding_ranks") is not None:  # the placement says which they are
        functions[EMBEDDING_RANKS] = call["get_embedding_ranks"]
    require_stock(functions)


_PARAMETERS = {FORWARD_STEP: "forward_step_func", PROVIDER: "train_valid_test_dataset_provider"}
"""Parameters of `pretrain` that take the functions of these roles."""


def check_script(args: argparse.Namespace) -> None:
    """Refuse functions of the main script, as `check_call` does, while it still parses its flags.

    Only functions that its calls of `pretrain` name are seen here; the call itself shows the others.
    """
    if has_user_microbatches(args):
        return
    from megatron.training import training

    main = sys.modules.get("__main__")
    try:
        tree = ast.parse(Path(str(getattr(main, "__file__", None))).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return
    functions = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "pretrain":
            try:
                named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
                arguments = features.bound(training.pretrain, *call.args, **named).arguments
            except TypeError:
                continue
            for role, parameter in _PARAMETERS.items():
                name = arguments.get(parameter)
                if isinstance(name, ast.Name) and hasattr(main, name.id):
                    functions[role] = getattr(main, name.id)
    require_stock(functions)


def require_stock(functions: Mapping[str, Any]) -> None:
    """Refuse functions unless they and all functions that they reach are Megatron's own, or this package's.

    Args:
        functions: functions that a script passes to Megatron, by their role, one of `ROLES`.

    Raises:
        EppError: a function was changed; the message has a line for every change.
    """
    new = {role: function for role, function in functions.items() if not any(function is each for each in _passed)}
    changes = [change for role, function in new.items() for change in changes_of(role, function)]
    if changes:
        remedy = (
            "To train with the script's own functions, add --epp-microbatches user, which plans its microbatches whole. To cut "
            "documents into slices, undo the change: -m megatron_epp.mcore.pretrain_gpt has Megatron's own functions"
        )
        raise EppError("\n".join([*dict.fromkeys(changes), remedy]))
    _passed.extend(new.values())


def changes_of(role: str, function: Any) -> list[str]:
    """Return a line for each function and constant reachable from a script's function of this role that is not Megatron's."""
    while isinstance(function, functools.partial):
        bound = [f"argument {number}" for number, _ in enumerate(function.args, 1)] + list(function.keywords)
        if bound and not (role == PROVIDER and bound == ["vp_stage"]):  # which Megatron binds for every model chunk
            return [_refusal(_Reached(role, function.func), f"a functools.partial that binds {', '.join(bound)}")]
        function = function.func
    return list(_changes(_Reached(role, function, of_ours=True), set()))


@dataclass(frozen=True, slots=True)
class _Reached:
    """Value with the path by which it was reached.

    Attributes:
        name: name in the code that uses it, with modules in front; the role, if the script passes the value to Megatron.
        value: the value.
        users: names of the functions on the path, the first of which the script passes to Megatron.
        of_ours: True if the code that names it belongs to this package, or if there is no such code.
    """

    name: str
    value: Any
    users: tuple[str, ...] = ()
    of_ours: bool = False

    @property
    def known(self) -> Mapping[str, str]:
        """Known fingerprints of this name in Megatron's scripts."""
        return SCRIPTS.get(self.name, {})


def _changes(reached: _Reached, seen: set[tuple[str, int]]) -> Iterator[str]:
    if (key := (reached.name, id(reached.value))) in seen:
        return
    seen.add(key)
    function = _bare(reached.value)
    if not isinstance(function, FunctionType):
        if difference := _strange(reached):
            yield _refusal(reached, difference)
        return
    file = function.__code__.co_filename
    if _lies_in(file, _HERE):
        if reached.of_ours:
            yield from _below(reached, function, seen)
        return
    if reached.users and not reached.known and is_installed(function):
        return
    node = definition(function)
    mark = f" (fingerprint {fingerprint(node)})" if node is not None else ""
    is_decorated = node is not None and node.decorator_list != []
    is_known = node is not None and fingerprint(node) in reached.known and is_decorated == (function is not reached.value)
    if not is_known or function.__closure__:
        yield _refusal(reached, f"not Megatron's own{mark}")
        return
    yield from _below(reached, function, seen)


def _bare(value: Any) -> Any:
    """Return the function of a method or of a cached function; any other value unchanged."""
    return value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else getattr(value, "__func__", value)


def _below(reached: _Reached, function: FunctionType, seen: set[tuple[str, int]]) -> Iterator[str]:
    """Yield the changes in values that a function names in its module, or reads from modules that it names."""
    scope, users = function.__globals__, (*reached.users, reached.name)
    of_ours = _lies_in(function.__code__.co_filename, _HERE)
    names = [name for name in global_names(function.__code__) if name in scope]
    for name in names:
        yield from _changes(_Reached(name, scope[name], users, of_ours), seen)
    node = definition(function)
    for root, *path in attribute_chains(node) if node is not None else ():
        value = scope[root] if root in names else None
        for attribute in path:
            if isinstance(value, ModuleType):
                value = getattr(value, attribute, None)
                if not isinstance(value, ModuleType):
                    yield from _changes(_Reached(".".join((root, *path)), value, users), seen)


def _strange(reached: _Reached) -> str:
    """Describe a value that is not a function and differs from Megatron's; empty if it is Megatron's."""
    value = reached.value
    if digest(ascii(value)) in reached.known if reached.known else reached.users and is_installed(value):
        return ""
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__qualname__}"
    kind = type(value)
    if kind.__module__ == "builtins":
        return f"changed to {value!r:.60}"
    return f"an object of class {kind.__module__}.{kind.__qualname__}"


def _refusal(reached: _Reached, difference: str) -> str:
    code = getattr(_bare(reached.value), "__code__", None)
    subject = reached.name if code is None else f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    if code is not None and reached.name != code.co_qualname:
        subject = f"{reached.name} = {subject}"
    used = f", which {reached.users[-1]} uses," if reached.users else ""
    lost = next(_REPLACED[name] for name in (reached.name, *reversed(reached.users)) if name in _REPLACED)
    return f"{subject}{used} is {difference}: with --epp the script's {lost} would not be used"


def is_installed(value: Any) -> bool:
    """True if a function or a class is defined in Megatron, torch or Python itself.

    For other objects, True if it is a constant, a module, or an instance of a class of Megatron's or torch's.
    """
    if isinstance(value, FunctionType):
        return _is_installed(value.__code__.co_filename)
    if isinstance(value, _PLAIN):
        return True
    kind = value if isinstance(value, type) else type(value)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if isinstance(value, type):
        return _is_installed(file) if file is not None else kind.__module__ in sys.builtin_module_names
    return file is not None and any(_lies_in(file, folder) for folder in _packages())


@functools.cache
def _is_installed(file: str) -> bool:
    if file.startswith("<frozen ") or any(_lies_in(file, folder) for folder in _packages()):
        return True
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return _lies_in(file, str(library)) and Path(file).resolve().relative_to(library).parts[0] not in _OTHERS


@functools.cache
def _packages() -> tuple[str, ...]:
    """Return the folders of the packages whose functions are trusted: torch and Megatron."""
    names = "torch", "megatron.core", "megatron.training", "megatron.post_training"
    specs = map(importlib.util.find_spec, names)
    return tuple(folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ())


def _lies_in(file: str, folder: str) -> bool:
    return Path(file).resolve().is_relative_to(Path(folder).resolve())
