"""The environment variables that a run sets (``launch.environment`` section), as values and as lines of a shell script.

A value may refer to environment variables. References are replaced when a process is started; a script keeps them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_epp.launch.yaml_settings import REFERENCE, SettingsError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)", re.IGNORECASE)
_MASK = "'***'"
_UNSET = "null"
"""Default of a reference that omits a variable, if the reference is the variable's whole value."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Literal text of a value, or a reference to a variable with a default or None."""

    source: str | None
    text: str | None


def check_environment(values: Mapping[Any, Any]) -> None:
    """Raise SettingsError for an invalid name or value of a variable."""
    for name, value in values.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise SettingsError(
                f"launch.environment: {name!r} is not a name of a variable: use letters, digits and _, and no digit first"
            )
        if not isinstance(value, str | int | float | None) or "\0" in str(value):
            raise SettingsError(f"launch.environment.{name} must be text without a NUL character, or a number")


def is_secret(name: str) -> bool:
    """True if a variable of this name is likely to hold a secret, such as ``WANDB_API_KEY`` or ``HF_TOKEN``."""
    return _SECRET.search(name) is not None


def environment_to_set(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables to set: all that have a value and are not set already.

    Raises:
        SettingsError: a value refers to a variable that is not set and gives no default.
    """
    texts = ((name, _text(name, value)) for name, value in values.items() if name not in os.environ)
    return {name: text for name, text in texts if text is not None}


def exports(values: Mapping[str, Any], masked: bool = False) -> list[str]:
    """Lines of a shell script that set the same variables as `environment_to_set`.

    Values taken from the environment are read from it again, and a script ends with an error if they are not set. Secrets can
    be replaced by a mask.
    """
    lines = []
    for name, value in sorted(values.items()):
        parts = _parts(value)
        is_kept = name in os.environ and all(part.source != name for part in parts)
        if not is_kept and _text(name, value) is not None:
            word = "".join(_word(name, part, masked and is_secret(name)) for part in parts)
            lines.append(f"export {name}={word}")
    return lines


def _parts(value: Any) -> list[_Part]:
    text, parts, end = str(value), [], 0
    for match in REFERENCE.finditer(text):
        parts.append(_Part(None, text[end : match.start()]))
        parts.append(_Part(match["name"] or match["oc_name"], match["default"] if match["name"] else match["oc_default"]))
        end = match.end()
    return [part for part in (*parts, _Part(None, text[end:])) if part.source or part.text]


def _text(name: str, value: Any) -> str | None:
    """A variable's value with its references replaced; None if the variable is omitted."""
    parts = _parts(value)
    if value is None or (len(parts) == 1 and parts[0].text == _UNSET and parts[0].source not in {None, *os.environ}):
        return None
    texts = [part.text if part.source is None else os.environ.get(part.source, part.text) for part in parts]
    if None in texts:
        source = parts[texts.index(None)].source
        raise SettingsError(
            f"launch.environment.{name}: {source} is not set: export it, or give a default as ${{{source}:default}}"
        )
    return "".join(filter(None, texts))


def _word(name: str, part: _Part, masked: bool) -> str:
    """Part of a variable's value in a shell: a reference if it comes from the environment, otherwise quoted, or masked."""
    if part.source is not None and part.source in os.environ:
        return f'"${{{part.source}?is not set, and {name} takes its value}}"'
    return _MASK if masked and part.text else shlex.quote(part.text or "")
