"""The command line: a file per command, or for a few that go together; ``megatron-epp --help`` lists them.

All but `profile`, `emulate`, `prepare`, `train`, `quickstart` and `first-run` run without torch, Megatron or a GPU. Exit codes:
0 done; 1 `check` found violations, `doctor` a problem, or a step of `first-run` failed; 2 an error; 70 an unforeseen one, which
is a fault of this package; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterable, Sequence

import megatron_epp
from megatron_epp.cli.terminal import ERROR, PROGRAM, Command, Parser, finish, tell, tell_error, tell_traceback
from megatron_epp.plan.errors import EppError

MODULES = {
    "plan": "megatron_epp.cli.plan",
    "memory": "megatron_epp.cli.memory",
    "check": "megatron_epp.cli.plan",
    "simulate": "megatron_epp.cli.plan",
    "compare": "megatron_epp.cli.compare",
    "schedules": "megatron_epp.cli.schedules",
    "advise": "megatron_epp.cli.advise",
    "show": "megatron_epp.cli.show",
    "profile": "megatron_epp.cli.profile",
    "emulate": "megatron_epp.contrib.demos.emulate_command",
    "prepare": "megatron_epp.cli.prepare",
    "train": "megatron_epp.cli.train",
    "quickstart": "megatron_epp.contrib.demos.quickstart",
    "doctor": "megatron_epp.cli.doctor",
    "first-run": "megatron_epp.cli.first_run",
}
"""Modules of commands, in the order of the list; only the module of the command that runs is imported."""
_HELP = frozenset({"-h", "--help"})
_UNFORESEEN = 70
_REPORT = "a fault of megatron-epp: run it again with --debug, and report what it prints as README.md says"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors print one or two lines on stderr, a traceback only with ``--debug``."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or not _HELP.isdisjoint(argv):
        os.environ.setdefault(megatron_epp.COMPILED_VARIABLE, "0")  # help compiles nothing, and importing numba takes long
    named = next((word for word in argv if not word.startswith("-")), "")
    parser = _parser([named] if named in MODULES else MODULES)
    try:
        args = parser.parse(argv)
        parser = args.parser
        code = int(args.run(args))
        finish()
        return code
    except KeyboardInterrupt:
        tell(f"\n{PROGRAM}: interrupted")
        return 130
    except Exception as error:
        if "--debug" in argv:
            tell_traceback(error)
        return _refused(error, parser)


def _refused(error: Exception, parser: Parser) -> int:
    """Say what ended a command in a line or two, with the flags that the command has; the exit code."""
    if isinstance(error, EppError):
        from megatron_epp.mcore.arguments.parser import names_of

        tell_error(error.text(names_of(parser)))
        return ERROR
    if isinstance(error, OSError):
        tell_error(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        return ERROR
    if isinstance(error, MemoryError):
        tell_error(f"no memory left{f': {error}' if str(error) else ''}")
        return ERROR
    if isinstance(error, ImportError):
        tell_error(f"{error}; `{PROGRAM} doctor` says what is missing here")
        return ERROR
    what = " ".join(f"{type(error).__name__}: {error}".split())
    tell_error("; ".join([f"unforeseen {what}", *getattr(error, "__notes__", ()), _REPORT]))
    return _UNFORESEEN


def _command(name: str) -> Command:
    module = importlib.import_module(MODULES[name])
    commands: Sequence[Command] = module.COMMANDS if hasattr(module, "COMMANDS") else (module.COMMAND,)
    return next(one for one in commands if one.name == name)


def _parser(names: Iterable[str] = MODULES) -> Parser:
    """Return the parser of these commands."""
    parser = Parser(
        prog=PROGRAM,
        description="Plan elastic pipeline parallelism from sequence lengths, prove plans, and look at them.",
        epilog="`megatron-epp COMMAND --help` lists a command's options with their units and defaults.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {megatron_epp.__version__}")
    _add_debug(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for one in map(_command, names):
        added = commands.add_parser(
            one.name,
            help=one.purpose,
            description=f"{one.purpose[0].upper()}{one.purpose[1:]}.",
            epilog=one.example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=one.run)
        _add_debug(added)
        one.add_arguments(added)
    return parser


def _add_debug(parser: Parser) -> None:
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error too (default: do not)")


if __name__ == "__main__":
    sys.exit(main())
