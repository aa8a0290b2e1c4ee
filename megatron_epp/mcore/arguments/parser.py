"""The table of flags as argparse's parsers, of Megatron's training script and of the command line, and what they parse."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from megatron_epp.mcore.arguments.flag import Flag, Number
from megatron_epp.mcore.arguments.table import EVERYDAY, ROWS, TABLE, TRAINING
from megatron_epp.plan.errors import Names
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.problem import Options

TITLE = "elastic pipeline parallelism"
_OPTIONS = frozenset(field.name for field in fields(Options))


def add_epp_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of a training run to Megatron's parser, once."""
    if any(group.title == TITLE for group in parser._action_groups):
        return parser
    group = parser.add_argument_group(TITLE, "everyday flags first; docs/flags.md has them all")
    position = {setting: number for number, setting in enumerate(EVERYDAY)}
    for row in sorted(TABLE, key=lambda row: position.get(row.setting, len(position))):
        if row.is_ours:
            read = row.read.kind if isinstance(row.read, Number) and not row.read.of_what else str
            _add(group, row, [row.training], {"type": read, "help": row.help.format_map(TRAINING)})
    return parser


def add(group: argparse._ActionsContainer, *settings: str, **changes: Any) -> None:
    """Add flags to a command, each by one name, with `changes` of `add_argument`; other names are understood, not listed."""
    for row in map(ROWS.__getitem__, settings):
        summary = row.short_help or row.help.removesuffix(".")
        summary = summary if summary[:2].isupper() else summary[0].lower() + summary[1:]
        names = {setting: named.short.split(" ")[0] for setting, named in ROWS.items() if named.short}
        name, *others = dict.fromkeys([*row.short.split(), *row.training.split()])
        action = _add(group, row, [name], {"type": row.read, "help": summary.format_map(names)} | changes)
        group._option_string_actions.update(dict.fromkeys(others, action))


def names_of(parser: argparse.ArgumentParser) -> Names:
    flags = [action for action in parser._actions if action.option_strings]
    return {getattr(action, "setting", action.dest): action.option_strings[0] for action in flags}


def options_from(args: argparse.Namespace, *, training: bool = False, **fixed: Any) -> Options:
    """Return the planner's options by parsed flags, of a training run by our own names, with some that are fixed."""
    options = {}
    for row in TABLE:
        dest = (row.dest if row.is_ours else "") if training else row.short_dest
        if dest and row.setting in _OPTIONS and row.setting not in fixed:
            options[row.setting] = row.field(getattr(args, dest))
    if "offload" in options and not training:
        options["offload"] = offloads(args)
    return Options(**options, **fixed)


def offloads(args: argparse.Namespace) -> bool:
    """Return True if plans of a command may have copies to the host: asked for, or the host memory is known."""
    return args.offload == "on" or (args.offload == AUTO and args.host_memory_gb is not None)


def _add(group: argparse._ActionsContainer, row: Flag, names: list[str], more: dict[str, Any]) -> argparse.Action:
    settings: dict[str, Any] = {"default": row.default, "metavar": row.unit, "choices": row.choices or None}
    if row.is_switch:
        settings = {"action": "store_true"}
        more = {name: value for name, value in more.items() if name != "type"}
    elif row.alone:
        settings |= {"nargs": "?", "const": row.alone}
    elif row.takes_several:
        settings["nargs"] = "+"
    action = group.add_argument(*names, **settings | more)
    action.setting = row.setting  # type: ignore[attr-defined]
    return action
