"""Changes to one expression or statement of a source, made from its syntax tree, by which `scripts/mutants.py` damages it.

Another operator or comparison, a constant that is off by one, a truth value turned round, two arguments swapped, a statement
dropped, a result not returned. Text, annotations, docstrings and log calls stay as they are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_LOGGING = {"debug", "info", "warning", "error", "exception", "log", "warn"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change to one place of a file.

    Attributes:
        path: file, relative to the root.
        line: first line of what changes, from 1.
        start: its first byte in the file.
        end: the first byte behind it.
        kind: name of the change.
        text: what is written there instead.
    """

    path: str
    line: int
    start: int
    end: int
    kind: str
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def change(self, source: bytes) -> str:
        """Return what it changes, in words."""
        was = " ".join(source[self.start : self.end].decode().split())
        return f"{self.kind}: {_short(was)}  ->  {_short(' '.join(self.text.split()))}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file.

    Args:
        source: its text in UTF-8.
    """
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in _reachable(tree):
        for kind, changed in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = changed if isinstance(changed, str) else _unparsed(changed)
            mutants.append(Mutant(path, node.lineno, start, end, kind, text))
    return mutants


def _unparsed(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node))
    return f"({text})" if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp) else text


def _reachable(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Expressions and statements that do something: no annotations, text, logging, or code for type checkers."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "type_params", "type_comment"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or _is_silent(node):
                continue
            if isinstance(node, ast.expr | ast.stmt):
                yield node
            yield from _reachable(node)


def _is_silent(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Raise | ast.TypeAlias | ast.Assert):
        return True
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return True  # a docstring, or the three dots of a protocol
        call = node.value.func if isinstance(node.value, ast.Call) else None
        return isinstance(call, ast.Attribute) and call.attr in _LOGGING
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return False


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST | str]]:
    """Names of the changes to a node, each with what stands there instead."""
    match node:
        case ast.BinOp(op=op) if type(op) in SWAPPED and not _has_text(node):
            yield "operator", _with(node, op=SWAPPED[type(op)]())
        case ast.BoolOp(op=op):
            yield "operator", _with(node, op=SWAPPED[type(op)]())
        case ast.Compare(ops=[op, *rest]) if type(op) in SWAPPED:
            yield "comparison", _with(node, ops=[SWAPPED[type(op)](), *rest])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "negation", operand
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(args=[first, second, *rest]) if not any(isinstance(arg, ast.Starred) for arg in node.args):
            same = ast.dump(first) == ast.dump(second)
            if not same and not (isinstance(node.func, ast.Name) and node.func.id in ("min", "max")):
                yield "arguments", _with(node, args=[second, first, *rest])
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue():
            yield "dropped statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", "pass"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "result", "return None"
        case _:
            pass


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str))
        for child in ast.walk(node)
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
