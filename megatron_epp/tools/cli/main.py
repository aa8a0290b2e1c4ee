"""The command line: a file per command, or for a few that go together; ``megatron-epp --help`` lists them.

All but `prepare`, `train`, `first-run`, `doctor --profile` and the demonstrations run without torch, Megatron or a GPU. Exit
codes: 0 done; 1 `show --proof` found violations, `doctor` a problem, or a step of `first-run` failed; 2 an error; 70 an
unforeseen one, which is a fault of this package; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace

import megatron_epp
from megatron_epp.plan.errors import EppError
from megatron_epp.tools.cli.terminal import ERROR, PROGRAM, Command, Parser, help_width, say, tell, tell_error

_LISTED = ("plan", "show", "compare", "advise", "prepare", "train", "doctor", "first-run")
MODULES = {
    **{name: f"megatron_epp.tools.cli.{name.replace('-', '_')}" for name in (*_LISTED, "schedules")},
    "quickstart": "megatron_epp.contrib.demos.quickstart",
    "emulate": "megatron_epp.contrib.demos.emulate_command",
}
"""Modules of commands, in the order of the list; only the module of the command that runs is imported."""


NAMES = {
    "check": ("show", "proof", "prove a plan, or report every violation; exit code 1 when there are any"),
    "simulate": ("show", "times", "simulate a plan and print when each rank works, and the most it holds"),
    "memory": ("plan", "memory", "say what a batch takes on every rank, part by part, and the smallest cap that would do"),
    "profile": ("doctor", "profile", "measure a model's parts on this machine and write a cost profile (needs torch)"),
}
"""Short names: each of a command with one of its switches, and the purpose of both together."""
_LAST = """\
also:
  check, simulate  short for `show --proof` and `show --times`
  memory           short for `plan --memory`
  profile          short for `doctor --profile`
  schedules        list the planners that plans can follow, with their papers
  quickstart       demonstration: train a small GPT with Megatron's schedule and with plans
  emulate          demonstration: run a plan's ranks as processes, with timed waits for compute

`megatron-epp COMMAND --help` lists a command's options.
"""
_HELP = frozenset({"-h", "--help", "--help-all"})
_UNFORESEEN = 70
_TRAINS = ("torch", "megatron", "omegaconf")
"""Packages that only training and measuring need: of the extra `train`, or of the environment in which a user's Megatron is."""
_INSTALL = "pip install 'megatron-epp[train]', or use the environment in which Megatron trains; planning needs neither"
_REPORT = "a fault of megatron-epp: run it again with --debug, and report what it prints as README.md says"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors print one or two lines on stderr, a traceback only with ``--debug``."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or not _HELP.isdisjoint(argv):
        os.environ.setdefault(megatron_epp.COMPILED_VARIABLE, "0")  # help compiles nothing, and importing numba takes long
    named = next((word for word in argv if not word.startswith("-")), "")
    parser = _parser([named] if named in (*MODULES, *NAMES) else (*MODULES, *NAMES))
    try:
        args = parser.parse(argv)
        parser = args.parser
        code = int(args.run(args))
        say(end="", flush=True)  # raises `OSError` if the output cannot be written, as on a full disk
        return code
    except KeyboardInterrupt:
        tell(f"\n{PROGRAM}: interrupted")
        return 130
    except Exception as error:
        if "--debug" in argv:
            tell("".join(traceback.format_exception(error)).rstrip())
        return _refused(error, parser)


def _refused(error: Exception, parser: Parser) -> int:
    """Print why a command ended, in a line or two and with the names of its flags; return the exit code."""
    code = ERROR
    if isinstance(error, EppError):
        from megatron_epp.mcore.arguments.parser import names_of

        text = error.text(names_of(parser))
    elif isinstance(error, OSError):
        text = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    elif isinstance(error, MemoryError):
        text = f"no memory left{f': {error}' if str(error) else ''}"
    elif isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _TRAINS:
        text = f"{parser.prog} needs {error.name}, which is not installed here: {_INSTALL}"
    elif isinstance(error, ImportError):
        text = f"{error}; `{PROGRAM} doctor` says what is missing here"
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        text, code = "; ".join([f"unforeseen {what}", *getattr(error, "__notes__", ()), _REPORT]), _UNFORESEEN
    tell_error(text)
    return code


def _command(name: str) -> Command:
    if name in NAMES:
        own_name, switch, purpose = NAMES[name]
        return replace(_command(own_name), name=name, purpose=f"{purpose}: short for `{own_name} --{switch}`", example="")
    command: Command = importlib.import_module(MODULES[name]).COMMAND
    return command


def _parser(names: Iterable[str] = (*MODULES, *NAMES)) -> Parser:
    known = [_command(name) for name in names]
    rows = (f"  {command.name:<10} {command.purpose}" for command in known if command.name in _LISTED)
    listed = [textwrap.fill(row, help_width(), subsequent_indent=" " * 13) for row in rows]
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [options]",
        description="Plan training steps over sequences of very different lengths, prove the plans, look at them, and train "
        "by them with Megatron-LM.\n\ncommands:\n" + "\n".join(listed),
        epilog=_LAST,
    )
    subparsers = parser.add_subparsers(prog=PROGRAM, metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    for command in known:
        description = f"{command.purpose[0].upper()}{command.purpose[1:]}."
        added = subparsers.add_parser(command.name, description=description, epilog=command.example)
        added.set_defaults(run=command.run)
        command.add_arguments(added)
        added.add_help_flags()
        if command.name in NAMES:
            added.set_defaults(**{NAMES[command.name][1]: True})
    version = f"{PROGRAM} {megatron_epp.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_help_flags()
    return parser


if __name__ == "__main__":
    sys.exit(main())
