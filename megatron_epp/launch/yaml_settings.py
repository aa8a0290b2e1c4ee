"""Settings of a run: YAML files with includes, environment variables and overrides, merged into one mapping."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_epp.cost.library import FOLDERS, locate, parse_yaml, read_yaml
from megatron_epp.plan import EppError
from megatron_epp.plan.flags import flag_of
from megatron_epp.plan.reading import brief, missing_file, nearest, one_line

SECTIONS = ("include", "cluster", "megatron", "epp", "launch")
"""Sections of a file: included files, intended kind of machine, Megatron's flags, flags of this package, launch settings."""
REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Parallel sizes whose product is the number of ranks of one data-parallel replica."""
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)(?::([^{}]*))?\}")
REFERENCE = re.compile(
    r"\$\{(?:(?P<name>[A-Z_][A-Z0-9_]*)(?::(?P<default>[^{}]*))?"
    r"|oc\.env:(?P<oc_name>[A-Za-z_][A-Za-z0-9_]*)(?:,(?P<oc_default>[^{}'\"]*))?)\}"
)
"""Reference to a variable in a value of ``launch.environment``, kept as it is so that saved settings hold no secrets."""
_HELD = "\0{"
"""Placeholder for ``${`` of such a reference while settings are merged, which would replace the reference."""

Settings = dict[str, Any]


class SettingsError(EppError):
    """A file, key or value cannot be used. The message names it and states what is valid."""


def load_settings(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Settings:
    """Merge files and overrides; later ones take precedence, and a file takes precedence over its includes.

    Args:
        files: paths, or names of shipped files such as ``recipes/llama3-8b-128k``.
        overrides: ``megatron.lr=1e-4``, ``epp.placement=v``; a key without a section is one of Megatron's. ``null`` unsets.

    Raises:
        EppError: a file is missing or not YAML.
        SettingsError: a file includes itself; a section is unknown; an override has no ``=``.
    """
    merged, known, names = _omegaconf().create({}), dict[Path, Any](), list(map(str, files))
    for name in names:
        merged = _merged(merged, _loaded(_found(name, None), (), known), name)
    for override in overrides:
        merged = _merged(merged, _assigned(override), f"override {override!r}")
    return _with_environment(_resolved(merged, ", ".join(names)), lambda text: text.replace(_HELD, "${"))


def _loaded(path: Path, chain: tuple[Path, ...], known: dict[Path, Any]) -> Any:
    """Load one file, merged over everything that it includes, unless it is known; `chain` are the files that include it."""
    if path in chain:
        loop = " -> ".join(str(file) for file in (*chain[chain.index(path) :], path))
        raise SettingsError(f"files include each other in a circle: {loop}; take one `include:` out")
    if path in known:
        return known[path]
    body = read_settings(path)
    if unknown := [key for key in body if key not in SECTIONS]:
        hint = nearest(unknown[0], SECTIONS)
        raise SettingsError(f"{path}: unknown section {unknown[0]!r}{hint}; there are {', '.join(SECTIONS)}")
    for key, value in body.items():
        if key not in ("include", "cluster") and value is not None and not isinstance(value, dict):
            raise SettingsError(f"{path}: `{key}:` holds {brief(value)}; it must hold names with values")
    if not isinstance(body.get("cluster"), str | None):
        raise SettingsError(f"{path}: `cluster:` holds {brief(body['cluster'])}; it must hold the name of a cluster")
    include = body.pop("include", None) or []
    names = [include] if isinstance(include, str) else include
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SettingsError(f"{path}: `include:` holds {brief(include)}; it must hold a file, or a list of files")
    merged = _omegaconf().create({})
    for name in names:
        merged = _merged(merged, _loaded(_found(name, path), (*chain, path), known), str(path))
    known[path] = _merged(merged, body, str(path))
    return known[path]


def _found(name: str, includer: Path | None) -> Path:
    """Find a file by its path (relative to the including file, or to the working folder), or a shipped file by its name."""
    path = locate(name, folder=Path() if includer is None else includer.parent)
    if path is not None:
        return path.resolve()
    inclusion = "" if includer is None else f", which {includer} includes"
    names = sorted(str(p.relative_to(f).with_suffix("")) for f in FOLDERS for p in (f / "recipes").glob("*.yaml"))
    hint = nearest(name, names)
    raise SettingsError(f"{missing_file(name)}{inclusion}{hint}; shipped recipes are {', '.join(names) or 'none'}")


def read_settings(path: Path) -> Settings:
    """Read the names and values of a file; variables are replaced from the environment, except in `launch.environment`.

    Raises `EppError` if the file cannot be read or is not valid.
    """
    return {key: _section(key, value, path) for key, value in read_yaml(path).items()}


def _section(name: str, value: Any, path: Path | str) -> Any:
    """Return the section with its variables replaced, except in `launch.environment` if that holds names with values."""
    if name != "launch" or not isinstance(value, dict):
        return _substituted(value, path)
    environment = {key: inner for key, inner in value.items() if key == "environment" and isinstance(inner, dict)}
    return {key: environment.get(key) or _substituted(inner, path) for key, inner in value.items()}


def _with_environment(settings: Mapping[str, Any], change: Callable[[str], str]) -> Settings:
    """Return settings with the text of every value in `launch.environment` changed."""
    launch = settings.get("launch")
    if not isinstance(launch, dict) or not isinstance(values := launch.get("environment"), dict):
        return dict(settings)
    changed = {key: change(value) if isinstance(value, str) else value for key, value in values.items()}
    return {**settings, "launch": {**launch, "environment": changed}}


def _substituted(value: Any, path: Path | str) -> Any:
    """Replace ``${NAME}`` and ``${NAME:default}`` in values from the environment; a value that is only a reference is then
    parsed as YAML.
    """
    if isinstance(value, dict):
        if unnamed := [key for key in value if not isinstance(key, str)]:
            raise SettingsError(f"{path}: {brief(unnamed[0])} stands where a name should; put it in quotes if it is one")
        return {key: _substituted(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [_substituted(inner, path) for inner in value]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value

    def variable(match: re.Match[str]) -> str:
        value = os.environ.get(match[1], match[2])
        if value is None:
            raise SettingsError(f"{path}: {match[0]} is not set: export it, or give a default as ${{{match[1]}:default}}")
        return value

    text = _VARIABLE.sub(variable, value)
    return parse_yaml(text, f"{path}: the value of {value}") if _VARIABLE.fullmatch(value) else text


def _assigned(override: str) -> dict[str, Any]:
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
    values = _section(section, {name: parse_yaml(text, f"override {override!r}")}, f"override {override!r}")
    return {section: values} if section else values


def _merged(under: Any, over: Mapping[str, Any], source: str) -> Any:
    """Merge settings over others; errors name the source of the upper ones."""
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(over, dict):  # else it is merged already
        over = _with_environment(over, lambda text: REFERENCE.sub(lambda match: match[0].replace("${", _HELD), text))
    try:
        return _omegaconf().merge(under, over)
    except (OmegaConfBaseException, RecursionError) as error:
        raise SettingsError(f"{source}: settings cannot be merged: {one_line(error)}") from error


def _resolved(merged: Any, source: str) -> Settings:
    """Convert merged settings to plain names and values, with references to other settings replaced."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        container = _omegaconf().to_container(merged, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise SettingsError(f"{source}: settings cannot be resolved: {one_line(error)}") from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _omegaconf() -> Any:
    from omegaconf import OmegaConf  # which `megatron-core[training]` brings

    return OmegaConf


def world_of(megatron: Mapping[str, Any]) -> int:
    """Number of ranks of one data-parallel replica. Raises SettingsError for a size below 1."""
    sizes = [1 if megatron.get(name) is None else megatron[name] for name in REPLICA_SIZES]
    for name, size in zip(REPLICA_SIZES, sizes, strict=True):
        if not isinstance(size, int) or size < 1:
            raise SettingsError(f"{flag_of(name)} is {size!r}; it must be a whole number from 1")
    return math.prod(sizes)
