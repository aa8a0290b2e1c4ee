"""Writes docs/flags.md from the parsers themselves: `python scripts/write_flags.py`. A test checks that the file is current."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron_epp.cli import main as cli
from megatron_epp.cli.terminal import Parser
from megatron_epp.mcore.arguments.conflicts import IDLE, IMPLIED, MegatronFlag
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.refusals import OF_DOCUMENTS
from megatron_epp.mcore.arguments.table import EVERYDAY, ROWS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
HEAD = """\
<!-- Written by scripts/write_flags.py from mcore/arguments/table.py and the commands: change those, and run it again. -->

# Flags

Training takes Megatron's own flags and the flags of the first two tables; in YAML they stand under `epp:` without the prefix
(`epp.memory_cap_gb=70`, and `epp.enabled` for `--epp`). Everyday flags come first. Commands also take training's names of their
flags (`--epp-layout` for `--layout`), and older ones.
"""
REFUSED = """\
## Megatron's flags that --epp refuses

All that are given are named at once, with the advice. More depends on several flags together: see [supported.md](supported.md).
"""
NO_EFFECT = """\
## Megatron's data flags that change nothing with --epp

A line at start-up names those that are given. It is always so: {implied}. There is nothing for them to do: {idle}.
"""
Row = tuple[str, str, str]
TITLES = "flag", "default", "what it does"


def document() -> str:
    """The whole file."""
    training = add_epp_args(argparse.ArgumentParser(prog="pretrain_gpt.py", add_help=False))
    everyday = {ROWS[setting].training for setting in EVERYDAY}
    refused = [(code(row.flag), allowed(row.allowed), row.advice) for row in OF_DOCUMENTS]
    parts = [
        HEAD,
        "## Training\n",
        table(rows_of(training, lambda action: action.option_strings[0] in everyday)),
        "More:\n",
        table(rows_of(training, lambda action: action.option_strings[0] not in everyday)),
        REFUSED,
        table(refused, ("flag", "but for", "advice")),
    ]
    parts.append(NO_EFFECT.format(implied=flags_in(IMPLIED), idle=flags_in(IDLE)))
    above: dict[Row, str] = {}
    for name, parser in commands().items():
        parts.append(f"## megatron-epp {name}\n")
        if name in cli.NAMES:
            short = cli.NAMES[name]
            parts.append(f"Short for `megatron-epp {short.command} --{short.switch}`.\n")
            continue
        parts.append(f"{parser.description}\n")
        parts += tables_of(parser, above, name)
    return "\n".join(parts)


def tables_of(parser: Parser, above: dict[Row, str], command: str) -> Iterator[str]:
    """The flags of a command; those that a command above has are named, not told again."""
    rows = rows_of(parser)
    if new := [row for row in rows if row not in above]:
        yield table(new)
    if again := [row for row in rows if row in above]:
        yield f"And, as `megatron-epp {above[again[0]]}` does: {'; '.join(row[0] for row in again)}.\n"
    above |= dict.fromkeys(new, command)


def flags_in(flags: Iterable[MegatronFlag]) -> str:
    return ", ".join(code(flag.flag) for flag in flags)


def commands() -> dict[str, Parser]:
    (action,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def table(rows: Iterable[Row], titles: Row = TITLES) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ("---",) * 3, *rows))


def allowed(values: Iterable[object]) -> str:
    """Values that a flag may take; empty where it may only be left out."""
    said = (value for value in values if value is not None and value is not False and value != [])
    return ", ".join(code(words(value)) for value in said)


def rows_of(parser: argparse.ArgumentParser, takes: Callable[[argparse.Action], bool] = bool) -> list[Row]:
    """A row per flag that is taken, by default every one."""
    shown = (action for action in parser._actions if not isinstance(action, argparse._HelpAction) and takes(action))
    return [row_of(action, parser) for action in shown if action.help != argparse.SUPPRESS]


def row_of(action: argparse.Action, parser: argparse.ArgumentParser) -> Row:
    value = parser._get_formatter()._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    names = action.option_strings or [""]
    spelled = ", ".join(code(f"{name} {value if name == names[-1] else ''}".strip()) for name in names)
    required = " (required)" if action.required and action.option_strings else ""
    unsaid = action.default is None or action.default is False or not action.option_strings  # then the help says what happens
    help_text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return spelled + required, "" if unsaid else code(words(action.default)), escaped(help_text)


def words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)


def code(text: str) -> str:
    return f"`{escaped(text)}`"


def escaped(text: str) -> str:
    """A bar ends a cell, even inside of code."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
