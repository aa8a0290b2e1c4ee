"""Parser and output of all commands: errors are one line, and a line on stderr tells what takes long.

Control characters in the text of files are printed as escapes, so no terminal obeys them.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megatron_epp.launch.script_flags import SuggestingParser
from megatron_epp.plan.reading import printable

PROGRAM = "megatron-epp"
ERROR = 2  # exit code of a command that ended with an error that it told
EXACT_PLANNER_LOG = "megatron_epp.contrib.exact"  # package of the exact planner, whose last message commands print
_WIDEST = 2000  # characters after which a line of an error is cut
PATIENCE_S = 2.0  # seconds before the first progress line: shorter work prints nothing
_TERMINAL_EVERY_S, _LOG_EVERY_S = 0.5, 30.0
PICTURES = (".png", ".svg", ".pdf")
PAGE = ".html"
_HELP_WIDTH = 100  # most characters of a line of help
_FLAG_WIDTH = 20  # characters of a flag before its text, if it is not longer


def help_width() -> int:
    return min(_HELP_WIDTH, shutil.get_terminal_size().columns) - 2


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help: a flag has one name and its text in its line, prose is wrapped, indented commands of examples are not."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=help_width())

    def _format_action(self, action: argparse.Action) -> str:
        names = self._format_action_invocation(action).ljust(_FLAG_WIDTH)
        text = f"{names}  {self._expand_help(action) if action.help else ''}".rstrip()
        indent = " " * self._current_indent
        below = f"{indent}    "
        return textwrap.fill(text, self._width, initial_indent=indent, subsequent_indent=below, break_on_hyphens=False) + "\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if not name.startswith("--")] + long_names(action)[:1]
        value = "" if action.nargs == 0 else self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(names)} {value}".rstrip()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            lines += [line] if line.startswith(" ") or len(line) <= width else textwrap.wrap(line, width)
        return "\n".join(indent + line for line in lines)


def long_names(action: argparse.Action) -> list[str]:
    return [name for name in action.option_strings if name.startswith("--")]


class Parser(SuggestingParser):
    """Argument parser with one-line errors. The parsers of its subcommands are of this class too."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        defaults: dict[str, Any] = {"formatter_class": HelpFormatter, "add_help": False}
        super().__init__(*args, **defaults | settings)
        self.set_defaults(parser=self)

    def add_help_flags(self) -> None:
        """Add ``--help`` and ``--debug`` behind the command's own flags, and list flags without a group last."""
        self.add_argument("-h", "--help", "--help-all", action="help", help="print this help")
        self.add_argument("--debug", action="store_true", help="print the traceback of an error too (default: do not)")
        self._action_groups.sort(key=lambda group: group is self._optionals)
        formatter, words = self._get_formatter(), ["%(prog)s", "[options]"]
        for action in sorted(self._actions, key=lambda argument: not argument.option_strings):
            if action.required or not action.option_strings:
                value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
                words += [*long_names(action)[:1], value]
        self.usage = self.usage or " ".join(words)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse as `parse_args` does; the subcommand's own parser reports unknown words."""
        args: argparse.Namespace
        args, unknown = self.parse_known_args(argv)
        if unknown:
            args.parser.refuse(unknown)
        return args

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        self.error(f"this command knows no {self.named(unknown)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def unknown_flags(self) -> list[str]:
        """Return the flags among the words that this parser does not know, not even shortened."""
        flags = (word.partition("=")[0] for word in self.words if word.startswith("--") and word != "--")
        return [flag for flag in flags if not any(known.startswith(flag) for known in self._option_string_actions)]

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required") and (unknown := self.unknown_flags()):
            self.refuse(unknown)
        self.exit(2, f"{printable(f'{self.prog}: error: {message}; see {self.prog} --help')}\n")


def add_output(parser: argparse._ActionsContainer, help: str, **changes: Any) -> None:
    settings: dict[str, Any] = {"type": output, "metavar": "FILE", "help": help}
    parser.add_argument("-o", "--output", **settings | changes)


def output(text: str) -> str:
    """Read the name of a file to write. Refuses one that cannot be written before anything is computed."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: give a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}; make it first")
    return text


def output_folder(text: str) -> str:
    """Read the name of a folder to write to. Refuses one that cannot be made or written before anything is computed."""
    there = next(path for path in (Path(text), *Path(text).absolute().parents) if path.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is a file: give a folder")
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written to ({error.strerror}): give another folder") from error
    return text


def picture_or_page(text: str) -> str:
    if not is_page(text) and Path(text).suffix.lower() not in PICTURES:
        why = f"{text}: the name ends in {PAGE} for a page, or in {', '.join(PICTURES)} for a picture"
        raise argparse.ArgumentTypeError(why)
    return output(text)


def is_page(path: str) -> bool:
    return Path(path).suffix.lower() == PAGE


def say(text: str = "", end: str = "\n", *, flush: bool = False) -> None:
    """Print lines on stdout. Characters that its encoding lacks are escaped; if its reader is gone, the rest is dropped."""
    _write(sys.stdout, text + end, flush)


def tell(text: str) -> None:
    """Print lines on stderr, where progress and errors go."""
    _write(sys.stderr, text + "\n", flush=True)


def tell_error(text: str) -> None:
    """Print an error. Very long lines are truncated."""
    lines = (line if len(line) <= _WIDEST else f"{line[: _WIDEST - 1]}…" for line in text.split("\n"))
    tell(f"{PROGRAM}: error: " + "\n".join(lines))


@contextmanager
def progress(what: str, detail: Callable[[], str] | None = None) -> Iterator[Callable[[str], object]]:
    """Show what the body does, for how long, and how far it has got, if it takes more than two seconds.

    How far is what `detail` returns, or without it, what the function that is yielded was last called with.
    """
    done, notes = threading.Event(), deque([""], maxlen=1)
    thread = threading.Thread(target=_report, args=(what, detail or (lambda: notes[-1]), done), daemon=True)
    thread.start()
    try:
        yield notes.append
    finally:
        done.set()
        thread.join()


@contextmanager
def latest_message(name: str) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the last INFO message of a package's loggers; empty before the first."""
    logger, messages = logging.getLogger(name), deque([""], maxlen=1)
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lambda: messages[-1]
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _write(stream: TextIO | None, text: str, flush: bool) -> None:
    if stream is None:  # the shell has closed it
        return
    encoding, text = getattr(stream, "encoding", None) or "utf-8", "\n".join(map(printable, text.split("\n")))
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        if flush:
            stream.flush()
    except OSError as error:
        devnull = os.open(os.devnull, os.O_WRONLY)  # Python writes what is still buffered once more when it exits
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
        if not isinstance(error, BrokenPipeError):  # the reader of a pipe, such as head, has seen enough
            raise


def _report(what: str, detail: Callable[[], str], done: threading.Event) -> None:
    start, wait_s, wiped = time.monotonic(), PATIENCE_S, ""
    clear, end, every_s = ("\r\033[K", "", _TERMINAL_EVERY_S) if sys.stderr.isatty() else ("", "\n", _LOG_EVERY_S)
    while not done.wait(wait_s):
        parts = [what, f"{time.monotonic() - start:.0f} s", *filter(None, [detail()])]
        sys.stderr.write(clear + printable(", ".join(parts)) + end)
        sys.stderr.flush()
        wait_s, wiped = every_s, clear
    if wiped:
        sys.stderr.write(wiped)
        sys.stderr.flush()
