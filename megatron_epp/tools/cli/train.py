"""`megatron-epp train`: YAML settings to a training run, and the files with which it can be repeated without this launcher."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence

import megatron_epp
from megatron_epp.launch.machine import count_gpus, version_of
from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import Launch, Settings, load_settings
from megatron_epp.mcore.arguments.layout import world_of
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import naming_file
from megatron_epp.plan.writing import write_text
from megatron_epp.plan.yaml_files import find
from megatron_epp.tools.cli.terminal import Parser, progress, say, tell
from megatron_epp.tools.launch.runs import OURS
from megatron_epp.tools.launch.torchrun import LOG_VARIABLE

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
    """Lines of a bash script that set `launch.environment`, unless set; what is from variables is read from them again."""
    from omegaconf import OmegaConf  # which `megatron-core[training]` brings

    text = re.sub(r"\$\{\s*oc\.env\s*:\s*", "${oc.select:variables.", settings.text)
    config = OmegaConf.merge(OmegaConf.create(text), {"variables": {name: f"@epp-env@{name}@" for name in os.environ}})
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
    """Write ``command.sh``, ``settings.yaml`` and ``versions.json``; private if a name says secret. Raises `EppError`."""
    script = "\n".join(["#!/usr/bin/env bash", *exports(settings), f"exec {shlex.join(command)}", ""])
    texts = {"command.sh": script, "settings.yaml": settings.text, "versions.json": json.dumps(versions(), indent=2) + "\n"}
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
    own: dict[str, str | None] = {"megatron-epp": megatron_epp.__version__, "python": platform.python_version()}
    return own | {package: version_of(package) for package in PACKAGES}


EXAMPLE = """\
example: two iterations of a tiny model on two CPU processes
  megatron-epp train -c recipes/tiny-cpu train_iters=2 data_path=documents
see what would run, without running it
  megatron-epp train -c recipes/llama3-8b-128k epp.memory_cap_gb=70 --dry-run
"""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    files = "a YAML file, or the name of a shipped one such as recipes/llama3-8b-128k; repeat it for more, the last wins"
    add("-c", "--config", action="append", required=True, metavar="FILE", help=files)
    more = "settings that override the files': lr=1e-4, megatron.save=runs/a, epp.placement=v, launch.nodes=2; null unsets"
    add("overrides", nargs="*", metavar="KEY=VALUE", help=more)
    add("--dry-run", action="store_true", help="check the settings and print the command; start nothing, write nothing")


def run(args: argparse.Namespace) -> int:
    settings = load_settings(args.config, args.overrides)
    launch = settings.launch
    with progress("reading Megatron's flags"), naming_file(f"-c {', '.join(args.config)}"):
        processes = launch.processes_per_node or _processes(settings)
        argv = checked_argv(settings, launch.nodes * processes, wants_files=not args.dry_run)
    command, variables = command_of(launch, argv, processes), variables_of(launch)
    say("\n".join([*exports(settings, masked=True), shlex.join(command)]), flush=True)
    if args.dry_run:
        return 0
    if launch.node_rank == 0:
        save_run(settings, command)
        tell(f"settings, command and versions are in {settings.folder}")
    if launch.nodes > 1:
        tell(f"torchrun waits for all {launch.nodes} nodes, at most {launch.wait_seconds} s")
    if settings.log is not None:
        settings.folder.mkdir(parents=True, exist_ok=True)  # of a node that saves nothing else
        tell(f"all that Megatron prints is in {settings.log}; here is the short form (launch.full_log=true prints all)")
        variables[LOG_VARIABLE] = str(settings.log)
    os.execvpe(command[0], command, variables)
    return 0


def checked_argv(settings: Settings, world_size: int, wants_files: bool) -> list[str]:
    """Return the flags of a run, checked as the training script does, with its files if wanted. Raises `EppError`."""
    if settings.cluster is not None:
        find("clusters", settings.cluster)
    with quietly():
        from megatron_epp.mcore import entry

        parser = entry.megatron_parser()
        argv = argv_of(settings, parser)
        entry.check_start(entry.check(parser, argv), world_size, wants_files=wants_files)
    return argv


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warnings of Megatron's imports about missing packages, which the run itself repeats."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


def _processes(settings: Settings) -> int:
    """Return the number of processes: one for each GPU of this node; without GPUs, as many as one replica needs."""
    ranks, nodes = world_of(settings.megatron), settings.launch.nodes
    if num_gpus := count_gpus():
        return num_gpus
    if ranks % nodes:
        raise EppError(f"a replica's {ranks} ranks do not divide over {nodes} nodes: set launch.processes_per_node")
    return ranks // nodes
