"""The command that trains on one node, and the files with which a run can be repeated without this launcher."""

from __future__ import annotations

import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import megatron_epp
from megatron_epp.launch.environment_variables import check_environment, exports, is_secret
from megatron_epp.launch.machine import version_of
from megatron_epp.launch.yaml_settings import Settings, SettingsError
from megatron_epp.plan.reading import nearest
from megatron_epp.plan.writing import write_text

OURS = "megatron_epp.mcore.pretrain_gpt"
_ADDRESS = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:-]*")
_ANY = 1 << 31
_RANGES = (("nodes", 1, _ANY), ("processes_per_node", 1, _ANY), ("master_port", 1, 65535), ("wait_seconds", 1, _ANY))
_TYPES = {"script": str, "folder": str, "name": str, "full_log": bool, "environment": dict}
_TYPES |= {"master_addr": str, "torchrun": str}
"""Types of keys that are not whole numbers."""
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "apex", "numpy", "numba", "omegaconf")
"""Packages whose versions are recorded."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings of the `launch` section, which start a run.

    Attributes:
        nodes: number of nodes.
        node_rank: of this node. Node 0 hosts torchrun's rendezvous and saves the settings; logs are named by it.
        processes_per_node: one for each GPU; None counts GPUs, and without any starts the ranks that the parallel sizes need.
        master_addr, master_port: address on which node 0 hosts the rendezvous of several nodes.
        wait_seconds: time limit for all nodes to start.
        torchrun: more options of torchrun, in the syntax of a shell; they take precedence over this section.
        script: a custom `pretrain_gpt.py`; None uses the one of this package.
        folder: folder in which the settings are saved; None: the run's ``save`` folder, or ``runs/NAME``.
        name: of the run, and of its folder.
        full_log: print all that Megatron prints; otherwise the short form, with all of it in a file of the folder.
        environment: variables to set unless they are set already; see `launch.environment`.
    """

    nodes: int = 1
    node_rank: int = 0
    processes_per_node: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 29500
    wait_seconds: int = 300
    torchrun: str = ""
    script: str | None = None
    folder: str | None = None
    name: str = "train"
    full_log: bool = False
    environment: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(settings: Settings) -> Launch:
        """Read the `launch` section. Raises SettingsError for an unknown key or an invalid value."""
        section = {key: value for key, value in (settings.get("launch") or {}).items() if value is not None}
        known = {field.name: field for field in fields(Launch)}
        for key, value in section.items():
            if key not in known:
                raise SettingsError(f"launch.{key} is unknown{nearest(key, known)}; there are {', '.join(known)}")
            value_type = _TYPES.get(key, int)
            if not isinstance(value, value_type) or (isinstance(value, bool) and value_type is not bool):
                raise SettingsError(f"launch.{key} is {value!r}; it must be of type {value_type.__name__}")
            if isinstance(value, str) and not value.isprintable():
                raise SettingsError(f"launch.{key} is {value!r}; it must have no control characters")
        launch = Launch(**section)
        for key, least, most in _RANGES:
            if (number := getattr(launch, key)) is not None and not least <= number <= most:
                raise SettingsError(f"launch.{key} is {number}; it must be {least} or more" + f", up to {most}" * (most < _ANY))
        if not 0 <= launch.node_rank < launch.nodes:
            last, nodes = launch.nodes - 1, launch.nodes
            raise SettingsError(f"launch.node_rank is {launch.node_rank}; it must be from 0 to {last} for launch.nodes {nodes}")
        if not launch.name or launch.name[0] in "-." or set(launch.name) & set("/\\"):
            raise SettingsError(
                f"launch.name is {launch.name!r}; it must be the name of a folder, without / or \\, and not begin with - or ."
            )
        if not _ADDRESS.fullmatch(launch.master_addr):
            raise SettingsError(
                f"launch.master_addr is {launch.master_addr!r}; it must be the name or the address of a machine"
            )
        try:
            shlex.split(launch.torchrun)
        except ValueError as error:
            raise SettingsError(f"launch.torchrun is {launch.torchrun!r}; its quotes must be closed") from error
        check_environment(launch.environment)
        if launch.script is not None and not Path(launch.script).is_file():
            raise SettingsError(f"launch.script: there is no file {launch.script}")
        return launch


def command_of(launch: Launch, argv: Sequence[str], processes: int) -> list[str]:
    """Build the torchrun command for this node."""
    where = ["--nnodes", str(launch.nodes), "--nproc-per-node", str(processes)]
    if launch.nodes == 1:
        where += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        where += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{launch.master_addr}:{launch.master_port}"]
        # torch would guess the host by the machine's names, and join whatever else listens there if the port is taken.
        waits = f"join_timeout={launch.wait_seconds},read_timeout={launch.wait_seconds}"
        where += ["--rdzv-conf", f"is_host={int(launch.node_rank == 0)},{waits}"]
    where += shlex.split(launch.torchrun)
    script = ["-m", OURS] if launch.script is None else ["-m", "megatron_epp.run", launch.script]
    return [sys.executable, "-m", "megatron_epp.launch.torchrun", *where, *script, *argv]


def folder_of(launch: Launch, megatron: dict[str, Any]) -> Path:
    return Path(launch.folder or megatron.get("save") or Path("runs") / launch.name)


def log_of(launch: Launch, folder: Path) -> Path | None:
    """Return the file for all that a node of a run prints; None if all of it is printed."""
    return None if launch.full_log else folder / ("train.log" if launch.nodes == 1 else f"train-{launch.node_rank}.log")


def save_run(folder: Path, settings: Settings, command: Sequence[str], environment: Mapping[str, Any]) -> None:
    """Write ``command.sh`` (runs as it is), ``settings.yaml`` (all files and overrides merged) and ``versions.json``.

    Only their owner can read them if a variable of the `launch.environment` section has a name that indicates a secret.
    Raises SettingsError if the folder, which is created if needed, or a file in it cannot be written.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

    lines = ["#!/usr/bin/env bash", *exports(environment), f"exec {shlex.join(command)}"]
    texts = {
        "command.sh": "\n".join(lines) + "\n",
        "settings.yaml": yaml.safe_dump(settings, sort_keys=False),
        "versions.json": json.dumps(versions(), indent=2) + "\n",
    }
    is_private = any(is_secret(name) for name in environment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(folder / name, text, private=is_private)
    except OSError as error:
        where = error.filename or folder
        raise SettingsError(f"{where} cannot be written ({error.strerror}): set launch.folder, or megatron.save") from error


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and the packages that training uses; None for a package that is not installed."""
    python_and_package: dict[str, str | None] = {"megatron-epp": megatron_epp.__version__, "python": platform.python_version()}
    return python_and_package | {package: version_of(package) for package in PACKAGES}
