"""Asks whether tests would notice if a package were broken: changes it in one place, runs its tests, sees whether one fails.

    python -m scripts.mutants planner plan               as many mutants as are recorded of each, or 12
    python -m scripts.mutants                            of every package
    python -m scripts.mutants cost --number 20 --seed 3  others
    python -m scripts.mutants cost --record              keeps the results in tests/mutants.json

A mutant is one change to one expression or statement of `megatron_epp/` (`scripts/mutations.py`), made in a temporary copy of
the tracked files, never in place. Which ones are drawn depends on the seed and on each one's own text: where code stays, its
mutants do.

A package's own tests are those named for it, those that import it more often than any other, and a folder of its name in
`tests`. All that are not slow run, the shortest first, after the one that noticed the mutant before. A mutant counts as killed
where one fails or the run exceeds its time limit, which is several times what the tests take without a mutant. Some change
nothing that anyone could notice: `tests/mutants.json` names the reason, and they do not count.

Prints a line for each and the share that was killed, and the recorded one; the exit code is 1 where it is lower.
"""

from __future__ import annotations

import argparse
import collections
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "megatron_epp"
RECORDED = ROOT / "tests/mutants.json"
PYTEST = "-m 'not slow and not callers' --processes 2 -x -q -p no:cacheprovider --no-header --tb=line"
PATIENCE = 4.0
"""Time limit of a mutant's run, in runs without one."""
NUMBER, SEED = 12, 0


def drawn(package: str, number: int, seed: int) -> dict[str, Mutant]:
    """Some mutants of a package by name, those whose names have the least digests with a seed.

    Args:
        package: folder or module of `megatron_epp`.
        seed: the same one draws the same ones from the same files.
    """
    top = ROOT / PACKAGE / package
    files = sorted(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]
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
    by_package = {name: asdict(own) for name, own in sorted((recorded() | {package: results}).items())}
    RECORDED.write_text(json.dumps(by_package, indent=1) + "\n")


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
    args = _parser().parse_args(argv)
    fell = []
    for package in args.packages or packages():
        before = recorded().get(package)
        number = args.number or (len(before.mutants) if before else NUMBER)
        mutants = drawn(package, number, args.seed)
        results = results_of(package, mutants, args.seed, keeps=args.record)
        print(f"{package}: killed {results.killed} of {results.counted}, {results.share:.0%}")
        if before is not None and args.seed == before.seed:
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
    parser.add_argument("--record", action="store_true", help=f"keep the results in {RECORDED.relative_to(ROOT)}")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
