"""The command that trains on one node, and what is saved beside the run so that it can be repeated without this loader."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import megatron_epp
from megatron_epp.launch.machine import version_of
from megatron_epp.launch.meet import WAIT_S, usable_port
from megatron_epp.launch.nearest import nearest
from megatron_epp.launch.settings import Settings, SettingsError

REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
"""Whose product is the ranks of one data-parallel replica."""
OURS = "megatron_epp.mcore.pretrain_gpt"
_ANY = 1 << 31
_RANGES = (("nodes", 1, _ANY), ("processes_per_node", 1, _ANY), ("master_port", 0, 65535), ("wait_seconds", 1, _ANY))
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex", "numpy", "numba", "omegaconf")
"""Whose versions are noted."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a run is started: the `launch` section.

    Attributes:
        nodes: in all.
        node_rank: of this one.
        processes_per_node: one for each GPU; None counts them, and without any starts what the parallel sizes ask for.
        master_addr, master_port: where the first node listens. Port 0 takes a free one, on a single node.
        wait_seconds: how long nodes wait for each other to come up.
        script: a `pretrain_gpt.py` of one's own; None uses ours.
        folder: where the settings are saved; None: the run's ``save`` folder, or ``runs/NAME``.
        name: of the run.
        environment: variables to set where they are not set already.
    """

    nodes: int = 1
    node_rank: int = 0
    processes_per_node: int | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    wait_seconds: int = WAIT_S
    script: str | None = None
    folder: str | None = None
    name: str = "train"
    environment: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(settings: Settings) -> Launch:
        """Raises SettingsError for an unknown key or a value of the wrong type."""
        section = {key: value for key, value in (settings.get("launch") or {}).items() if value is not None}
        known = {one.name: one for one in fields(Launch)}
        for key, value in section.items():
            if key not in known:
                raise SettingsError(f"launch.{key} is unknown{nearest(key, known)}; there are {', '.join(known)}")
            wanted = {"master_addr": str, "script": str, "folder": str, "name": str, "environment": dict}.get(key, int)
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise SettingsError(f"launch.{key} is {value!r}; it must be of type {wanted.__name__}")
        made = Launch(**section)
        for key, least, most in _RANGES:
            if (number := getattr(made, key)) is not None and not least <= number <= most:
                raise SettingsError(f"launch.{key} is {number}; it must be {least} or more" + f", up to {most}" * (most < _ANY))
        if not 0 <= made.node_rank < made.nodes:
            raise SettingsError(f"launch.node_rank {made.node_rank} is none of launch.nodes {made.nodes}: they count from 0")
        if made.nodes > 1 and made.master_port == 0:
            raise SettingsError("launch.master_port is 0; nodes must agree on a port: set MASTER_PORT or launch.master_port")
        if made.script is not None and not Path(made.script).is_file():
            raise SettingsError(f"launch.script: there is no file {made.script}")
        return made


def world_of(megatron: Mapping[str, Any]) -> int:
    """Ranks of one data-parallel replica. Raises SettingsError for a size below 1."""
    sizes = [1 if megatron.get(name) is None else megatron[name] for name in REPLICA_SIZES]
    for name, size in zip(REPLICA_SIZES, sizes, strict=True):
        if not isinstance(size, int) or size < 1:
            raise SettingsError(f"--{name.replace('_', '-')} is {size!r}; it must be a whole number from 1")
    return math.prod(sizes)


def command_of(launch: Launch, argv: Sequence[str], processes: int) -> list[str]:
    """torchrun for this node.

    Args:
        launch: how.
        argv: flags of the training script.
        processes: on this node.

    Raises:
        PortError: this node is to listen on a port that is taken.
    """
    port = usable_port(launch.master_port) if launch.node_rank == 0 else launch.master_port
    where = ["--nnodes", str(launch.nodes), "--node-rank", str(launch.node_rank), "--nproc-per-node", str(processes)]
    where += ["--master-addr", launch.master_addr, "--master-port", str(port)]
    script = ["-m", OURS] if launch.script is None else ["-m", "megatron_epp.run", launch.script]
    return [sys.executable, "-m", "megatron_epp.launch.torchrun", *where, *script, *argv]


def folder_of(launch: Launch, megatron: dict[str, Any]) -> Path:
    return Path(launch.folder or megatron.get("save") or Path("runs") / launch.name)


def save_run(folder: Path, settings: Settings, command: Sequence[str], environment: dict[str, str]) -> None:
    """Write ``command.sh`` (runs as it is), ``settings.yaml`` (all files and overrides merged) and ``versions.json``.

    Raises:
        SettingsError: the folder cannot be made.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{folder} cannot be made ({error.strerror}): set launch.folder, or megatron.save") from error
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
    (folder / "command.sh").write_text(f"#!/usr/bin/env bash\n{exports}exec {shlex.join(command)}\n", encoding="utf-8")
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str | None]:
    """Of this package, Python and what training runs on; None for what is not installed."""
    ours: dict[str, str | None] = {"megatron-epp": megatron_epp.__version__, "python": platform.python_version()}
    return ours | {package: version_of(package) for package in PACKAGES}


def environment_of(launch: Launch) -> dict[str, str]:
    """What is to be set: what the environment has already wins."""
    return {name: str(value) for name, value in launch.environment.items() if name not in os.environ}
