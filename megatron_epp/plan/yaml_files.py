"""YAML files, read within limits (repeated or endless aliases), and files that ship with the package, by path or name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import MOST_VALUES, check_nested, missing_file, naming_file, nearest, one_line, read_text

_PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
"""Folders of the shipped files: inside an installed package, or next to the package in a checkout."""
MOST_YAML_BYTES = 1 << 20
"""Largest size of a file: settings are small, and reading YAML is slow."""


def parse_yaml(text: str, what: str) -> Any:
    """Read the value of a YAML text. Raises `EppError` if PyYAML is missing, or for bad, too large or too deep YAML."""
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise EppError(f"reading {what} needs PyYAML: pip install pyyaml (megatron-core[training] brings it)") from error
    try:
        value = yaml.safe_load(text)
    except RecursionError:
        raise EppError(f"{what} is nested too deep") from None
    except Exception as error:  # its constructors raise many kinds for values that are not of their tag, as in `2020-13-45`
        raise EppError(f"{what} is not YAML: {one_line(error)}") from None
    check_nested(value, what, MOST_VALUES)
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the names and values of a file. Raises `EppError` if it cannot be read, is not YAML, or holds no names."""
    with naming_file(path):
        text = read_text(path, MOST_YAML_BYTES)
    if not text.strip():
        raise EppError(f"{path} is empty")
    body = parse_yaml(text, str(path))
    if not isinstance(body, dict):
        raise EppError(f"{path} holds no `name: value` pairs")
    return {str(key): value for key, value in body.items()}


def shipped(kind: str) -> list[str]:
    """Names of the shipped files of a kind: ``models``, ``clusters`` or ``profiles``."""
    return sorted(path.stem for folder in FOLDERS for path in (folder / kind).glob("*.*") if path.suffix in (".yaml", ".json"))


def locate(name: str, kind: str = "", folder: Path = Path()) -> Path | None:
    """Find a file by its path, relative to a folder, or a shipped file by its name; None if there is neither."""
    shipped_as = (folder / kind / f"{name}{suffix}" for folder in FOLDERS for suffix in ("", ".yaml", ".json"))
    return next((path for path in (folder / name, *shipped_as) if os.path.isfile(path)), None)  # False for what is no path


def find(kind: str, name: str) -> Path:
    """Path of the file that a name or a path denotes. Raises `EppError`, which lists the shipped names, if there is none."""
    if (path := locate(name, kind)) is not None:
        return path
    names = shipped(kind)
    known = f"{', '.join(names)}{nearest(name, names)}"
    raise EppError(f"{missing_file(name)}, and there is no such name among the shipped {kind}: {known}")
