"""Settings as flags of `pretrain_gpt.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.launch.settings import Settings, SettingsError, nearest

EPP_PREFIX = "epp_"
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""Pattern of negative numbers, which argparse reads as values."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of the training script.

    Attributes:
        option: as on the command line, ``--num-layers``.
        takes_value: false for a switch.
        takes_several: one or more values.
        opposite: flag that switches a switch off, ``--no-x``; None if there is none.
        says_on_or_off: takes the words on and off, which YAML reads as true and false.
    """

    option: str
    takes_value: bool
    takes_several: bool = False
    opposite: str | None = None
    says_on_or_off: bool = False


Flags = Mapping[str, Flag]
"""Flags by name with underscores, such as ``num_layers``."""


def argv_of(settings: Settings, flags: Flags) -> list[str]:
    """Convert a run's settings to command line arguments.

    ``true`` gives a switch, ``false`` its opposite if there is one, ``null`` nothing; a list gives several values. An `epp`
    section gives ``--epp`` and its keys with the prefix, unless it has ``enabled: false``.

    Raises:
        SettingsError: a key is not a flag (the message names the most similar one), or a value is invalid for its flag.
    """
    arguments: list[str] = []
    for name, value in (settings.get("megatron") or {}).items():
        arguments += _arguments("megatron", name, name, value, flags)
    ours = settings.get("epp")
    enabled = ours is not None and ours.get("enabled", True)
    if not isinstance(enabled, bool):
        raise SettingsError(f"epp.enabled is {enabled!r}; give true or false")
    if ours is None or not enabled:
        return arguments
    arguments.append(flags["epp"].option)
    for name, value in ours.items():
        if name != "enabled":
            arguments += _arguments("epp", name, EPP_PREFIX + name, value, flags)
    return arguments


def _arguments(section: str, key: str, name: str, value: Any, flags: Flags) -> Iterator[str]:
    if value is None:
        return
    flag = flags.get(name)
    if flag is None:
        prefix = EPP_PREFIX if section == "epp" else ""
        known = [other.removeprefix(prefix) for other in flags if other.startswith(EPP_PREFIX) == bool(prefix)]
        raise SettingsError(f"{section}.{key} is not a flag of the training script{nearest(key, known)}")
    if not flag.takes_value:
        if not isinstance(value, bool):
            raise SettingsError(f"{section}.{key} is {value!r}; {flag.option} is a switch: give true or false")
        chosen = flag.option if value else flag.opposite
        if chosen is not None:
            yield chosen
        return
    if isinstance(value, bool) and flag.says_on_or_off:
        value = "on" if value else "off"
    values = value if isinstance(value, list) else [value]
    if isinstance(value, bool | dict) or (len(values) != 1 and not flag.takes_several):
        wanted = "one value, or a list of them" if flag.takes_several else "one value"
        raise SettingsError(f"{section}.{key} is {value!r}; {flag.option} takes {wanted}")
    texts = [str(one) for one in values]
    if any("\0" in text for text in texts):
        raise SettingsError(f"{section}.{key} is {value!r}; no command line can hold a NUL character")
    if len(texts) == 1 and texts[0].startswith("-"):  # else it is read as a flag
        yield f"{flag.option}={texts[0]}"
        return
    if any(text.startswith("-") and not _NEGATIVE.fullmatch(text) for text in texts):
        raise SettingsError(f"{section}.{key} is {value!r}; a value among several must not begin with -, as flags do")
    yield flag.option
    yield from texts
