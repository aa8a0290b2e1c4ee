"""Stand-in for `torch.cuda` that demands of every thread to choose its rank's device before it touches the device.

A thread begins with the node's first GPU. CUDA makes a context of hundreds of megabytes there for what it then does, and says
nothing; here it is noted.
"""

import threading
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.copy_streams import CopyStreams
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.lowered import prepare
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.upload import Uploader
from tests.support.runtime.plain_stage import parameters_of, stages_of

DEVICE = 3
"""Device of the audited rank."""


class Audit:
    """What threads do with the device. Everything of `torch.cuda` that the package calls notes who calls it."""

    def __init__(self):
        self._own = threading.local()
        self.seen = {}
        """Names of the calls by name of the thread."""
        self.faults = []
        """``(thread, call, device)`` of calls on another device than the rank's."""
        self.nvtx = _Ranges(self)

    def touch(self, call):
        thread = threading.current_thread().name
        self.seen.setdefault(thread, set()).add(call)
        if self.current_device() != DEVICE:
            self.faults.append((thread, call, self.current_device()))

    def is_initialized(self):
        return True

    def current_device(self):
        return getattr(self._own, "device", 0)

    def set_device(self, device):
        self._own.device = device if isinstance(device, int) else device.index

    def current_stream(self):
        return Stream(self)

    def Stream(self):
        self.touch("Stream")
        return Stream(self)

    def Event(self, **_):
        return Event(self)

    @contextmanager
    def stream(self, stream):
        self.touch("stream")
        yield

    def synchronize(self):
        self.touch("synchronize")

    @contextmanager
    def installed(self):
        """Take the place of what the package calls of `torch.cuda`, in a rank whose main thread is this one."""
        names = ("is_initialized", "current_device", "set_device", "current_stream", "Stream", "Event", "stream", "synchronize")
        self.set_device(DEVICE)
        with patch.multiple(torch.cuda, nvtx=self.nvtx, **{name: getattr(self, name) for name in names}):
            yield self


class _Touching:
    NAMES = ()

    def __init__(self, audit):
        self.audit = audit

    def __getattr__(self, name):
        if name not in self.NAMES:
            raise AttributeError(name)

        def call(*args):
            self.audit.touch(name)

        return call


class _Ranges(_Touching):
    @contextmanager
    def range(self, text):
        self.audit.touch("range")
        yield


class Stream(_Touching):
    NAMES = ("wait_stream", "wait_event", "synchronize", "query")

    def record_event(self):
        self.audit.touch("record_event")
        return Event(self.audit)


class Event(_Touching):
    """An event that the device has passed when it is asked for the second time."""

    NAMES = ("record", "wait", "synchronize")

    def __init__(self, audit):
        super().__init__(audit)
        self.num_asked = 0

    def query(self):
        self.audit.touch("query")
        self.num_asked += 1
        return self.num_asked > 1

    def elapsed_time(self, end):
        self.audit.touch("elapsed_time")
        return 1.0


class Work(_Touching):
    NAMES = ("wait", "is_completed")


def uploader(audit, monkeypatch):
    """An uploader to the rank's device, whose buffers are on the CPU."""
    monkeypatch.setattr(Uploader, "_buffers", lambda self, size: tuple(torch.empty(size, dtype=torch.uint8) for _ in range(2)))
    return Uploader(torch.device("cuda", DEVICE), audit)


def run(audit, plan, rank, watchdog=None, program=None):
    """Run a rank's part of a plan of plain stages under an audit; return its recorder. What it receives is zeros."""
    stages, recorder = stages_of(plan, rank), Recorder()
    names = ("activations", "gradients", "figures", "control", "activations_down", "gradients_up")
    links = Links(tuple(range(plan.num_ranks)), rank, **{name: name for name in names}, directions=(), slots_on_cpu=True)

    def isend(tensor, peer, group):
        audit.touch("isend")
        return Work(audit)

    def irecv(buffer, peer, group):
        audit.touch("irecv")
        buffer.zero_()
        return Work(audit)

    with patch.object(dist, "isend", isend), patch.object(dist, "irecv", irecv):
        host = HostMemory(torch.device("cpu"), 1 << 30, CopyStreams(audit))
        with (
            ActivationOffload(host, parameters_of(stages)) as saved,
            offload_handlers(plan, rank, stages, host, saved) as handlers,
        ):
            own = weight_handlers(plan, stages) | handlers
            Executor(plan, rank, stages, program or prepare(plan, rank), links, recorder, watchdog, handlers=own).run()
    return recorder
