"""Runs test files in processes forked from the one that has collected them: `pytest --processes 3`.

All modules are imported and all tests collected once. Every file has a process of its own and sees nothing of what others have
left behind; the next file goes to whichever place is free first. Reports come back over a pipe and are logged as if the tests
ran here: `-x`, `--durations` and `--junitxml` work as ever.
"""

import atexit
import contextlib
import gc
import multiprocessing.util
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

from megatron_epp.launch import lifetime
from megatron_epp.planner.service.answers import load_planner


class Processes:
    """Plugin that takes the place of pytest's own loop over the tests.

    Args:
        number: files that run at once.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop says which files cannot be imported
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False  # of several files at once
        session.config.pluginmanager.getplugin("capturemanager").read_global_capture()
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        files: dict[Path, list[pytest.Item]] = {}
        for item in session.items:
            files.setdefault(item.path, []).append(item)
        self._start_shared(session.config)
        if len(files) > self._number:
            with contextlib.suppress(Exception):  # tests say what is wrong with it
                load_planner()  # its compiled loops, which takes longer than most plans of a file
        gc.collect()
        gc.freeze()  # or collecting garbage in a child would copy all pages
        waiting, running = list(files.values()), dict[Connection, _File]()
        try:
            while waiting or running:
                while waiting and len(running) < self._number:
                    file = _File(session, waiting.pop(0))
                    running[file.connection] = file
                for connection in wait([*running]):
                    if not running[connection].log_next():
                        del running[connection]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        finally:
            for file in running.values():
                file.end()
        return True

    def _start_shared(self, config: pytest.Config) -> None:
        """Start what forks ranks for all files: it imports torch, or Megatron, once."""
        if "tests.support.runtime.rank_processes" in sys.modules:
            forkserver.ensure_running()
        if "tests.support.mcore.forked" in sys.modules:
            from tests.support.mcore.forked import start_shared

            self._shared = start_shared(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]


class _File:
    """Tests of a file in a process of their own, as seen by the process that has forked it."""

    def __init__(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        self._hook, self._config = session.config.hook, session.config
        # Not by the hook, which repeats all its calls to every plugin that is registered later: to that of the next file, too.
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        self._warn = terminal.pytest_warning_recorded if terminal else lambda **_: None
        self._to_do, self._last = {item.nodeid: item for item in items}, items[-1]
        self.connection, theirs = Pipe(duplex=False)
        with warnings.catch_warnings():
            # That there is another thread: it is of pyarrow's allocator, which provides for forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            self.connection.close()
            _run(session, items, theirs)
        with contextlib.suppress(ProcessLookupError):
            os.setpgid(self._pid, 0)
        theirs.close()

    def log_next(self) -> bool:
        """Log what the process reports next. Returns whether there will be more."""
        try:
            kind, content = self.connection.recv()
        except EOFError:
            return self._log_lost()
        if kind == "report":
            report = self._hook.pytest_report_from_serializable(config=self._config, data=content)
            self._hook.pytest_runtest_logreport(report=report)
        elif kind == "start":
            self._hook.pytest_runtest_logstart(**content)
        elif kind == "finish":
            self._hook.pytest_runtest_logfinish(**content)
            del self._to_do[content["nodeid"]]
        elif kind == "warning":
            self._warn(**content)
        else:
            os.waitpid(self._pid, 0)
            return False
        return True

    def _log_lost(self) -> bool:
        exit_code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        error = f"no result: the process of the file's tests ended with exit code {exit_code}"
        phase = "call" if self._to_do else "teardown"  # it may have ended behind the last test
        for item in self._to_do.values() or [self._last]:
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", error, phase)
            self._hook.pytest_runtest_logreport(report=report)
        return False

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class _Reporter:
    """Plugin of a file's process: sends what happens to the process that logs it."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._connection.send(("start", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._connection.send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        if when == "runtest":
            warning_message.source = None  # any object
            self._connection.send(("warning", {"warning_message": warning_message, "nodeid": nodeid}))


def _run(session: pytest.Session, items: Sequence[pytest.Item], connection: Connection) -> NoReturn:
    """Run the tests of a file, in its process, and end it."""
    try:
        os.setpgid(0, 0)
        lifetime.end_with_parent()
        atexit._clear()  # what is registered is for the process that registered it
        _adapt(session.config, items[0].path, connection)
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        atexit._run_exitfuncs()
        multiprocessing.util._exit_function()
        connection.send(("end", None))
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)


def _adapt(config: pytest.Config, file: Path, connection: Connection) -> None:
    """Take a file's process out of what it shares with the others: captured output, logs of results, temporary folders."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    for name in ("terminalreporter", "junitxml", "lfplugin", "nfplugin", "stepwiseplugin"):
        config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(_Reporter(config, connection))
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / file.parent.name / file.stem
    folders._basetemp.mkdir(parents=True)
    if forkserver._forkserver._forkserver_pid is not None:
        forkserver._forkserver.ensure_running = lambda: None  # it runs, and is not this process's to wait for
