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

import megatron_epp
from megatron_epp.plan.errors import EppError
from megatron_epp.tools.cli.terminal import ERROR, PROGRAM, Parser, help_width, say, tell, tell_error

PURPOSES = {
    "plan": "make a plan for a batch of sequence lengths and print its summary",
    "show": "show a plan, and a run of it, as text, page, picture or trace; prove it; print its times",
    "compare": "plan batches with several planners and print them side by side",
    "advise": "search parallel sizes for a model, a cluster and lengths, and say why the others lose",
    "prepare": "make Megatron .bin/.idx files of folders, JSONL, Parquet, chats or single files (needs torch and Megatron)",
    "train": "train from YAML settings with Megatron's own loop (needs torch and Megatron)",
    "doctor": "say what this machine has, lacks and should change to train (exit code 1: it cannot); or measure it",
    "first-run": "check a machine step by step, from its software to a plan of your lengths, and write a report",
    "schedules": "list the planners that plans can follow, with their papers",
    "quickstart": "train a small GPT on uneven documents with Megatron's schedule and with plans (needs torch and Megatron)",
    "emulate": "run a plan's ranks as processes of this machine, with timed waits for compute (needs torch)",
}
"""Commands in the order of the list, and what each is for."""
_BELOW_THE_LIST = ("schedules", "quickstart", "emulate")
MODULES = {name: f"megatron_epp.tools.cli.{name.replace('-', '_')}" for name in PURPOSES} | {
    "quickstart": "megatron_epp.contrib.demos.quickstart",
    "emulate": "megatron_epp.contrib.demos.emulate_command",
}
"""Modules with a command's `add_arguments`, `run` and `EXAMPLE`; only that of the command that runs is imported."""
NAMES = {
    "check": ("show", "proof", "prove a plan, or report every violation; exit code 1 when there are any"),
    "simulate": ("show", "times", "simulate a plan and print when each rank works, and the most it holds"),
    "memory": ("plan", "memory", "say what a batch takes on every rank, part by part, and the smallest cap that would do"),
    "profile": ("doctor", "profile", "measure a model's parts on this machine and write a cost profile (needs torch)"),
}
"""Short names: each of a command with one of its switches, and the purpose of both together."""
_HELP = frozenset({"-h", "--help", "--help-all"})
_UNFORESEEN = 70
_TRAINS = ("torch", "megatron", "omegaconf")
"""Packages that only training and measuring need: of the extra `train`, or of the environment in which a user's Megatron is."""
_INSTALL = "pip install 'megatron-epp[train]', or use the environment in which Megatron trains; planning needs neither"
_REPORT = "a fault of megatron-epp: run it again with --debug, and report what it prints as README.md says"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors print one or two lines on stderr, a traceback only with ``--debug``."""
    argv = sys.argv[1:] if argv is None else argv
    if not _HELP.isdisjoint(argv):
        os.environ.setdefault(megatron_epp.COMPILED_VARIABLE, "0")  # help compiles nothing, and importing numba takes long
    parser = _parser([next((word for word in argv if not word.startswith("-")), "")])
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


def _parser(names: Iterable[str] = (*MODULES, *NAMES)) -> Parser:
    """Return the parser of all commands, of which some, by their names, have their flags."""
    purposes = PURPOSES | {name: f"{what}: short for `{own} --{switch}`" for name, (own, switch, what) in NAMES.items()}
    rows = {
        name: textwrap.fill(f"  {name:<10} {text}", help_width(), subsequent_indent=" " * 13) for name, text in purposes.items()
    }
    also = [rows.pop(name) for name in (*_BELOW_THE_LIST, *NAMES)]
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND [options]",
        description="Plan training steps over sequences of very different lengths, prove the plans, look at them, and train "
        "by them with Megatron-LM.\n\ncommands:\n" + "\n".join(rows.values()),
        epilog="\n".join(["also:", *also, "", f"`{PROGRAM} COMMAND --help` lists a command's options."]),
    )
    subparsers = parser.add_subparsers(prog=PROGRAM, metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    for name, purpose in purposes.items():
        added = subparsers.add_parser(name, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name in names:
            own, *switch = NAMES.get(name, (name,))[:2]
            module = importlib.import_module(MODULES[own])
            module.add_arguments(added)
            added.add_help_flags()
            added.set_defaults(run=module.run, **dict.fromkeys(switch, True))
            added.epilog = None if switch else module.EXAMPLE
    version = f"{PROGRAM} {megatron_epp.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_help_flags()
    return parser


if __name__ == "__main__":
    sys.exit(main())
