"""Settings as flags of `pretrain_gpt.py`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.reading import brief, nearest

if TYPE_CHECKING:
    from megatron_epp.launch.yaml_settings import Settings

_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # pattern of negative numbers, which argparse reads as values


class SuggestingParser(argparse.ArgumentParser):
    """Argument parser that names the nearest of the names it knows where it is given another one."""

    def named(self, unknown: Sequence[str]) -> str:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        return " ".join([f"{flag}{nearest(flag, self._option_string_actions)}" for flag in flags] or unknown)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise


class TrainingParser(SuggestingParser):
    """Parser of a training script that raises `EppError` where argparse exits with its usage, here hundreds of lines."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"there is no {self.named(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise EppError(f"the training script refuses this: {message}")


def flags_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return every flag of a parser by its name with underscores, such as ``num_layers``."""
    actions = parser._option_string_actions.items()
    return {option[2:].replace("-", "_"): action for option, action in actions if option.startswith("--")}


def argv_of(settings: Settings, parser: argparse.ArgumentParser) -> list[str]:
    """Convert settings to arguments of a script with this parser: ``true`` is a switch, ``false`` its opposite, ``null`` none.

    An `epp` section gives ``--epp`` and flags with the prefix unless it has ``enabled: false``. Raises `EppError` for others.
    """
    values = {f"megatron.{key}": (key, value) for key, value in settings.megatron.items()}
    epp = {"enabled": False} if settings.epp is None else {"enabled": True} | settings.epp
    if epp["enabled"] is not False:
        values |= {f"epp.{key}": ("epp" if key == "enabled" else f"epp_{key}", value) for key, value in epp.items()}
    flags, argv = flags_of(parser), list[str]()
    for key, (name, value) in values.items():
        if name not in flags:
            hint = nearest(name, flags).replace("epp_", "" if key.startswith("epp.") else "epp_")
            if name.startswith("lora"):  # near to those of latent attention
                hint = "; Megatron has none for adapters, which docs/adapters.md trains"
            raise EppError(f"{key} is not a flag of the training script{hint}")
        argv += words_of(key, flag_of(name), flags[name], value)
    return argv


def words_of(key: str, option: str, action: argparse.Action, value: Any) -> list[str]:
    """Return a value as words of the command line. Raises `EppError`, about `key`, if it would be read as another one."""
    if value is None:
        return []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise EppError(f"{key} is {brief(value)}; {option} is a switch: give true or false")
        opposite = f"--no-{option[2:]}"
        return [option] if value else [opposite] * (opposite in action.option_strings)
    if isinstance(value, bool) and {"on", "off"} <= set(action.choices or ()):  # as YAML reads these words
        value = "on" if value else "off"
    takes_several = action.nargs not in (None, "?")
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    if isinstance(value, bool | dict) or (len(words) != 1 and not takes_several):
        raise EppError(f"{key} is {brief(value)}; {option} takes one value{', or a list of them' * takes_several}")
    if "\0" in "".join(words) or (words[1:] and any(w.startswith("-") and not _NEGATIVE.fullmatch(w) for w in words)):
        raise EppError(f"{key} is {brief(value)}; a value has no NUL character, and one among several does not begin with -")
    return [f"{option}={words[0]}"] if len(words) == 1 and words[0].startswith("-") else [option, *words]
