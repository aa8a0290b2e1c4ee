"""A parser whose errors are one line, with the flag that was probably meant, in place of the usage of dozens of flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_epp.cli.types import output, picture, unwritable
from megatron_epp.launch.settings import nearest
from megatron_epp.report.table import printable


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
