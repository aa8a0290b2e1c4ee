"""`megatron-epp train`: YAML settings to a training run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import warnings
from collections.abc import Iterator

from megatron_epp.launch.machine import count_gpus
from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.yaml_settings import Settings, load_settings
from megatron_epp.mcore.arguments.layout import world_of
from megatron_epp.plan.errors import EppError
from megatron_epp.plan.reading import naming_file
from megatron_epp.plan.yaml_files import find
from megatron_epp.tools.cli.terminal import Command, Parser, progress, say, tell
from megatron_epp.tools.launch.command import command_of, exports, save_run, variables_of
from megatron_epp.tools.launch.torchrun import LOG_VARIABLE

_EXAMPLE = """\
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


_PURPOSE = "train from YAML settings with Megatron's own loop (needs torch and Megatron)"
COMMAND = Command("train", _PURPOSE, add_arguments, run, _EXAMPLE)
