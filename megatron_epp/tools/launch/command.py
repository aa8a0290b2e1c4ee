"""The command that trains on one node, and the files with which a run can be repeated without this launcher."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence

import megatron_epp
from megatron_epp.launch.machine import version_of
from megatron_epp.launch.yaml_settings import Launch, Settings
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.writing import write_text

OURS = "megatron_epp.mcore.pretrain_gpt"
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "apex", "numpy", "numba", "omegaconf")
"""Packages whose versions are recorded."""
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)", re.IGNORECASE)
"""Pattern in names of variables that are likely to hold a secret, such as ``WANDB_API_KEY`` or ``HF_TOKEN``."""


def command_of(launch: Launch, argv: Sequence[str], processes: int) -> list[str]:
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
    return [sys.executable, "-m", "megatron_epp.tools.launch.torchrun", *where, *script, *argv]


def variables_of(launch: Launch) -> dict[str, str]:
    """Return the environment of the run: this process's, and of `launch.environment` what is not set in it."""
    return {name: str(value) for name, value in (launch.environment or {}).items() if value is not None} | os.environ


def exports(settings: Settings, masked: bool = False) -> list[str]:
    """Lines of a bash script that set the variables of `launch.environment` unless they are set; secrets may be masked.

    Values taken from the environment are read from it again, and a script ends with an error if they are not set.
    """
    from omegaconf import OmegaConf  # which `megatron-core[training]` brings

    text = re.sub(r"\$\{\s*oc\.env\s*:\s*", "${oc.select:variables.", settings.text)
    markers = {"variables": {name: f"@epp-env@{name}@" for name in os.environ}}
    config = OmegaConf.merge(OmegaConf.create(text), markers)
    lines = []
    for name in sorted(settings.launch.environment or {}):
        if (value := config.launch.environment[name]) is not None:
            words = re.split(r"@epp-env@(\w+)@", str(value))  # every second one is a variable
            words[1::2] = [f"${{{source}?is not set, and {name} takes its value}}" for source in words[1::2]]
            quoted = (lambda _: "'***'") if masked and _SECRET.search(name) else shlex.quote
            words[::2] = [text and quoted(text) for text in words[::2]]
            lines.append(f"export {name}=${{{name}-{''.join(words)}}}")
    return lines


def save_run(settings: Settings, command: Sequence[str]) -> None:
    """Write ``command.sh`` (runs as it is), ``settings.yaml`` (all files and overrides merged) and ``versions.json``.

    Only their owner can read them if a variable's name indicates a secret. Raises `EppError` if one cannot be written.
    """
    texts = {
        "command.sh": "\n".join(["#!/usr/bin/env bash", *exports(settings), f"exec {shlex.join(command)}", ""]),
        "settings.yaml": settings.text,
        "versions.json": json.dumps(versions(), indent=2) + "\n",
    }
    is_private = any(_SECRET.search(name) for name in settings.launch.environment or {})
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_text(settings.folder / name, text, private=is_private)
    except OSError as error:
        where = error.filename or settings.folder
        raise EppError(f"{where} cannot be written ({error.strerror}): set launch.folder, or megatron.save") from error


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and the packages that training uses; None for a package that is not installed."""
    python_and_package: dict[str, str | None] = {"megatron-epp": megatron_epp.__version__, "python": platform.python_version()}
    return python_and_package | {package: version_of(package) for package in PACKAGES}
