"""`megatron-epp train`: YAML settings to a training run."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import warnings
from collections.abc import Iterator

from megatron_epp.cli.terminal import Command, Parser, progress, say, tell
from megatron_epp.cost.library import find
from megatron_epp.launch.command import Launch, command_of, folder_of, log_of, save_run
from megatron_epp.launch.environment_variables import environment_to_set, exports
from megatron_epp.launch.machine import count_gpus
from megatron_epp.launch.script_flags import argv_of
from megatron_epp.launch.short_log import LOG_VARIABLE
from megatron_epp.launch.yaml_settings import Settings, SettingsError, load_settings, world_of
from megatron_epp.plan.reading import naming_file

_EXAMPLE = """\
example: two iterations of a tiny model on two CPU processes
  megatron-epp train -c recipes/tiny-cpu train_iters=2 data_path=documents
see what would run, without running it
  megatron-epp train -c recipes/llama3-8b-128k epp.memory_cap_gb=70 --dry-run
"""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "-c",
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="a YAML file, or the name of a shipped one such as recipes/llama3-8b-128k; repeat it for more, the last wins",
    )
    add(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings that override the files': lr=1e-4, megatron.save=runs/a, epp.placement=v, launch.nodes=2; null unsets",
    )
    add("--dry-run", action="store_true", help="check the settings and print the command; start nothing, write nothing")


def run(args: argparse.Namespace) -> int:
    """Check, print, save, and become torchrun."""
    settings = load_settings(args.config, args.overrides)
    with naming_file(f"-c {', '.join(args.config)}"):
        launch = Launch.of(settings)
        processes = launch.processes_per_node or _processes(settings, launch)
    with progress("reading Megatron's flags"), naming_file(f"-c {', '.join(args.config)}"):
        argv = checked_argv(settings, launch.nodes * processes, wants_files=not args.dry_run)
    command, environment = command_of(launch, argv, processes), environment_to_set(launch.environment)
    say("\n".join([*exports(launch.environment, masked=True), shlex.join(command)]), flush=True)
    if args.dry_run:
        return 0
    folder = folder_of(launch, settings.get("megatron") or {})
    if launch.node_rank == 0:
        save_run(folder, settings, command, launch.environment)
        tell(f"settings, command and versions are in {folder}")
    if launch.nodes > 1:
        tell(f"torchrun waits for all {launch.nodes} nodes, at most {launch.wait_seconds} s")
    if (log := log_of(launch, folder)) is not None:
        folder.mkdir(parents=True, exist_ok=True)  # of a node that saves nothing else
        tell(f"all that Megatron prints is in {log}; here is the short form (launch.full_log=true prints all)")
        environment[LOG_VARIABLE] = str(log)
    os.execvpe(command[0], command, {**os.environ, **environment})
    return 0


def checked_argv(settings: Settings, world_size: int, wants_files: bool) -> list[str]:
    """Return the flags of a run of `world_size` processes, checked as the training script does; with its files if wanted.

    Raises:
        EppError: a key, a value, or several of them together are refused.
    """
    if (cluster := settings.get("cluster")) is not None:
        find("clusters", str(cluster))
    with quietly():
        from megatron_epp.mcore import entry

        parser = entry.megatron_parser()
        argv = argv_of(settings, parser)
        parsed = entry.check(parser, argv)
        entry.check_start(parsed, world_size, wants_files=wants_files)
    return argv


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the warnings of Megatron's imports about missing packages, which the run itself repeats."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _processes(settings: Settings, launch: Launch) -> int:
    """Return the number of processes: one for each GPU of this node; without GPUs, as many as one replica needs."""
    if num_gpus := count_gpus():
        return num_gpus
    needed = world_of(settings.get("megatron") or {})
    if needed % launch.nodes:
        raise SettingsError(
            f"one replica has {needed} ranks, which do not divide over {launch.nodes} nodes without GPUs: set "
            "launch.processes_per_node"
        )
    return needed // launch.nodes


_PURPOSE = "train from YAML settings with Megatron's own loop (needs torch and Megatron)"
COMMAND = Command("train", _PURPOSE, add_arguments, run, _EXAMPLE)
