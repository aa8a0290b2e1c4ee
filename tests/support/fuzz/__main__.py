"""Read damaged files of every kind, and count what becomes of them.

    python -m tests.support.fuzz all 10000
    python -m tests.support.fuzz plan 1 --first 4711 --messages

Each format has a process of its own, whose memory is limited. A mutant depends only on its format, its number and the seed, so
the second command repeats what the first one did with number 4711. The exit code is 1 if there is a fault.
"""

import argparse
import logging
import os
import sys
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path

from tests.support.fuzz.formats import FORMATS
from tests.support.fuzz.judge import Format, limit_memory, run

_SHARED_MEMORY = Path("/dev/shm")  # no disk is written


def every() -> dict[str, Format]:
    """Return all formats; those of the second table import Megatron."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")  # of optional packages
        from tests.support.fuzz.mcore_formats import FORMATS as OTHERS

    return FORMATS | OTHERS


def main() -> int:
    """Run the campaign of one format, or a process for each of several."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("formats", help="names, with commas between; all for all of them")
    parser.add_argument("count", type=int, help="damaged files of each")
    parser.add_argument("--first", type=int, default=0, help="number of the first one (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all of them (%(default)s)")
    parser.add_argument("--messages", action="store_true", help="list the refusals, numbers replaced by 0")
    given = parser.parse_args()
    names = list(every()) if given.formats == "all" else given.formats.split(",")
    if unknown := next((name for name in names if name not in FORMATS and name not in every()), None):
        parser.error(f"there is no format {unknown}, but {', '.join(every())}")
    numbers = range(given.first, given.first + given.count)
    return max(_forked(name, numbers, given) for name in names)


def _forked(name: str, numbers: range, given: argparse.Namespace) -> int:
    """Run `one` in a process of its own, which limits and crashes do not leave, and return its exit code."""
    process = get_context("fork").Process(target=lambda: sys.exit(one(name, numbers, given)))
    process.start()
    process.join()
    if process.exitcode not in (0, 1):
        print(f"{name}: the process ended with code {process.exitcode}", flush=True)
    return 0 if process.exitcode == 0 else 1


def one(name: str, numbers: range, given: argparse.Namespace) -> int:
    """Run the campaign of a format and print its counts and faults; 1 if there are faults."""
    form = FORMATS[name] if name in FORMATS else every()[name]
    form.sound()
    os.environ.pop("EPP_TEST_UNSET", None)
    logging.getLogger("megatron").setLevel(logging.WARNING)
    limit_memory()
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        tally = run(name, form, numbers, given.seed, Path(folder))
    print(
        f"{name}: {tally.files:,} files, {tally.tried:,} readings: {tally.taken:,} taken, {tally.refused:,} refused, "
        f"{len(tally.faults):,} faults",
        flush=True,
    )
    for fault in tally.faults:
        print(f"  fault of {fault}".encode(errors="backslashreplace").decode())
    if given.messages:
        for message, count in tally.messages.most_common():
            print(f"  {count:7,} {message!r}")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
