"""Parser of the command line. Its errors are one line, with the flag that was probably meant, in place of a long usage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_epp.launch.settings import nearest
from megatron_epp.report.table import printable

PICTURES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors. The parsers of its subcommands are of this class too."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.set_defaults(parser=self)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse arguments as `parse_args` does, with errors raised by the subcommand's own parser.

        The subcommand reports words that it does not know, and output files that it could not write.
        """
        found, unknown = self.parse_known_args(argv)
        command: Parser = found.parser
        if unknown:
            command.refuse(unknown)
        for action in command._actions:
            path = getattr(found, action.dest, None)
            if action.type in (output, picture) and path and (why := unwritable(Path(path))):
                command.error(f"argument {'/'.join(action.option_strings)}: {why}")
        return found

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with the words that this command does not know."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        told = [f"{flag}{nearest(flag, self._option_string_actions)}" for flag in flags] or unknown
        self.error(f"this command knows no {' '.join(told)}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{printable(f'{self.prog}: error: {message}; see {self.prog} --help')}\n")


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line.

    Attributes:
        name: as typed.
        purpose: a line for the list of commands.
        add_arguments: adds its flags.
        run: does it; returns the exit code.
        example: shown below its flags.
    """

    name: str
    purpose: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    example: str = ""


def add_output(parser: argparse._ActionsContainer, help: str, **changes: Any) -> None:
    """Add the flag that names the file to write."""
    settings: dict[str, Any] = {"type": output, "metavar": "FILE", "help": help}
    parser.add_argument("-o", "--output", **settings | changes)


def output(text: str) -> str:
    """Name a file to write. `unwritable` looks whether it can be."""
    return text


def picture(text: str) -> str:
    """Name a picture to write."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: a picture's name ends in {', '.join(PICTURES)}")
    return text


def unwritable(path: Path) -> str:
    """Return why a file cannot be written, known before anything is computed; empty if it can."""
    if path.is_dir():
        return f"{path} is a folder: give a file in it"
    return "" if path.parent.is_dir() else f"{path}: there is no folder {path.parent}; make it first"
