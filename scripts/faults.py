"""Asks whether the tests of training notice twenty faults that matter: wrong gradients, losses, random masks, messages, copies.

    python -m scripts.faults                 all of them
    python -m scripts.faults --only "loss"   those with this in their names

Where `scripts/mutants.py` draws changes at random and asks all tests of a package, those of `faults.yaml` are chosen: what
breaks in `mcore/` or `runtime/`, and the tests that have to notice, which alone are run, in a temporary copy of the tracked
files. A fault counts as killed where one of them fails or takes too long; without a fault they have to pass. The exit code is 1
where one survives.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.mutants import PACKAGE, ROOT, Copy

PYTEST = "-x -q -m 'not slow' -p no:cacheprovider --no-header --tb=line"
LIMIT_S = 600.0
"""Longest time that the tests of a fault may take."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A change to one place of a file of the package.

    Attributes:
        name: what breaks.
        path: file, relative to the package.
        was: text that is in the file once.
        now: what is written there instead.
        tests: arguments of pytest, for the tests that have to notice.
    """

    name: str
    path: str
    was: str
    now: str
    tests: str

    def applied(self, source: str) -> str:
        """Return the source with the fault. Raises ValueError unless its place is there once."""
        if (count := source.count(self.was)) != 1:
            raise ValueError(f"{self.path} has {self.was!r} {count} times, not once: rewrite the fault {self.name!r}")
        return source.replace(self.was, self.now)


FAULTS = tuple(Fault(**fault) for fault in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with this text in their names (default: all)")
    args = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if args.only in fault.name]
    sources = {fault.path: (ROOT / PACKAGE / fault.path).read_text() for fault in faults}
    changed = {fault.name: fault.applied(sources[fault.path]) for fault in faults}
    survivors = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Copy(Path(folder))
        for tests in dict.fromkeys(fault.tests for fault in faults):
            failure, output = tree.run(f"{PYTEST} {tests}", None)
            if failure is not None:
                print(f"{tests} fails without a fault: {failure}\n{output}")
                return 2
        for number, fault in enumerate(faults, start=1):
            start_s, path = time.monotonic(), f"{PACKAGE}/{fault.path}"
            tree.write(path, changed[fault.name].encode())
            failure, _ = tree.run(f"{PYTEST} {fault.tests}", LIMIT_S)
            tree.write(path, sources[fault.path].encode())
            survivors += [fault] * (failure is None)
            verdict = "survived" if failure is None else "killed  "
            print(f"{number:3} {verdict} {time.monotonic() - start_s:4.0f} s  {fault.name}\n      {failure or ''}", flush=True)
    print(f"\nkilled {len(faults) - len(survivors)} of {len(faults)}")
    return int(bool(survivors))


if __name__ == "__main__":
    raise SystemExit(main())
