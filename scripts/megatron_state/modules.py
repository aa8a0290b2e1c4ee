"""What a Python file defines, and what its functions change outside of themselves, from its syntax alone."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

CALL = "()"
"""Part of a reference behind what is called."""
TYPE = "__class__"
"""Part of a reference behind an object whose type is taken."""
_ADDING = "append", "appendleft", "extend", "insert", "setdefault", "add", "update", "put"
_CHANGING = frozenset((*_ADDING, "pop", "popleft", "popitem", "remove", "discard", "clear", "sort", "reverse"))
"""Methods that change a container. So do all whose name ends with an underscore: they are of tensors."""
_CACHES = frozenset(("lru_cache", "cache"))
_MAKING = frozenset(("__init__", "__new__", "__post_init__"))

Reference = tuple[str, ...]
"""A name with the attributes behind it: ``a.b[0].c()`` refers to a, b, c and a call."""


@dataclass(slots=True)
class Class:
    """A class.

    Attributes:
        name: within the module, with those of the classes around it.
        bases: as they are written.
        attributes: those of the class, with the expressions that they are bound to.
        own: attributes that methods bind on the instance.
        changes_itself: a method that does not make the instance binds or changes attributes of it.
        adds_to: attributes of the instance that such a method adds to or changes in place; the method, and the line.
    """

    name: str
    bases: list[Reference]
    attributes: dict[str, ast.expr | None] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    changes_itself: bool = False
    adds_to: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Scope:
    """A function and its names.

    Attributes:
        name: within the module.
        outer: the function around it.
        of_class: the class whose method it is.
        first: its first argument, if it is a method.
        local: names that it binds.
        globals: names that it declares to be global.
        stands_for: what local names are bound to.
        imports: names that it imports.
    """

    name: str
    outer: Scope | None
    of_class: Class | None
    first: str
    local: set[str]
    globals: set[str] = field(default_factory=set)
    stands_for: dict[str, Reference] = field(default_factory=dict)
    imports: dict[str, Reference] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A change in a function.

    Attributes:
        reference: what is changed, as it is written.
        binds: the last part of it is bound anew; else the object is changed.
        scope: the function.
        line: in the file.
        adds: it is bound to something made of what it was.
    """

    reference: Reference
    binds: bool
    scope: Scope
    line: int
    adds: bool = False


@dataclass(slots=True)
class Module:
    """A file.

    Attributes:
        name: with dots; empty for the package above all.
        is_package: the file is an `__init__.py`.
        variables: with the expressions that they are bound to.
        classes: by name.
        functions: methods too, and what they return.
        imports: modules and names of this source tree, by their names here.
        cached: functions whose results are kept, and their lines.
        changes: of its functions.
        lines: of variables and attributes of classes.
    """

    name: str
    is_package: bool
    variables: dict[str, ast.expr | None] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    functions: dict[str, list[Reference]] = field(default_factory=dict)
    imports: dict[str, Reference] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """Path from the top of the source tree."""
        return f"{self.name.replace('.', '/')}{'/__init__' if self.is_package else ''}.py"


def read(name: str, is_package: bool, text: bytes, root: str) -> Module:
    """Return what a file says. `root` is the package above all, as absolute imports name it."""
    module = Module(name, is_package)
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # escapes in strings
        _define(_Reader(module, root), ast.parse(text).body, "", None)
    return module


def reference(node: ast.expr) -> Reference | None:
    """Return an expression as a reference; None if it begins with no name."""
    parts: list[str] = []
    while True:
        if isinstance(node, ast.Name):
            return (node.id, *reversed(parts))
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and last_name(node) == "type" and node.args:
            parts.append(TYPE)
            node = node.args[0]
        elif isinstance(node, ast.Call):
            parts.append(CALL)
            node = node.func
        else:
            return None


def last_name(node: ast.expr) -> str:
    """Return the last name of what is called or referred to: `lru_cache` of `functools.lru_cache(maxsize=8)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@dataclass(slots=True)
class _Reader:
    module: Module
    root: str

    def imported(self, node: Any) -> dict[str, Reference]:
        """Return what a statement imports of this source tree, by the names that it binds."""
        if isinstance(node, ast.Import):
            names = [(alias.asname, tuple(alias.name.split("."))) for alias in node.names]
            return {alias: path[1:] for alias, path in names if alias and path[0] == self.root}
        base = node.module.split(".") if node.module else []
        if node.level:
            package = self.module.name.split(".")
            base = [part for part in package if part][: len(package) - node.level + self.module.is_package] + base
        elif base[:1] == [self.root]:
            base = base[1:]
        else:
            return {}
        return {alias.asname or alias.name: (*base, alias.name) for alias in node.names}


def _define(reader: _Reader, body: Iterable[ast.stmt], prefix: str, of_class: Class | None) -> None:
    """Take in statements that run when the module is imported."""
    module = reader.module
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = prefix + node.name
            module.functions.setdefault(name, [])
            if any(last_name(decorator) in _CACHES for decorator in node.decorator_list):
                module.cached[name] = node.lineno
            _function(reader, node, name, None, of_class)
        elif isinstance(node, ast.ClassDef):
            definition = Class(prefix + node.name, [path for base in node.bases if (path := reference(base))])
            module.classes[definition.name] = definition
            _define(reader, node.body, f"{definition.name}.", definition)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module.imports |= reader.imported(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            _bind(module, node, prefix, module.variables if of_class is None else of_class.attributes)
        else:  # `if`, `try`, `with`, `for`
            for block in ("body", "orelse", "finalbody"):
                _define(reader, getattr(node, block, ()), prefix, of_class)
            for handler in getattr(node, "handlers", ()):
                _define(reader, handler.body, prefix, of_class)


def _bind(module: Module, node: ast.Assign | ast.AnnAssign, prefix: str, names: dict[str, ast.expr | None]) -> None:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        for element in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(element, ast.Name):
                names[element.id] = node.value
                module.lines[prefix + element.id] = node.lineno


@dataclass(slots=True)
class _Body:
    """A function that is read."""

    reader: _Reader
    scope: Scope
    changes: list[Change] = field(default_factory=list)
    inner: list[tuple[Any, str]] = field(default_factory=list)

    def change(self, path: Reference | None, binds: bool, node: Any, adds: bool = False) -> None:
        if path is not None:
            self.changes.append(Change(path, binds, self.scope, node.lineno, adds))


def _function(reader: _Reader, node: Any, name: str, outer: Scope | None, of_class: Class | None) -> None:
    """Take in what a function changes, and the functions in it."""
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument]
    body = _Body(reader, Scope(name, outer, of_class, names[0] if names and of_class is not None else "", set(names)))
    waiting = list(node.body) if isinstance(node.body, list) else [node.body]
    while waiting:
        now = waiting.pop()
        if not _names(body, now):
            _changes(body, now)
            waiting.extend(ast.iter_child_nodes(now))
    _note_own(body)
    reader.module.changes += body.changes
    for function, inner_name in body.inner:
        _function(reader, function, inner_name, body.scope, of_class)


def _note_own(body: _Body) -> None:
    """Note which attributes of its instance a method binds, and which it adds to or changes in place."""
    owner, first = body.scope.of_class, body.scope.first
    if owner is None or first == "cls":
        return
    makes = body.scope.name.rpartition(".")[2] in _MAKING
    for change in body.changes:
        head, *rest = change.reference
        if head != first or not rest or rest[0] in (CALL, TYPE):
            continue
        if change.binds and len(rest) == 1:
            owner.own.add(rest[0])
        if not makes:
            owner.changes_itself = True
            if CALL not in rest and (change.adds or not change.binds):
                owner.adds_to.append((rest[0], body.scope.name, change.line))


def _names(body: _Body, node: ast.AST) -> bool:
    """Take in a node that binds names; return whether nothing inside of it matters."""
    scope = body.scope
    match node:
        case ast.Name(id=name):
            if not isinstance(node.ctx, ast.Load):
                scope.local.add(name)
                body.change((name,), True, node)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            name = getattr(node, "name", "<lambda>")
            scope.local.add(name)
            body.inner.append((node, f"{scope.name}.{name}"))
        case ast.Global(names=names):
            scope.globals.update(names)
        case ast.Import() | ast.ImportFrom():
            scope.imports |= body.reader.imported(node)
        case _:
            return False
    return True


def _changes(body: _Body, node: ast.AST) -> None:
    """Take in what a node changes by itself."""
    match node:
        case ast.Attribute() | ast.Subscript() if not isinstance(node.ctx, ast.Load):
            body.change(reference(node), isinstance(node, ast.Attribute), node)
        case ast.AugAssign(target=target):
            body.change(reference(target), True, node, adds=True)
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            if path := reference(value):
                body.scope.stands_for.setdefault(name, path)
        case ast.Assign(targets=[ast.Attribute() as target, *_], value=value) if path := reference(target):
            attributes = (of for of in ast.walk(value) if isinstance(of, ast.Attribute) and of.attr == target.attr)
            if any(reference(attribute) == path for attribute in attributes):
                body.change(path, True, node, adds=True)
        case ast.Call(func=ast.Attribute(attr=name, value=value)):
            if name in _CHANGING or (name.endswith("_") and not name.endswith("__")):
                body.change(reference(value), False, node)
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            if path := reference(owner):
                body.change((*path, name), True, node)
        case ast.Return(value=ast.expr() as value) if body.scope.outer is None and (path := reference(value)):
            body.reader.module.functions[body.scope.name].append(path)
        case _:
            pass
