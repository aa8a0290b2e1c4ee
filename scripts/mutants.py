"""Asks how much breakage the fast tests notice: damages the package in one place, runs them, and looks whether one fails.

    python scripts/mutants.py                          50 mutants, seed 0
    python scripts/mutants.py --number 20 --seed 3     others, and fewer
    python scripts/mutants.py --show                   lists them, runs nothing
    python scripts/mutants.py --under planner/search   in a part of the package alone

A mutant is one change to one expression or statement of `megatron_epp/`, made from its syntax tree: another operator or
comparison, a constant that is off by one, a truth value turned round, two arguments swapped, a statement dropped, a result not
returned. Text, annotations, docstrings and log calls stay as they are. Every mutant is made in a temporary copy of the tracked
files, never in place. The fast tests of the folder that is nearest to it run first, then those of the others. It counts as
killed where a test fails or the run exceeds its time limit, which is several times what the tests take without a mutant. Some
mutants change nothing that anybody could notice, so all cannot be killed.

Prints a line for each and the share that was killed; the exit code is 1 where that is below `--goal`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_epp"
TESTS = "-m fast -n 0 -x -q -p no:cacheprovider --no-header --tb=line"
PATIENCE = 4.0
"""Time limit of a mutant's run, in runs without one."""
NEAREST = {"runtime": "cpu", "data": "cpu", "mcore": "mcore", "contrib": "contrib"}
"""Folder of the tests that are nearest to a package, by package; of the others it is `pure`."""
FOLDERS = ("pure", "cpu", "mcore", "contrib")

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

    def describe(self, source: bytes) -> str:
        was = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line}: {self.kind}: {_short(was)}  ->  {_short(' '.join(self.text.split()))}"


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file.

    Args:
        path: file, relative to the root.
        source: its text in UTF-8.
    """
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _reachable(tree):
        for kind, changed in _changes(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            text = changed if isinstance(changed, str) else _unparsed(changed)
            found.append(Mutant(path, node.lineno, start, end, kind, text))
    return found


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
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in ast.walk(node)
    )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def chosen(number: int, seed: int, under: str = "") -> list[Mutant]:
    """Some mutants of the package, drawn with a seed from those of all its files.

    Args:
        number: how many.
        seed: the same one draws the same ones from the same files.
        under: part of a path that files must have.
    """
    files = sorted(path for path in (ROOT / PACKAGE).rglob("*.py") if under in path.as_posix())
    every = [mutant for path in files for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())]
    print(f"{len(every):,} mutants of {len(files)} files; {min(number, len(every))} of them, seed {seed}", flush=True)
    return random.Random(seed).sample(every, min(number, len(every)))


class Copy:
    """The tracked files in a temporary folder, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, name: str, source: bytes) -> None:
        path = self._folder / name
        path.write_bytes(source)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # it may look as old as the file

    def fault(self, mutant: Mutant, tests: str, limit_s: float) -> str | None:
        """Run all fast tests on what is written, the nearest first. Returns what failed first, None if nothing did."""
        nearest = NEAREST.get(Path(mutant.path).parts[1], "pure")
        for folder in sorted(FOLDERS, key=lambda name: name != nearest):
            fault, _ = self.run(f"{tests} tests/{folder}", limit_s, "planner/kernels" not in mutant.path)
            if fault is not None:
                return fault
        return None

    def run(self, tests: str, limit_s: float | None, compiled: bool = True) -> tuple[str | None, str]:
        """Run the tests.

        Args:
            tests: arguments of pytest.
            limit_s: longest time that they may take.
            compiled: run the planner's inner loops compiled, as kept on disk: a function does not notice there that one it
                calls has changed.

        Returns:
            What failed first, None if nothing did, and the end of the output.
        """
        environment = os.environ | {
            "PYTHONPATH": str(self._folder),
            "MEGATRON_EPP_COMPILED": str(int(compiled)),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", *shlex.split(tests)]
        process = subprocess.Popen(
            command, cwd=self._folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "it takes too long", ""
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        return None if process.returncode == 0 else (failed or [f"exit code {process.returncode}"])[0], output[-3000:]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    picked = chosen(args.number, args.seed, args.under)
    if args.show:
        for number, mutant in enumerate(picked, start=1):
            print(f"{number:3} {mutant.describe((ROOT / mutant.path).read_bytes())}")
        return 0
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Copy(Path(folder))
        start_s = time.monotonic()
        fault, output = tree.run(args.tests, None)
        if fault is not None:
            print(f"the tests fail without a mutant: {fault}\n{output}")
            return 2
        limit_s = 20 + PATIENCE * (time.monotonic() - start_s)
        print(f"without a mutant: {time.monotonic() - start_s:.0f} s", flush=True)
        for number, mutant in enumerate(picked, start=1):
            source = (ROOT / mutant.path).read_bytes()
            start_s = time.monotonic()
            tree.write(mutant.path, mutant.applied(source))
            fault = tree.fault(mutant, args.tests, limit_s)
            tree.write(mutant.path, source)
            if fault is None:
                survivors.append(mutant)
            verdict = "survived" if fault is None else "killed  "
            print(f"{number:3} {verdict} {time.monotonic() - start_s:4.0f} s  {mutant.describe(source)}", flush=True)
            if fault is not None:
                print(f"      {_short(fault)}", flush=True)
    share = 1 - len(survivors) / len(picked)
    print(f"\nkilled {len(picked) - len(survivors)} of {len(picked)}, {share:.0%}; the goal is {args.goal:.0%}")
    return int(share < args.goal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=50, help="mutants to run (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="draws other ones (default 0)")
    parser.add_argument("--under", default="", metavar="PART", help="only in files whose path has this part (default: all)")
    parser.add_argument("--tests", default=TESTS, metavar="ARGUMENTS", help=f"arguments of pytest (default {TESTS!r})")
    parser.add_argument("--goal", type=float, default=0.8, help="least share that must be killed (default 0.8)")
    parser.add_argument("--show", action="store_true", help="list the mutants and run nothing")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
