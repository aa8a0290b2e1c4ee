"""Explicit and reversible replacement of named functions of Megatron, at most once, and only where the code is known."""

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from megatron_epp.mcore import releases
from megatron_epp.mcore.patches import fingerprints
from megatron_epp.plan.errors import EppError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patch:
    """Replacement of one function."""

    target: str  # "package.module:name" or "package.module:Class.method"
    replacement: Callable[..., Any]  # the new function; with `wraps`, it gets the original as its first argument
    reason: str  # one line, shown when the patch is applied
    wraps: bool = False
    # `fingerprint(target)` of every original the patch was written for, by default from `fingerprints.PATCHED`; none if the
    # content of the original does not matter
    fingerprints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.fingerprints:
            object.__setattr__(self, "fingerprints", fingerprints.PATCHED.get(self.target, ()))


def wrapping(target: str, replacement: Callable[..., Any]) -> Patch:
    """Return the patch by a function that gets the original as its first argument; the reason is its docstring's first line."""
    summary = (replacement.__doc__ or "").partition("\n")[0].removesuffix(".")
    return Patch(target, replacement, summary[:1].lower() + summary[1:], wraps=True)


def when(is_wanted: Callable[[], bool], target: str, function: str, reason: str) -> Patch:
    """Return the patch by a function, ``module:function``, that is imported and called where it is wanted."""

    def call(original: Callable[..., Any], *rest: Any, **named: Any) -> Any:
        return resolve_name(function)(original, *rest, **named) if is_wanted() else original(*rest, **named)

    return Patch(target, call, reason, wraps=True)


@dataclass(frozen=True, slots=True)
class _Applied:
    patch: Patch
    original: Any
    replacement: Any


_applied: list[_Applied] = []


def apply(patches: Sequence[Patch], *, allow_unknown: bool = False, level: int = logging.INFO) -> None:
    """Apply all patches that are not applied yet, or none if one finds code that it does not know (`allow_unknown` permits it).

    Names that modules have imported (`from x import y`) are replaced too. Raises `EppError`, also for a missing target.
    """
    done = {applied.patch for applied in _applied}
    new = [patch for patch in patches if patch not in done]
    for patch in new:
        check(patch, allow_unknown)
    for patch in new:
        original = resolve(patch.target)
        replacement = around(original, patch.replacement) if patch.wraps else patch.replacement
        _rebind(patch.target, original, replacement)
        _applied.append(_Applied(patch, original, replacement))
        if os.environ.get("RANK", "0") == "0":
            logger.log(level, "patched %s: %s", patch.target, patch.reason)


def around(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in the place of `original`, with its name and signature, that calls ``replacement(original, ...)``."""

    @functools.wraps(original)
    def call(*rest: Any, **named: Any) -> Any:
        return replacement(original, *rest, **named)

    return call


def revert(patches: Sequence[Patch] | None = None) -> None:
    """Undo patches, or all, in reverse order, as a notebook needs. Raises `EppError` if a later one is on top of one."""
    chosen = [a for a in reversed(_applied) if patches is None or a.patch in patches]
    for applied in chosen:
        if resolve(applied.patch.target) is not applied.replacement:
            raise EppError(f"{applied.patch.target} was patched again after this patch: revert the later patch first")
        _rebind(applied.patch.target, applied.replacement, applied.original)
        _applied.remove(applied)


def applied() -> tuple[Patch, ...]:
    return tuple(a.patch for a in _applied)


def fingerprint(target: str) -> str:
    """Return twelve hex digits of the sha256 of the source of `target`, without our patches and functools.wraps."""
    return _fingerprint_of(original_of(target))


def original_of(target: str) -> Any:
    """Return the object that a target named before it was patched. Raises EppError if there is none."""
    return next((applied.original for applied in _applied if applied.patch.target == target), None) or resolve(target)


@functools.cache
def _fingerprint_of(original: Any) -> str:
    return fingerprints.digest(inspect.getsource(original))


def unknown(known: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the targets that do not exist, or whose fingerprint is not in `known`."""
    digests = dict[str, str]()
    for target in known:
        with contextlib.suppress(EppError):
            digests[target] = fingerprint(target)
    return [target for target, fingerprints in known.items() if digests.get(target) not in fingerprints]


def resolve(target: str) -> Any:
    """Return the object that a target currently names. Raises EppError if there is none, or its module's import fails."""
    holder, name = _holder(target)
    try:
        return inspect.getattr_static(holder, name)  # a static method as such, which `revert` can put back
    except AttributeError:
        raise _missing(target) from None


def _holder(target: str) -> tuple[Any, str]:
    module_name, _, qualified = target.partition(":")
    *path, name = qualified.split(".")
    try:
        holder: Any = importlib.import_module(module_name)
    except Exception as error:  # of the module, or of one that it imports
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise _missing(target) from None
        release, cause = releases.installed_version(), f"{type(error).__name__}: {error}"
        raise EppError(f"{module_name} of megatron-core {release} cannot be imported, {cause}") from error
    try:
        for part in path:
            holder = getattr(holder, part)
    except AttributeError:
        raise _missing(target) from None
    return holder, name


def _missing(target: str) -> EppError:
    return EppError(f"{target} does not exist in megatron-core {releases.installed_version()}")


def check(patch: Patch, allow_unknown: bool = False) -> None:
    resolve(patch.target)
    if allow_unknown or not patch.fingerprints:
        return
    digest = fingerprint(patch.target)
    if digest not in patch.fingerprints:
        what = f"{patch.target} of megatron-core {releases.installed_version()}"
        todo = f"{releases.INSTALL}, or pass --epp-allow-unknown-megatron"
        raise EppError(f"{what} is not the code megatron-epp knows ({digest}): {todo}")


def _rebind(target: str, old: Any, new: Any) -> None:
    holder, name = _holder(target)
    setattr(holder, name, new)
    if not isinstance(holder, ModuleType):
        return
    # `from x import y` copies a name: the training loop has its own `get_forward_backward_func`, and would not see the new one.
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)
