"""Writes docs/flags.md from the parsers themselves: `python scripts/write_flags.py`. A test checks that the file is current."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_epp.mcore.arguments.consequences import IDLE, IMPLIED
from megatron_epp.mcore.arguments.parser import add_epp_args
from megatron_epp.mcore.arguments.refusals import CONFLICTS, OF_DOCUMENTS
from megatron_epp.mcore.arguments.rule import OUT, Door, Rule
from megatron_epp.mcore.arguments.setting_checks import HONOURED, HONOURED_BY_MEGATRON
from megatron_epp.mcore.arguments.table import EVERYDAY, ROWS
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.cli.terminal import Parser

TARGET = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
TRAINING, MICROBATCHES = "T", "M"
OF_MICROBATCHES = HONOURED | HONOURED_BY_MEGATRON | {"epp_costs"}  # apply to a script's own microbatches, of costs the learnt
COMMANDS = {"plan": "P", "compare": "C", "advise": "A", "doctor": "D"}  # letters of commands in the order of their sections
IN_EVERY_COMMAND = "--debug"
HEAD = """\
<!-- Written by scripts/write_flags.py from mcore/arguments/table.py and the commands: change those, and run it again. -->

# Flags

A setting has one row here, and its letters say who takes it: T training, M training with `--epp-microbatches user`,
P `megatron-epp plan`, C `compare`, A `advise`, D `doctor --profile`. Training takes Megatron's flags, too. Commands take each
name without `epp-` as well (`--layout`). In YAML the flags of training stand under `epp:` without the prefix
(`epp.memory_cap_gb=70`, and `epp.enabled` for `--epp`). A value in brackets may be left out, which means `on`.
"""
REFUSED = """\
## Megatron's flags that --epp refuses

All that are given are named at once. Leave them out, or do what the last column says. Those with *(documents)* are taken with
`--epp-microbatches user`, router replay with `--epp-order given`. Others [do not go together](supported.md#by-feature).
"""
NO_EFFECT = """\
## Megatron's data flags that change nothing with --epp

A line at start-up names those that are given. It is always so: {implied}. There is nothing for them to do: {idle}.
"""
OF_COMMANDS = f"""\
## Flags of single commands

`megatron-epp plan`, `compare`, `advise` and `doctor --profile` take the settings above, too. Every command takes
`{IN_EVERY_COMMAND}`, which prints the traceback of an error. {
    ", ".join(f"`{name}` is `{command} --{switch}`" for name, (command, switch, _) in cli.NAMES.items())
}.
"""
DEFAULT = re.compile(r"\s*\(default: (.*)\)$")
UNSET = "none", "do not"
"""Defaults in the help of flags that do nothing unless they are given; the page leaves the cell empty."""
TITLES = "flag", "of", "default", "what it does"


@dataclass(frozen=True, slots=True)
class Use:
    """A flag as one parser takes it.

    Attributes:
        letter: of the command; `TRAINING`.
        name: spelled with its value.
        default: what its text says of it, or its value.
    """

    letter: str
    name: str
    default: str
    text: str


def document() -> str:
    """The whole file."""
    uses = settings()
    more = [setting for setting, of in uses.items() if of[0].letter == TRAINING and setting not in EVERYDAY]
    others = [setting for setting, of in uses.items() if of[0].letter != TRAINING]
    parts = [HEAD]
    for title, chosen in ("Everyday", EVERYDAY), ("More of training", more), ("Of commands alone", others):
        parts += [f"## {title}\n", table((setting_row(setting, uses[setting]) for setting in chosen), TITLES)]
    parts += [REFUSED, table(refused(), ("flags", "but for", "advice or reason"))]
    implied, idle = (", ".join(code(flag.flag) for flag in flags) for flags in (IMPLIED, IDLE))
    parts += [NO_EFFECT.format(implied=implied, idle=idle), OF_COMMANDS]
    above: set[tuple[str, ...]] = set()
    texts: dict[str, str] = {}
    for name, parser in commands().items():
        if name in cli.NAMES:
            continue
        parts.append(f"### megatron-epp {name}\n\n{parser.description}\n")
        rows = [(use.name, use.default, use.text) for setting, use in uses_of(parser, "") if not setting]
        if new := [row for row in rows if row not in above]:
            parts.append(table((briefer(row, texts) for row in new), ("flag", "default", "what it does")))
        if repeated := [row[0] for row in rows if row in above]:
            parts.append(f"And, as above: {', '.join(repeated)}.\n")
        above |= set(rows)
    return "\n".join(parts)


def briefer(row: tuple[str, str, str], texts: dict[str, str]) -> tuple[str, str, str]:
    """Return a flag's row without what the text of an earlier one of that name says, and add its text to `texts`."""
    name, text = row[0].partition("`")[2].partition(" ")[0].strip("`,"), row[2]
    above = texts.setdefault(name, text)
    if above is text or not name.startswith("-") or not (above.startswith(text) or text.startswith(above)):
        return row
    return *row[:2], f"As above{text[len(above) :]}"


def settings() -> dict[str, list[Use]]:
    """Return the parsers' uses of every setting of the table: of training first, then by command."""
    parsers: list[tuple[str, argparse.ArgumentParser]] = [(TRAINING, training())]
    parsers += [(letter, commands()[name]) for name, letter in COMMANDS.items()]
    uses: dict[str, list[Use]] = {}
    for letter, parser in parsers:
        for setting, use in uses_of(parser, letter):
            if setting:
                uses.setdefault(setting, []).append(use)
    return uses


def setting_row(setting: str, uses: Sequence[Use]) -> tuple[str, ...]:
    """Return the row of a setting: its names, the text of its first use, and what differs in later ones."""
    first, *later = uses
    defaults: dict[str, str] = {}
    for use in uses:
        defaults[use.default] = defaults.get(use.default, "") + use.letter
    default = "; ".join(text if text == first.default else f"{letters}: {text}" for text, letters in defaults.items() if text)
    by_word = {use.name.split(" ")[0].replace("epp-", ""): use.name for use in reversed(uses)}  # the first with each name
    names, text = [*by_word.values()][::-1], first.text
    if later and first.letter == TRAINING:
        texts = {re.sub(r"--[\w-]+", "--", said) for said in (text, later[0].text)}  # each names flags in its own way
        text += f". In commands: {later[0].text}" * (len(texts) > 1)
    letters = "".join(use.letter for use in uses)
    if ROWS[setting].dest in OF_MICROBATCHES:
        letters = letters.replace(TRAINING, TRAINING + MICROBATCHES)
    return ", ".join(names), letters, default, text


def refused() -> list[tuple[str, str, str]]:
    """Return Megatron's flags that are refused, those with the same advice in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    of_microbatches = {row.flag for row in CONFLICTS if Door.USER in row.doors}
    for row in OF_DOCUMENTS:
        also = "" if row.flag in of_microbatches else " (documents)"
        rows.setdefault((allowed(row.allowed), (beyond_leaving_out(row) + also).strip()), []).append(code(row.flag))
    return [(", ".join(flags), but_for, advice) for (but_for, advice), flags in rows.items()]


def beyond_leaving_out(flag: Rule) -> str:
    """Return what the advice for a refused flag says beyond leaving it out; empty if that is all."""
    return flag.use.removeprefix(OUT).lstrip(":, ").removeprefix("and ")


def uses_of(parser: argparse.ArgumentParser, letter: str) -> Iterator[tuple[str, Use]]:
    """Yield the flags that a parser lists, with their settings of the table; without one an empty name."""
    for action in parser._actions:
        listed = action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
        if listed and IN_EVERY_COMMAND not in action.option_strings:
            yield getattr(action, "setting", ""), use_of(action, parser, letter)


def use_of(action: argparse.Action, parser: argparse.ArgumentParser, letter: str) -> Use:
    value = parser._get_formatter()._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    names = action.option_strings or [""]
    spelled = ", ".join(code(f"{name} {value if name == names[-1] else ''}".strip()) for name in names)
    required = " (required)" if action.required and action.option_strings else ""
    text = escaped((action.help or "") % {**vars(action), "prog": parser.prog})
    text = text if text.endswith("..") else text.removesuffix(".")
    text = text[:1].upper() + text[1:]
    if stated := DEFAULT.search(text):
        default = "" if stated[1] in UNSET else stated[1]
        return Use(letter, spelled + required, default, text[: stated.start()].removesuffix("."))
    text = text.removesuffix(f" ({action.default})")
    unsaid = action.default is None or action.default is False or not action.option_strings  # then the help says what happens
    return Use(letter, spelled + required, "" if unsaid else words(action.default), text)


def training() -> argparse.ArgumentParser:
    return add_epp_args(argparse.ArgumentParser(prog="pretrain_gpt.py", add_help=False))


def commands() -> dict[str, Parser]:
    (action,) = (action for action in cli._parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def table(rows: Iterable[Sequence[str]], titles: Sequence[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (titles, ("---",) * len(titles), *rows))


def allowed(values: Iterable[object]) -> str:
    """Values that a flag may take; empty where it may only be left out."""
    said = (value for value in values if value is not None and value is not False and value != [])
    return ", ".join(code(words(value)) for value in said)


def words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)


def code(text: str) -> str:
    return f"`{escaped(text)}`"


def escaped(text: str) -> str:
    """A bar ends a cell, even inside of code."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
