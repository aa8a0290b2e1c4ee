"""Compares figures of the README and the documentation with what their commands print now: `python -m scripts.figures`.

A command of a benchmark belongs to the next table of its page, and that in a row of the README to the row. Those of `PLANNED`
are run, which take minutes and print the same on every machine: each figure of a row must be in the row that the command prints
in its place, or, where cells list several figures, in as many rows; those of the README anywhere in what it prints, to as many
decimals. A line for each; the exit code is 1 where one is not printed.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))
PLANNED = ("models", "rl", "long", "memory", "orders.groups")
"""Benchmarks of plans whose figures are deterministic and cheap."""
_COMMAND = re.compile(rf"`python -m scripts\.bench\.({'|'.join(map(re.escape, PLANNED))})((?: [^`]*)?)`")
_FIGURE_CELL = re.compile(r"[*<~]*\d")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """A row with figures.

    Attributes:
        where: page and line.
        command: that prints them: the benchmark, and its flags.
        cells: of the row.
        number: of the row in its table, from 0; None for a row of the README, whose figures may be anywhere.
    """

    where: str
    command: tuple[str, str]
    cells: tuple[str, ...]
    number: int | None


def cells_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def numbers_in(text: str) -> list[str]:
    return [number.replace(",", "") for number in _NUMBER.findall(text)]


def rows_of(page: Path) -> Iterator[Row]:
    """Yield the rows of a page's tables that belong to a command."""
    command: tuple[str, str] | None = None
    number = -2  # the titles and the line below them come first
    for at, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.startswith("|"):
            if number > -2:
                command, number = None, -2
            if match := _COMMAND.search(line):
                command = match[1], match[2]
            continue
        where, cells = f"{page.name}:{at}", cells_of(line)
        if match := _COMMAND.search(cells[-1]):
            yield Row(where, (match[1], match[2]), cells[:-1], None)
        elif command is not None and number >= 0:
            yield Row(where, command, cells, number)
        number += 1


@functools.cache
def printed(benchmark: str, flags: str) -> tuple[str, ...]:
    """Return the rows of the first table that a command prints."""
    command = [sys.executable, "-W", "ignore", "-m", f"scripts.bench.{benchmark}", *shlex.split(flags)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = output.partition("| --- ")[2].splitlines()[1:]
    end = next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return tuple(lines[:end])


def compared(row: Row) -> Iterator[tuple[str, bool]]:
    """Yield the figures of a row, and whether the command prints them."""
    lines = printed(*row.command)
    cells = [cell for cell in row.cells[1:] if _FIGURE_CELL.match(cell)]
    rows = max((cell.count(", ") + 1 for cell in cells), default=1)
    there = numbers_in(" ".join(lines if row.number is None else lines[row.number * rows : (row.number + 1) * rows]))
    for number in (number for cell in cells for number in numbers_in(cell)):
        decimals = len(number.partition(".")[2])
        yield number, any(round(float(value), decimals) == float(number) for value in there)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PLANNED, help="figures of this benchmark (default: all)")
    args = parser.parse_args(argv)
    differing = 0
    for row in (row for page in PAGES for row in rows_of(page) if args.only in (None, row.command[0])):
        for number, same in compared(row):
            differing += not same
            print(
                f"{row.where} {row.cells[0]}: {number} {'same' if same else 'not printed'} ({''.join(row.command)})", flush=True
            )
    print(f"{differing} figures are not printed")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
