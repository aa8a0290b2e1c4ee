"""The state that the functions of a source tree keep, by one name in all files and releases.

A name is of

- a module's variable that a function binds, or whose object a function changes, also through a function that returns it;
- an attribute of a class that a function binds or changes, also through an instance that has no such attribute itself;
- an attribute of a function;
- an object that a module or class makes, if its class has methods that change it;
- a function whose results are cached;
- an attribute of a layer, or of another object near layers, that a method adds to or changes in place.

Not seen are attributes of objects that are bound anew or by a computed name, variables of enclosing functions, and what other
packages keep.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.megatron_state.modules import CALL, TYPE, Change, Class, Module, Reference, Scope, last_name, read, reference

ROOT = "megatron"
LAYERS = tuple(
    f"core/{name}/" for name in ("transformer", "models", "ssm", "tensor_parallel", "extensions", "fusions", "distributed")
)
"""Folders with modules that a forward runs."""
_CONTAINERS = frozenset(("dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter", "WeakKeyDictionary"))
_MOST_STEPS = 6
"""Most modules or functions through which a name is followed."""

Modules = Mapping[str, Module]


@dataclass(frozen=True, slots=True)
class State:
    """Something that functions keep.

    Attributes:
        name: ``module:variable``, ``module:Class.attribute`` or ``module:function``; the module without `megatron`.
        lines: files and lines of the changes, by release.
        changed_by: functions that change it, in any release.
    """

    name: str
    lines: Mapping[str, tuple[tuple[str, int], ...]]
    changed_by: tuple[str, ...]


def states(trees: Mapping[str, Path], outside: Collection[str] = ()) -> list[State]:
    """Return what functions keep in any of some releases, sorted by name.

    Args:
        trees: the folder that holds `megatron/`, by release.
        outside: folders and files in `megatron/` that are left out, as ``core/inference``.
    """
    known: dict[tuple[str, bytes], Module] = {}
    lines: dict[str, dict[str, dict[tuple[str, int], None]]] = defaultdict(lambda: defaultdict(dict))
    who: dict[str, set[str]] = defaultdict(set)
    for release, tree in trees.items():
        modules = {}
        for file in _files(tree / ROOT, "", outside):
            text, parts = file.read_bytes(), file.relative_to(tree / ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            key = ".".join(parts[:-1] if is_package else parts), hashlib.blake2b(text).digest()
            if key not in known:  # most files of two releases are the same
                known[key] = read(key[0], is_package, text, ROOT)
            modules[key[0]] = known[key]
        for name, by, file_name, line in _found(modules):
            lines[name][release][file_name, line] = None
            who[name].add(by)
    return [
        State(name, {release: tuple(at) for release, at in lines[name].items()}, tuple(sorted(who[name])))
        for name in sorted(lines)
    ]


def _files(folder: Path, inside: str, outside: Collection[str]) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        name = f"{inside}{path.name}"
        if name in outside:
            continue
        if path.is_dir():
            yield from _files(path, f"{name}/", outside)
        elif path.suffix == ".py":
            yield path


def _found(modules: Modules) -> Iterator[tuple[str, str, str, int]]:
    """Yield name, who changes it, file and line of everything that functions of a release keep."""
    for module in modules.values():
        for name, line in module.cached.items():
            yield f"{module.name}:{name}", "its cache", module.file, line
        for change in module.changes:
            for name in _kept(modules, module, change):
                yield name, change.scope.name, module.file, change.line
        if module.file.startswith(LAYERS):
            for owner in module.classes.values():
                for attribute, method, line in owner.adds_to:
                    yield f"{module.name}:{owner.name}.{attribute}", method, module.file, line
        yield from _objects(modules, module)


def _objects(modules: Modules, module: Module) -> Iterator[tuple[str, str, str, int]]:
    """Yield the objects that a module and its classes make, if methods of their own change them."""
    for prefix, variables in (
        ("", module.variables),
        *((f"{owner.name}.", owner.attributes) for owner in module.classes.values()),
    ):
        for name, value in variables.items():
            path = reference(value.func) if isinstance(value, ast.Call) else None
            target = None if path is None else _resolved(modules, module, path)
            if target is not None and len(target) == 2 and _changes_itself(modules, *target):
                yield f"{module.name}:{prefix}{name}", f"methods of {target[1]}", module.file, module.lines[prefix + name]


def _changes_itself(modules: Modules, module: str, name: str, steps: int = 0) -> bool:
    definition = modules[module].classes.get(name)
    if definition is None or definition.changes_itself or steps > _MOST_STEPS:
        return definition is not None and definition.changes_itself
    bases = (_resolved(modules, modules[module], base) for base in definition.bases)
    return any(len(base) == 2 and _changes_itself(modules, *base, steps + 1) for base in bases if base is not None)


def _kept(modules: Modules, module: Module, change: Change) -> Iterator[str]:
    """Yield the names of what a change changes, if that is no local object."""
    meant = _meant(change)
    resolved = None if meant is None else _resolved(modules, module, meant, change.scope)
    if resolved is None:
        return
    owner, name, *rest = resolved
    where = modules[owner]
    if name in where.classes:
        if len(rest) > 1 and rest[1] == CALL:
            yield from _results(modules, where, f"{name}.{rest[0]}")
        elif rest and rest[0] not in (CALL, TYPE):
            yield f"{owner}:{_declared(where, name, rest[0])}"
    elif name in where.functions:
        if rest[:1] == [CALL]:
            yield from _results(modules, where, name)
        elif rest:
            yield f"{owner}:{name}.{rest[0]}"
    elif CALL not in rest and (name in where.variables or change.reference[0] in change.scope.globals):
        yield f"{owner}:{name}"


def _meant(change: Change) -> Reference | None:
    """Return what is changed without local names: what they stand for. None where it is a local object, or a local name."""
    path, scope = change.reference, change.scope
    binds_name = change.binds and len(path) == 1
    followed: set[str] = set()
    at: Scope | None = scope
    while at is not None:
        head, rest = path[0], path[1:]
        if head in at.globals:
            return path
        if binds_name:
            return None
        if at.first == head:
            return _of_first(at, rest, change.binds)
        if head in at.imports:
            return path
        if head in at.local:
            stands_for = at.stands_for.get(head)
            if stands_for is None or head in followed:
                return None
            followed.add(head)
            path = (*stands_for, *rest)
            continue
        at = at.outer
    return None if binds_name else path


def _of_first(scope: Scope, rest: Reference, binds: bool) -> Reference | None:
    """Return what an attribute of a method's first argument is, if the class keeps it."""
    owner = scope.of_class
    assert owner is not None  # only methods have a first argument
    if rest[:1] == (TYPE,):
        return (owner.name, *rest[1:]) if rest[1:] else None
    if scope.first == "cls":
        return (owner.name, *rest) if rest else None
    if not rest or CALL in rest or (binds and len(rest) == 1) or rest[0] in owner.own:
        return None
    value = owner.attributes.get(rest[0])
    is_made = isinstance(value, ast.Call) and last_name(value) in _CONTAINERS
    return (owner.name, *rest) if is_made or isinstance(value, (ast.Dict, ast.List, ast.Set)) else None


def _results(modules: Modules, where: Module, function: str, steps: int = 0) -> Iterator[str]:
    """Yield the names of what a function returns, if a module or class keeps it."""
    for path in where.functions.get(function, ()) if steps < _MOST_STEPS else ():
        if path[0] == "cls" and "." in function:
            path = (function.rpartition(".")[0], *path[1:])
        resolved = _resolved(modules, where, path)
        if resolved is None:
            continue
        owner, name, *rest = resolved
        if name in modules[owner].variables and not rest:
            yield f"{owner}:{name}"
        elif name in modules[owner].classes and len(rest) == 1 and rest[0] != CALL:
            yield f"{owner}:{_declared(modules[owner], name, rest[0])}"
        elif name in modules[owner].functions and rest == [CALL]:
            yield from _results(modules, modules[owner], name, steps + 1)


def _declared(where: Module, name: str, attribute: str) -> str:
    """Return ``Class.attribute`` with the class of the module that declares it, which may be a base."""
    ancestor: Class | None = where.classes[name]
    for _ in range(_MOST_STEPS):
        if ancestor is None or attribute in ancestor.attributes:
            break
        ancestor = next((where.classes[base[0]] for base in ancestor.bases if base[0] in where.classes), None)
    return f"{name if ancestor is None else ancestor.name}.{attribute}"


def _resolved(
    modules: Modules, module: Module, path: Reference, scope: Scope | None = None, steps: int = 0
) -> Reference | None:
    """Return the module and the name in it that a reference begins with, and the rest; None if they are not Megatron's.

    A nested class is one name.
    """
    head, rest = path[0], path[1:]
    while scope is not None:
        if head in scope.imports:
            return _in_module(modules, (*scope.imports[head], *rest), steps)
        scope = scope.outer
    if head in module.classes:
        while rest and f"{head}.{rest[0]}" in module.classes:
            head, rest = f"{head}.{rest[0]}", rest[1:]
        return (module.name, head, *rest)
    if head in module.imports and head not in module.functions and head not in module.variables:
        return _in_module(modules, (*module.imports[head], *rest), steps)
    is_here = head in module.functions or head in module.variables or not steps
    return (module.name, *path) if is_here else None


def _in_module(modules: Modules, path: Reference, steps: int) -> Reference | None:
    for length in range(len(path) - 1, 0, -1) if steps < _MOST_STEPS else ():
        if (name := ".".join(path[:length])) in modules:
            return _resolved(modules, modules[name], path[length:], None, steps + 1)
    return None
