"""Asks whether tests would notice if a package were broken: changes it in one place, runs its tests, sees whether one fails.

    python scripts/mutants.py planner plan               as many mutants as are recorded of each, or 12
    python scripts/mutants.py                            of every package
    python scripts/mutants.py cost --number 20 --seed 3  others
    python scripts/mutants.py cost --under cost/kept.py  in a part of it
    python scripts/mutants.py cost --show                lists them, runs nothing
    python scripts/mutants.py cost --record              keeps the results in tests/mutants.json

A mutant is one change to one expression or statement of `megatron_epp/`, made from its syntax tree: another operator or
comparison, a constant that is off by one, a truth value turned round, two arguments swapped, a statement dropped, a result not
returned. Text, annotations, docstrings and log calls stay as they are. Every mutant is made in a temporary copy of the tracked
files, never in place. Which ones are drawn depends on the seed and on each one's own text: where code stays, its mutants do.

A package's own tests are those named for it, those that import it more often than any other, and a folder of its name in
`tests`. All that are not slow run, the shortest first, after the one that noticed the mutant before. A mutant counts as killed
where one fails or the run exceeds its time limit, which is several times what the tests take without a mutant. Some change
nothing that anyone could notice: `tests/mutants.json` names the reason, and they do not count.

Prints a line for each and the share that was killed, and the recorded one; the exit code is 1 where it is lower.
"""

from __future__ import annotations

import argparse
import ast
import collections
import copy
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_epp"
RECORDED = ROOT / "tests/mutants.json"
PYTEST = "-m 'not slow and not callers' --processes 2 -x -q -p no:cacheprovider --no-header --tb=line"
PATIENCE = 4.0
"""Time limit of a mutant's run, in runs without one."""
NUMBER, SEED = 12, 0

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


def drawn(package: str, number: int, seed: int, under: str = "") -> dict[str, Mutant]:
    """Some mutants of a package by name, those whose names have the least digests with a seed.

    Args:
        package: folder or module of `megatron_epp`.
        seed: the same one draws the same ones from the same files.
        under: part of a path that files must have.
    """
    top = ROOT / PACKAGE / package
    files = sorted(path for path in top.rglob("*.py") if under in path.as_posix()) if top.is_dir() else [top.with_suffix(".py")]
    mutants: dict[str, Mutant] = {}
    for path in files:
        source, before = path.read_bytes(), collections.Counter[str]()
        for mutant in mutants_of(str(path.relative_to(ROOT)), source):
            change = mutant.change(source)
            before[change] += 1
            again = f" ({before[change]})" if before[change] > 1 else ""
            mutants[f"{path.relative_to(ROOT / PACKAGE)}: {change}{again}"] = mutant
    print(
        f"{package}: {len(mutants):,} mutants of {len(files)} files; {min(number, len(mutants))} of them, seed {seed}",
        flush=True,
    )
    names = sorted(mutants, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return {name: mutants[name] for name in names[:number]}


def own_tests(package: str) -> list[str]:
    """Return the files of a package's own tests, relative to the root."""
    files = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        imports = collections.Counter(re.findall(rf"{PACKAGE}\.(\w+)", path.read_text())).most_common()
        is_named = re.match(rf"test_{package}(_|\b)", path.name) is not None or path.parent.name == package
        if is_named or [name for name, count in imports if count == imports[0][1]] == [package]:
            files.append(str(path.relative_to(ROOT)))
    return files


@dataclass(frozen=True, slots=True)
class Result:
    """Fate of a mutant.

    Attributes:
        mutant: its place and its change.
        noticed_by: the test that failed, or what else ended the run; empty if nothing did.
        equivalent: why no test can notice it, where that is so.
    """

    mutant: str
    noticed_by: str = ""
    equivalent: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """Fates of a package's mutants, drawn with a seed."""

    seed: int
    mutants: tuple[Result, ...]

    @property
    def killed(self) -> int:
        return sum(bool(result.noticed_by) for result in self.mutants)

    @property
    def counted(self) -> int:
        return sum(not result.equivalent for result in self.mutants)

    @property
    def share(self) -> float:
        return self.killed / max(1, self.counted)


def recorded() -> dict[str, Results]:
    """Return the results that are kept, by package."""
    if not RECORDED.exists():
        return {}
    return {
        package: Results(results["seed"], tuple(Result(**result) for result in results["mutants"]))
        for package, results in json.loads(RECORDED.read_text()).items()
    }


def record(package: str, results: Results) -> None:
    """Keep the results of a package."""
    results_by_package = recorded() | {package: results}
    RECORDED.write_text(
        json.dumps({name: asdict(results_by_package[name]) for name in sorted(results_by_package)}, indent=1) + "\n"
    )


class Copy:
    """The tracked files in a temporary folder, in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for name in (".venv", ".te"):  # blocks of the README activate the first; `scripts/te.sh` makes the second
            if (ROOT / name).is_dir():
                (folder / name).symlink_to(ROOT / name)

    def write(self, name: str, source: bytes) -> None:
        path = self._folder / name
        path.write_bytes(source)
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # it may look as old as the file

    def run(self, tests: str, limit_s: float | None, compiled: bool = True) -> tuple[str | None, str]:
        """Run the tests.

        Args:
            limit_s: longest time that they may take.
            compiled: run the planner's inner loops compiled, as kept on disk: a function does not notice there that one it
                calls has changed.

        Returns:
            What failed first, None if nothing did, and the end of the output.
        """
        environment = os.environ | {"PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1", "EPP_INSTALL": "no"}
        if not compiled:
            environment["MEGATRON_EPP_COMPILED"] = "0"
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
        if -process.returncode in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
            raise SystemExit(f"the tests were ended by signal {-process.returncode}: that says nothing of a mutant")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return None if process.returncode == 0 else (failed or [f"exit code {process.returncode}"])[0], output[-3000:]


def results_of(package: str, mutants: Mapping[str, Mutant], seed: int, keeps: bool) -> Results:
    """Run a package's own tests on each mutant, and print what becomes of it.

    Args:
        package: folder of `megatron_epp`.
        seed: with which they were drawn.
        keeps: record the results after each one, so that a run that is ended loses nothing.

    Raises:
        SystemExit: they fail without a mutant.
    """
    before = {result.mutant: result for result in recorded().get(package, Results(seed, ())).mutants}
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, files = Copy(Path(folder)), own_tests(package)
        tests = f"{PYTEST} {shlex.join(files)}"
        start_s = time.monotonic()
        fault, output = tree.run(tests, None)
        if fault is not None:
            raise SystemExit(f"the tests fail without a mutant: {fault}\n{output}")
        limit_s = 20 + PATIENCE * (time.monotonic() - start_s)
        print(f"without a mutant: {time.monotonic() - start_s:.0f} s", flush=True)
        for number, (name, mutant) in enumerate(mutants.items(), start=1):
            source = (ROOT / mutant.path).read_bytes()
            known = before.get(name, Result(name))
            start_s = time.monotonic()
            tree.write(mutant.path, mutant.applied(source))
            # A function does not notice in its compiled form, kept on disk, that one it calls has changed.
            is_compiled, noticed_by = "planner/kernels" not in mutant.path, None
            if (first := known.noticed_by.partition("::")[0]) in files:
                noticed_by, _ = tree.run(f"{PYTEST} {first}", limit_s, is_compiled)
            if noticed_by is None:
                noticed_by, _ = tree.run(tests, limit_s, is_compiled)
            tree.write(mutant.path, source)
            results.append(Result(name, noticed_by or "", "" if noticed_by else known.equivalent))
            if keeps:
                later = (before[name] for name in [*mutants][number:] if name in before)
                record(package, Results(seed, (*results, *later)))
            verdict = "killed    " if noticed_by else "equivalent" if known.equivalent else "survived  "
            print(f"{number:3} {verdict} {time.monotonic() - start_s:4.0f} s  line {mutant.line} of {name}", flush=True)
            if noticed_by:
                print(f"               {noticed_by}", flush=True)
    return Results(seed, tuple(results))


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.record and args.under:
        parser.error("--record keeps the results of whole packages: leave out --under")
    fell = []
    for package in args.packages or packages():
        before = recorded().get(package)
        number = args.number or (len(before.mutants) if before else NUMBER)
        mutants = drawn(package, number, args.seed, args.under)
        if args.show:
            for name, mutant in mutants.items():
                print(f"    line {mutant.line} of {name}")
            continue
        results = results_of(package, mutants, args.seed, keeps=args.record)
        print(f"{package}: killed {results.killed} of {results.counted}, {results.share:.0%}")
        if before is not None and args.seed == before.seed and not args.under:
            print(f"    recorded: {before.killed} of {before.counted}, {before.share:.0%}")
            fell += [package] * (results.share < before.share)
    if fell:
        print(f"fewer were noticed than recorded: {', '.join(fell)}")
    return int(bool(fell))


def packages() -> list[str]:
    """Return the packages of `megatron_epp`, in order."""
    return sorted(path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {PACKAGE} (default: all)")
    parser.add_argument("--number", type=int, help=f"mutants of each (default: as recorded, else {NUMBER})")
    parser.add_argument("--seed", type=int, default=SEED, help=f"draws other ones (default {SEED})")
    parser.add_argument("--under", default="", metavar="PART", help="only in files whose path has this part (default: all)")
    parser.add_argument("--show", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--record", action="store_true", help=f"keep the results in {RECORDED.relative_to(ROOT)}")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
