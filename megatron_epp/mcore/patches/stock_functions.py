"""Check that the functions a script passes to Megatron are Megatron's own, since `--epp` replaces them by this package's.

A plan runs chunks, so the script's `forward_step`, loss, batches and dataset provider are not called. They count as Megatron's
own if each of them, and every function of the script that they name, has a fingerprint in `fingerprints.SCRIPTS`. Anything else
is refused, as are other arguments of `pretrain` that `--epp` would not use.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

from megatron_epp.mcore.patches.fingerprints import SCRIPTS, definition, digest, fingerprint, global_names
from megatron_epp.mcore.releases import has_user_microbatches
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
_TRUSTED = ("torch", "megatron.core", "megatron.training", "megatron.post_training")
"""Packages whose functions and classes are installed, like those of Python's own library."""
_PLAIN = (bool, int, float, str, NoneType, BuiltinFunctionType, ModuleType)  # types of values that need no check by themselves
_REFUSED = ("process_non_loss_data_func", "p2p_communicator")
"""Arguments that `pretrain` passes to schedules and that ours does not support."""
_REMEDY = (
    "To train with the script's own functions, add --epp-microbatches user, which plans its microbatches whole. To cut "
    "documents into slices, undo the change: -m megatron_epp.mcore.pretrain_gpt has Megatron's own functions"
)
_passed: list[object] = []
_PARAMETERS = {FORWARD_STEP: "forward_step_func", PROVIDER: "train_valid_test_dataset_provider"}
"""Parameters of `pretrain` that take the functions of these roles."""


def check_call(args: argparse.Namespace, call: Mapping[str, Any]) -> None:
    """Raise `EppError` for arguments of `pretrain`, by the names of its parameters, that are incompatible with these flags."""
    for name in _REFUSED:
        if call.get(name) is not None:
            raise EppError(f"--epp cannot honour {name} of pretrain: leave it out, or start without --epp")
    functions = {role: call[parameter] for role, parameter in _PARAMETERS.items()}
    if args.epp_placement in ("v", "ring") and call.get("get_embedding_ranks") is not None:  # the placement says which they are
        functions[EMBEDDING_RANKS] = call["get_embedding_ranks"]
    require_stock(functions)


def check_script(args: argparse.Namespace) -> None:
    """Refuse functions of a main script that calls `pretrain`, of Megatron's names, while it still parses its flags."""
    main = sys.modules.get("__main__")
    if not has_user_microbatches(args) and hasattr(main, "pretrain"):
        require_stock({role: vars(main)[role] for role in _PARAMETERS if hasattr(main, role)})


def require_stock(functions: Mapping[str, Any]) -> None:
    """Raise `EppError`, a line per change, unless functions, by `ROLES`, and all they reach are Megatron's or ours."""
    new = {role: function for role, function in functions.items() if not any(function is each for each in _passed)}
    changes = [change for role, function in new.items() for change in changes_of(role, function)]
    if changes:
        raise EppError("\n".join([*dict.fromkeys(changes), _REMEDY]))
    _passed.extend(new.values())


def changes_of(role: str, function: Any) -> list[str]:
    """Return a line for each function and constant of a script that its function of this role names and Megatron has not."""
    while isinstance(function, functools.partial):
        bound = [f"argument {number}" for number, _ in enumerate(function.args, 1)] + list(function.keywords)
        if bound and not (role == PROVIDER and bound == ["vp_stage"]):  # which Megatron binds for every model chunk
            return [_refusal((role,), function.func, f"a functools.partial that binds {', '.join(bound)}")]
        function = function.func
    if isinstance(function, FunctionType) and _is_within(function, __package__.partition(".")[0]):
        return []
    return list(_changes((role,), function, set()))


def _changes(path: tuple[str, ...], value: Any, seen: set[str]) -> Iterator[str]:
    """Yield the changes in a value that is reached by a path of names, the first of which is the role."""
    name = path[-1]
    if name in seen:
        return
    seen.add(name)
    function, known = _bare(value), SCRIPTS.get(name, ())
    if len(path) > 1 and not known and is_installed(function):
        return
    if not isinstance(function, FunctionType):
        if digest(ascii(value)) not in known:
            yield _refusal(path, value, f"changed to {value!r:.90}")
        return
    node = definition(function)
    if node is None or fingerprint(node) not in known or function.__closure__:
        yield _refusal(path, value, "not Megatron's own" + (f" (fingerprint {fingerprint(node)})" if node is not None else ""))
        return
    scope = function.__globals__
    for used in global_names(function.__code__):
        if used in scope:
            yield from _changes((*path, used), scope[used], seen)


def _bare(value: Any) -> Any:
    """Return the function of a method or of a cached function; any other value unchanged."""
    return value.__wrapped__ if isinstance(value, functools._lru_cache_wrapper) else getattr(value, "__func__", value)


def _refusal(path: tuple[str, ...], value: Any, difference: str) -> str:
    *users, name = path
    code = getattr(_bare(value), "__code__", None)
    subject = name if code is None else f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    if code is not None and name != code.co_qualname:
        subject = f"{name} = {subject}"
    used = f", which {users[-1]} uses," if users else ""
    lost = next(_REPLACED[each] for each in reversed(path) if each in _REPLACED)
    return f"{subject}{used} is {difference}: with --epp the script's {lost} would not be used"


def is_installed(value: Any) -> bool:
    """True if a function or class is defined in Megatron, torch or Python, or an object is plain, or of such a class."""
    if isinstance(value, FunctionType | type):
        return _is_within(value, *sys.stdlib_module_names, *_TRUSTED)
    return isinstance(value, _PLAIN) or _is_within(type(value), *_TRUSTED)


def _is_within(owner: FunctionType | type, *packages: str) -> bool:
    # Not a function's `__module__`, which `functools.wraps` copies.
    module = owner.__globals__["__name__"] if isinstance(owner, FunctionType) else owner.__module__
    return any(f"{module}.".startswith(f"{package}.") for package in packages)
