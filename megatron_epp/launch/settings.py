"""Settings of a run: YAML files with includes, environment variables and overrides, merged into one mapping."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_epp.cost.library import FOLDERS, locate, read_yaml
from megatron_epp.launch.nearest import nearest
from megatron_epp.schedule import EppError

SECTIONS = ("include", "cluster", "megatron", "epp", "launch")
"""What a file may hold: other files; the kind of machine it is meant for; Megatron's flags; ours; how to start."""
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::([^{}]*))?\}")

Settings = dict[str, Any]


class SettingsError(EppError):
    """A file, key or value that cannot be used. The message names it and says what would do."""


def load_settings(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Settings:
    """Merge files and overrides; what comes later wins, and a file wins over what it includes.

    Args:
        files: paths, or names of shipped files such as ``recipes/llama3-8b-128k``.
        overrides: ``megatron.lr=1e-4``, ``epp.placement=v``; a key without a section is one of Megatron's. ``null`` unsets.

    Raises:
        EppError: a file is missing or not YAML.
        SettingsError: a file includes itself; a section is unknown; an override has no ``=``.
    """
    merged = _omegaconf().create({})
    for file in files:
        merged = _merged(merged, _loaded(_found(str(file), None), ()))
    for override in overrides:
        merged = _merged(merged, _assigned(override))
    container = _omegaconf().to_container(merged, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _loaded(path: Path, chain: tuple[Path, ...]) -> Any:
    """One file over everything that it includes."""
    if path in chain:
        loop = " -> ".join(str(one) for one in (*chain[chain.index(path) :], path))
        raise SettingsError(f"files include each other in a circle: {loop}; take one `include:` out")
    body = read_settings(path)
    if unknown := [key for key in body if key not in SECTIONS]:
        hint = nearest(unknown[0], SECTIONS)
        raise SettingsError(f"{path}: unknown section {unknown[0]!r}{hint}; there are {', '.join(SECTIONS)}")
    for key, value in body.items():
        if key not in ("include", "cluster") and value is not None and not isinstance(value, dict):
            raise SettingsError(f"{path}: `{key}:` holds {value!r}; it must hold names with values")
    include = body.pop("include", None) or []
    merged = _omegaconf().create({})
    for name in [include] if isinstance(include, str) else include:
        merged = _merged(merged, _loaded(_found(str(name), path), (*chain, path)))
    return _merged(merged, body)


def _found(name: str, includer: Path | None) -> Path:
    """A path (beside the file that includes it, or from here), or a shipped file by its name."""
    path = locate(name, beside=Path() if includer is None else includer.parent)
    if path is not None:
        return path.resolve()
    asked = "" if includer is None else f", which {includer} includes"
    names = sorted(str(p.relative_to(f).with_suffix("")) for f in FOLDERS for p in (f / "recipes").glob("*.yaml"))
    raise SettingsError(f"there is no file {name}{asked}; shipped recipes are {', '.join(names) or 'none'}")


def read_settings(path: Path) -> Settings:
    """The names and values of a file, its variables replaced from the environment. Raises `EppError`: it is no such file."""
    return {key: _substituted(value, path) for key, value in read_yaml(path).items()}


def _substituted(value: Any, path: Path | str) -> Any:
    """Values, ``${NAME}`` and ``${NAME:default}`` replaced from the environment; what is nothing else is read as YAML."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    if isinstance(value, dict):
        return {key: _substituted(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_substituted(inner, path) for inner in value]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value

    def variable(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise SettingsError(f"{path}: {match[0]} is not set: export it, or give a default as ${{{match[1]}:default}}")
        return found

    text = _VARIABLE.sub(variable, value)
    return yaml.safe_load(text) if _VARIABLE.fullmatch(value) else text


def _assigned(override: str) -> dict[str, Any]:
    import yaml

    key, equals, text = override.partition("=")
    if not equals or not key:
        raise SettingsError(f"override {override!r} is not of the form key=value, as in megatron.lr=1e-4")
    section, dot, name = key.partition(".")
    if key == "cluster":
        section, name = "", key
    elif not dot:
        section, name = "megatron", key
    if section and (section not in SECTIONS or section in ("include", "cluster")):
        raise SettingsError(f"override {override!r}: unknown section {section!r}{nearest(section, SECTIONS)}")
    try:
        value = _substituted(yaml.safe_load(text), "override")
    except yaml.YAMLError as error:
        raise SettingsError(f"override {override!r}: {text!r} is not a YAML value") from error
    return {section: {name: value}} if section else {name: value}


def _merged(under: Any, over: Mapping[str, Any]) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return _omegaconf().merge(under, over)
    except OmegaConfBaseException as error:
        raise SettingsError(f"settings cannot be merged: {' '.join(str(error).split())}") from error


def _omegaconf() -> Any:
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise SettingsError("settings need OmegaConf: pip install omegaconf (megatron-core[training] brings it)") from error
    return OmegaConf
