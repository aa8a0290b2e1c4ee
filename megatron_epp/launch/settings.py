"""Settings of a run: YAML files with includes, environment variables and overrides, merged into one mapping."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_epp.cost.library import FOLDERS, locate, read_yaml
from megatron_epp.launch.nearest import nearest
from megatron_epp.schedule import EppError

SECTIONS = ("include", "cluster", "megatron", "epp", "launch")
"""What a file may hold: other files; the kind of machine it is meant for; Megatron's flags; ours; how to start."""
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::([^{}]*))?\}")
REFERENCE = re.compile(
    r"\$\{(?:(?P<name>[A-Z_][A-Z0-9_]*)(?::(?P<default>[^{}]*))?"
    r"|oc\.env:(?P<oc_name>[A-Za-z_][A-Za-z0-9_]*)(?:,(?P<oc_default>[^{}'\"]*))?)\}"
)
"""A reference to a variable, as values of ``launch.environment`` keep it: what is saved of a run then holds no secret."""
_HELD = "\0{"
"""Stands for ``${`` of such a reference while settings are merged, which would replace it."""

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
    return _with_environment({str(key): value for key, value in container.items()}, lambda text: text.replace(_HELD, "${"))


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
    """The names and values of a file, its variables replaced from the environment, but for those in `launch.environment`.

    Raises `EppError`: it is no such file.
    """
    return {key: _section(key, value, path) for key, value in read_yaml(path).items()}


def _section(name: str, value: Any, path: Path | str) -> Any:
    """The section with its variables replaced; `launch.environment` as it is, where it holds names with values."""
    if name != "launch" or not isinstance(value, dict):
        return _substituted(value, path)
    kept = {key: inner for key, inner in value.items() if key == "environment" and isinstance(inner, dict)}
    return {key: kept.get(key) or _substituted(inner, path) for key, inner in value.items()}


def _with_environment(settings: Mapping[str, Any], change: Callable[[str], str]) -> Settings:
    """Settings with the text of every value in `launch.environment` changed."""
    launch = settings.get("launch")
    if not isinstance(launch, dict) or not isinstance(values := launch.get("environment"), dict):
        return dict(settings)
    changed = {key: change(value) if isinstance(value, str) else value for key, value in values.items()}
    return {**settings, "launch": {**launch, "environment": changed}}


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
        values = _section(section, {name: yaml.safe_load(text)}, "override")
    except yaml.YAMLError as error:
        raise SettingsError(f"override {override!r}: {text!r} is not a YAML value") from error
    return {section: values} if section else values


def _merged(under: Any, over: Mapping[str, Any]) -> Any:
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(over, dict):  # else it is merged already
        over = _with_environment(over, lambda text: REFERENCE.sub(lambda found: found[0].replace("${", _HELD), text))
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
