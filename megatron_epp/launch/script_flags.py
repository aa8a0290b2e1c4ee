"""Settings as flags of `pretrain_gpt.py`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from megatron_epp.launch.yaml_settings import Settings, SettingsError
from megatron_epp.plan.reading import nearest

EPP_PREFIX = "epp_"
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""Pattern of negative numbers, which argparse reads as values."""
type Option = tuple[str, argparse.Action]
"""A flag of the training script as on the command line, ``--num-layers``, and what it does there."""


class SuggestingParser(argparse.ArgumentParser):
    """Argument parser that names the nearest of the names it knows where it is given another one."""

    def named(self, unknown: Sequence[str]) -> str:
        """Format the words that no argument takes: flags with the nearest ones, or all words if none of them is a flag."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        return " ".join([f"{flag}{nearest(flag, self._option_string_actions)}" for flag in flags] or unknown)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the words for errors."""
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def unknown_flags(self) -> list[str]:
        """Return the flags among the words that this parser does not know, not even shortened."""
        flags = (word.partition("=")[0] for word in self.words if word.startswith("--") and word != "--")
        return [flag for flag in flags if not any(known.startswith(flag) for known in self._option_string_actions)]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise


class TrainingParser(SuggestingParser):
    """Parser of a training script that raises `SettingsError` where argparse exits with its usage, here hundreds of lines."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does. Raises `SettingsError` for a word that no flag takes."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is no {self.named(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"the training script refuses this: {message}")


def flags_of(parser: argparse.ArgumentParser) -> dict[str, Option]:
    """Return every option of a parser by its name with underscores, such as ``num_layers``."""
    options = parser._option_string_actions.items()
    return {name[2:].replace("-", "_"): (name, action) for name, action in options if name.startswith("--")}


def argv_of(settings: Settings, parser: argparse.ArgumentParser) -> list[str]:
    """Convert a run's settings to command line arguments of the training script, which has this parser.

    ``true`` gives a switch, ``false`` its opposite if there is one, ``null`` nothing; a list gives several values. An `epp`
    section gives ``--epp`` and its keys with the prefix, unless it has ``enabled: false``.

    Raises:
        SettingsError: a key is not a flag (the message names the most similar one), or a value is invalid for its flag.
    """
    arguments, flags = list[str](), flags_of(parser)
    for name, value in (settings.get("megatron") or {}).items():
        arguments += _arguments("megatron", name, name, value, flags)
    section = settings.get("epp")
    enabled = section is not None and section.get("enabled", True)
    if not isinstance(enabled, bool):
        raise SettingsError(f"epp.enabled is {enabled!r}; give true or false")
    if section is None or not enabled:
        return arguments
    arguments.append("--epp")
    for name, value in section.items():
        if name != "enabled":
            arguments += _arguments("epp", name, EPP_PREFIX + name, value, flags)
    return arguments


def _arguments(section: str, key: str, name: str, value: Any, flags: Mapping[str, Option]) -> Iterator[str]:
    if value is None:
        return
    if name not in flags:
        prefix = EPP_PREFIX if section == "epp" else ""
        known = [other.removeprefix(prefix) for other in flags if other.startswith(EPP_PREFIX) == bool(prefix)]
        hint = nearest(key, known)
        if key.startswith("lora"):  # near to those of latent attention
            hint = "; Megatron has none for adapters, which docs/adapters.md trains"
        raise SettingsError(f"{section}.{key} is not a flag of the training script{hint}")
    option, action = flags[name]
    words = words_of(f"{section}.{key}", option, action, value)
    if action.nargs == 0:
        opposite = f"--no-{option.removeprefix('--')}"
        if value:
            yield option
        elif isinstance(action, argparse.BooleanOptionalAction) and opposite in action.option_strings:
            yield opposite
        return
    if any("\0" in word for word in words):
        raise SettingsError(f"{section}.{key} is {value!r}; no command line can hold a NUL character")
    if len(words) == 1 and words[0].startswith("-"):  # else it is read as a flag
        yield f"{option}={words[0]}"
        return
    if any(word.startswith("-") and not _NEGATIVE.fullmatch(word) for word in words):
        raise SettingsError(f"{section}.{key} is {value!r}; a value among several must not begin with -, as flags do")
    yield option
    yield from words


def takes_several(action: argparse.Action) -> bool:
    """True for a flag of one or more values."""
    return action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 0)


def words_of(key: str, option: str, action: argparse.Action, value: Any) -> list[str]:
    """Return a value of a settings file as words of the command line; none for a switch. YAML reads on and off as booleans.

    Raises:
        SettingsError: a switch is neither true nor false, or the number of values is wrong; the message begins with `key`.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise SettingsError(f"{key} is {value!r}; {option} is a switch: give true or false")
        return []
    if isinstance(value, bool) and {"on", "off"} <= set(action.choices or ()):
        value = "on" if value else "off"
    values = value if isinstance(value, list) else [value]
    needed = action.nargs if isinstance(action.nargs, int) else 0
    fits = len(values) == needed if needed else takes_several(action) or len(values) == 1
    if isinstance(value, bool | dict) or not fits:
        several = "one value, or a list of them" if takes_several(action) else "one value"
        raise SettingsError(f"{key} is {value!r}; {option} takes {f'{needed} values' if needed else several}")
    return [*map(str, values)]
