"""YAML files, read within limits: aliases that repeat without end, or contain themselves, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_epp.plan import EppError
from megatron_epp.plan.reading import MOST_VALUES, check_nested, naming, read_text

MOST_YAML_BYTES = 1 << 20
"""Largest size of a file: settings are small, and reading YAML is slow."""


def parse_yaml(text: str, what: str) -> Any:
    """Read the value of a YAML text.

    Args:
        text: of one document.
        what: name of the text, for errors.

    Raises:
        EppError: PyYAML is missing, the text is not YAML, or it holds too many values, too deep.
    """
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise EppError(f"reading {what} needs PyYAML: pip install pyyaml (megatron-core[training] brings it)") from error
    try:
        value = yaml.safe_load(text)
    except RecursionError:
        raise EppError(f"{what} is nested too deep") from None
    except Exception as error:  # its constructors raise many kinds for values that are not of their tag, as in `2020-13-45`
        raise EppError(f"{what} is not YAML: {' '.join(str(error).split())}") from None
    check_nested(value, what, MOST_VALUES)
    return value


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the names and values of a file. Raises `EppError` if it cannot be read, is not YAML, or holds no names."""
    with naming(path):
        text = read_text(path, MOST_YAML_BYTES)
    body = parse_yaml(text, str(path))
    if not isinstance(body, dict):
        raise EppError(f"{path} holds no names with values")
    return {str(key): value for key, value in body.items()}
