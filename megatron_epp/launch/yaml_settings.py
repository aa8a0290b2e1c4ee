"""Settings of a run: YAML files with includes and overrides, merged by OmegaConf, and converted to the types below."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import brief, missing_file, naming_file, nearest, one_line, printable
from megatron_epp.plan.yaml_files import FOLDERS, locate, parse_yaml, read_yaml


@dataclass(frozen=True, slots=True)
class Launch:
    """The `launch` section, which starts a run. Raises EppError for an invalid value."""

    nodes: int = 1
    node_rank: int = 0  # of this node. Node 0 hosts torchrun's rendezvous and saves the settings; logs are named by it.
    # One for each GPU; None counts GPUs, and without any starts the ranks that the parallel sizes need
    processes_per_node: int | None = None
    # master_addr, master_port: address on which node 0 hosts the rendezvous of several nodes
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    wait_seconds: int = 300  # time limit for all nodes to start
    torchrun: str = ""  # more options of torchrun, in the syntax of a shell; they take precedence over this section
    script: str | None = None  # a custom `pretrain_gpt.py`; None uses the one of this package
    folder: str | None = None  # folder in which the settings are saved; None: the run's ``save`` folder, or ``runs/NAME``
    name: str = "train"
    full_log: bool = False  # print all that Megatron prints; otherwise the short form, with all of it in a file of the folder
    environment: dict[str, Any] | None = None  # variables to set unless they are set already; None as a value omits one

    def __post_init__(self) -> None:
        last, processes = self.nodes - 1, self.processes_per_node
        requirements = {
            "nodes": (self.nodes >= 1, "1 or more"),
            "node_rank": (0 <= self.node_rank <= last, f"from 0 to {last} for launch.nodes {self.nodes}"),
            "processes_per_node": (processes is None or processes >= 1, "1 or more"),
            "master_addr": (re.fullmatch(r"[\w:][\w.:-]*", self.master_addr), "the name or the address of a machine"),
            "master_port": (1 <= self.master_port <= 65535, "from 1 to 65535"),
            "wait_seconds": (self.wait_seconds >= 1, "1 or more"),
            "torchrun": (self.torchrun.isprintable(), "text without control characters"),
            "script": (self.script is None or Path(self.script).is_file(), "an existing file"),
            "folder": ((self.folder or "").isprintable(), "text without control characters"),
            "name": (
                re.fullmatch(r"[^-./\\][^/\\]*", self.name) and self.name.isprintable(),
                "the name of a folder, without / or \\, and not begin with - or .",
            ),
        }
        for key, (is_valid, requirement) in requirements.items():
            if not is_valid:
                raise EppError(f"launch.{key} is {brief(getattr(self, key))}; it must be {requirement}")
        try:
            shlex.split(self.torchrun)
        except ValueError as error:
            raise EppError(f"launch.torchrun is {self.torchrun!r}; its quotes must be closed") from error
        for name, value in (self.environment or {}).items():  # which may be a secret
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise EppError(f"launch.environment: {name!r} is not a name of letters, digits and _, with no digit first")
            if not isinstance(value, str | int | float | None) or "\0" in str(value):
                raise EppError(f"launch.environment.{name} must be text without a NUL character, or a number")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings with all references replaced. OmegaConf takes the sections and their types from here."""

    cluster: str | None = None  # intended kind of machine
    megatron: dict[str, Any] = field(default_factory=dict)  # Megatron's flags, with underscores
    epp: dict[str, Any] | None = None  # flags of this package without prefix; None trains without ``--epp``
    launch: Launch = field(default_factory=Launch)
    # The same in YAML, with references such as ``${oc.env:HF_TOKEN}``, so that saved files hold no secrets
    text: str = field(default="", metadata={"omegaconf_ignore": True})

    @property
    def folder(self) -> Path:
        return Path(self.launch.folder or self.megatron.get("save") or Path("runs") / self.launch.name)

    @property
    def log(self) -> Path | None:
        """File for all that this node prints; None if all of it is printed."""
        name = "train.log" if self.launch.nodes == 1 else f"train-{self.launch.node_rank}.log"
        return None if self.launch.full_log else self.folder / name


def load_settings(files: Iterable[str | Path], overrides: Iterable[str] = ()) -> Settings:
    """Merge files and overrides; later ones take precedence, and a file takes precedence over its includes.

    Raises `EppError`, which names the file or the override, if a file is missing, not YAML, or includes itself; a section or a
    key of `launch` is unknown; a value is invalid; an override has no ``=``.

    Args:
        files: paths, or names of shipped files such as ``recipes/llama3-8b-128k``.
        overrides: ``megatron.lr=1e-4``, ``epp.placement=v``; a key without a section is one of Megatron's. ``null`` unsets.
    """
    from omegaconf import OmegaConf  # which `megatron-core[training]` brings

    names, config = [str(name) for name in files], OmegaConf.structured(Settings)
    for section in (config, config.launch):
        OmegaConf.set_readonly(section, False)  # as releases before 2.4 take frozen classes
    bodies = [body for name in names for body in _bodies(_found(name), ())]
    for source, body in [*bodies, *map(_assigned, overrides)]:
        sections = {key: value for key, value in body.items() if value is not None}
        if isinstance(launch := sections.get("launch"), dict):
            usual = asdict(Launch())
            sections["launch"] = {key: usual.get(key) if value is None else value for key, value in launch.items()}
        with _naming_key(source):
            config = OmegaConf.merge(config, sections)
    with _naming_key(", ".join(names)):
        settings, text = OmegaConf.to_object(config), OmegaConf.to_yaml(config)
    assert isinstance(settings, Settings)
    return replace(settings, text=text)


def _bodies(path: Path, chain: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the contents of a file's includes, then its own, each with its path; `chain` are the files that include it."""
    if path in chain:
        loop = " -> ".join(str(file) for file in (*chain[chain.index(path) :], path))
        raise EppError(f"files include each other in a circle: {loop}; take one `include:` out")
    body = read_yaml(path)
    include = body.pop("include", None) or []
    names = [include] if isinstance(include, str) else include
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise EppError(f"{path}: `include:` holds {brief(include)}; it must hold a file, or a list of files")
    for name in names:
        yield from _bodies(_found(name, path), (*chain, path))
    yield str(path), body


def _found(name: str, includer: Path | None = None) -> Path:
    """Find a file by its path (relative to the including file, or to the working folder), or a shipped file by its name."""
    path = locate(name, folder=Path() if includer is None else includer.parent)
    if path is not None:
        return path.resolve()
    inclusion = "" if includer is None else f", which {includer} includes"
    names = sorted(str(p.relative_to(f).with_suffix("")) for f in FOLDERS for p in (f / "recipes").glob("*.yaml"))
    hint = nearest(name, names)
    raise EppError(f"{missing_file(name)}{inclusion}{hint}; shipped recipes are {', '.join(names) or 'none'}")


def _assigned(override: str) -> tuple[str, Mapping[str, Any]]:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise EppError(f"override {override!r} is not of the form key=value, as in megatron.lr=1e-4")
    value = parse_yaml(text, source := f"override {override!r}")
    for name in reversed((key if "." in key or key == "cluster" else f"megatron.{key}").split(".")):
        value = {name: value}
    return source, value


@contextlib.contextmanager
def _naming_key(source: str) -> Iterator[None]:
    """Raise OmegaConf's errors as an EppError of one line with the source and the key."""
    from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException

    with naming_file(source):
        try:
            yield
        except (OmegaConfBaseException, RecursionError, TypeError, UnicodeEncodeError) as error:  # as for half a character
            key, text = printable(getattr(error, "full_key", None) or ""), one_line(error).partition(" full_key: ")[0]
            if isinstance(error, ConfigKeyError):
                known = [*error.parent_node, *["include"] * ("." not in key)]
                text = f"unknown{nearest(str(error.key), known)}; there are {', '.join(known)}"
            if isinstance(error, InterpolationResolutionError):
                text += "; a variable of the environment is ${oc.env:NAME,default}"
            raise EppError(f"{key}: {text}" if key else text) from error
