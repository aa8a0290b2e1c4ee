"""Verdict on a damaged file: taken, refused in one line that names the file and where in it, or a fault of the package."""

import contextlib
import io
import logging
import random
import re
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatron_epp.plan import EppError
from tests.support.fuzz.damage import Damage
from tests.support.plan.bad_files import exit_code

MOST_CPU_S, MOST_WALL_S = 5.0, 600.0
"""Longest time of reading one file: of a processor, and in all, which ends what waits for ever even on a busy machine."""
MOST_BYTES = 2 << 30
"""Most memory that reading takes in addition to what the process has."""

_NO_ROOM = "no plan fits a memory cap"
"""Beginning of what says that a file was read, and that its devices are too small."""

Reader = Callable[[Path], object]
"""Function that reads a file. It raises `EppError` where the file is refused, or returns a text that says so."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file.

    Attributes:
        file: name of the file.
        sound: makes the contents of sound ones.
        damage: makes damaged content of sound content.
        readers: ways to read it, by name; all of them read every damaged file.
        located: pattern of what says where in the file the fault is.
        others: makes the contents of sound files that are next to it, by name.
        named: pattern of what a refusal names; the file if it is empty.
    """

    file: str
    sound: Callable[[], Sequence[bytes]]
    damage: Damage
    readers: Mapping[str, Reader]
    located: str
    others: Callable[[], Mapping[str, bytes]] = dict
    named: str = ""


class Fault(Exception):
    """A fault of the package."""


class TooSlow(BaseException):
    """Reading takes too long. No `except Exception` catches it."""


@dataclass(slots=True)
class Tally:
    """Counts of what became of damaged files.

    Attributes:
        files: number of damaged files.
        tried, taken, refused: numbers of readings.
        faults: each with the number of the mutant and the reader.
    """

    files: int = 0
    tried: int = 0
    taken: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


def mutant(name: str, form: Format, number: int) -> bytes:
    """Return the content of a damaged file, which depends on nothing but the arguments."""
    draw = random.Random(f"{name} 0 {number}")
    return form.damage(draw.choice(form.sound()), draw)


def run(name: str, form: Format, numbers: range, folder: Path) -> Tally:
    """Read damaged files, with little memory, and judge what becomes of each. The folder is empty."""
    tally = Tally()
    (folder / form.file).parent.mkdir(exist_ok=True)
    for other, content in form.others().items():
        (folder / other).parent.mkdir(exist_ok=True)
        write(folder / other, content)
    for number in numbers:
        tally.files += 1
        content = mutant(name, form, number)
        for reader in form.readers:
            write(folder / form.file, content)
            with limits():
                judge(form, reader, folder, f"{name} {number} ({reader})", tally)
    return tally


def judge(form: Format, reader: str, folder: Path, origin: str, tally: Tally) -> None:
    path = folder / form.file
    tally.tried += 1
    try:
        message = _refusal(form.readers[reader], path)
    except EppError as error:
        message = str(error)
    except (TooSlow, Fault) as error:
        tally.faults.append(f"{origin}: {error}")
        return
    except Exception as error:
        tally.faults.append(f"{origin}: {''.join(traceback.format_exception(error)[-3:])}")
        return
    if not message:
        tally.taken += 1
        return
    tally.refused += 1
    if fault := fault_of(message, path, form):
        tally.faults.append(f"{origin}: {fault}: {message}")


def _refusal(read: Reader, path: Path) -> str:
    """Return the text that says why a file is refused; empty if it is taken."""
    answer = read(path)
    return answer if isinstance(answer, str) else ""


def fault_of(message: str, path: Path, form: Format) -> str:
    if "\n" in message:
        return "it is more than a line"
    if not message.isprintable():
        return "it has control characters"
    if not re.search(form.named or re.escape(path.name), message):
        return "it does not name the file"
    if not re.search(form.located, message.replace(str(path.parent), "")):
        return "it does not say where"
    return ""


def command(*words: str, accepted: Sequence[int] = (0,)) -> Reader:
    """Return a reader by a command of ``megatron-epp``.

    Args:
        words: of the command; FILE stands for the path of the file, FOLDER for its folder.
    """

    def read(path: Path) -> str:
        argv = [word.replace("FILE", str(path)).replace("FOLDER", str(path.parent)) for word in words]
        printed, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(error):
            code = exit_code(argv)
        out, err = printed.getvalue(), error.getvalue()
        if not all(line.isprintable() for line in (out + err).split("\n")):
            raise Fault(f"control characters are printed: {out + err!r}")
        if code in accepted:
            return ""
        _, prefix, message = err.rpartition("megatron-epp: error: ")
        if code != 2 or not prefix or not message.endswith("\n"):
            raise Fault(f"exit code {code}: {err}")
        return "" if message.startswith(_NO_ROOM) else message[:-1]

    return read


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_epp")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Raise `TooSlow` in the body when it takes too long, and `MemoryError` when it takes `MOST_BYTES` of address space."""

    def stop(number: int, _: FrameType | None) -> None:
        limit = f"{MOST_CPU_S:g} s of a processor" if number == signal.SIGPROF else f"{MOST_WALL_S:g} s"
        raise TooSlow(f"reading takes more than {limit}")

    own = re.search(r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    space = resource.getrlimit(resource.RLIMIT_AS)
    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(own[1]) + MOST_BYTES, space[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    signal.setitimer(signal.ITIMER_REAL, MOST_WALL_S)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, space)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def refused_though_sound(form: Format, folder: Path) -> dict[str, str]:
    """Read a format's sound files from a folder. Returns the refusals by reader."""
    for name, content in {**form.others(), form.file: form.sound()[0]}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder / name, content)
    found = {reader: _refusal(read, folder / form.file) for reader, read in form.readers.items()}
    return {reader: refusal for reader, refusal in found.items() if refusal}
