"""Records what a rank launches: executor, links, upload, offload and host memory as they are, on streams that only take notes.

Nothing of the runtime is replaced but what it calls of torch: `torch.cuda`'s streams, as `CopyStreams` takes them, and the two
functions that start messages. A rank runs alone, in this process and on a CPU; the messages that it receives are zeros.
"""

from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.copy_streams import CopyStreams
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.features.split_weights.deferred_gradients import handlers as weight_handlers
from megatron_epp.plan import Op
from megatron_epp.plan.operations import Track, operation
from megatron_epp.runtime.attention.segments import offsets_of
from megatron_epp.runtime.executor import Executor
from megatron_epp.runtime.links.links import Links
from megatron_epp.runtime.lowered import prepare
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.upload import Uploader
from tests.support.plan.queue_machine import Launch
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part, parameters_of

COMPUTE, WAIT, SEND, RECEIVE, REDUCTION = "compute", "wait", "send", "receive", "reduction"
OFFLOAD, LOAD, UPLOAD = "offload", "load", "upload"


@dataclass
class RecordedLaunch(Launch):
    """A launch with its kind and the action that the rank was at."""

    kind: str = COMPUTE
    action: object = None


@dataclass(eq=False)
class Stream:
    """A stream, or the end of one's last launch as an event: positions on streams are launches."""

    log: "LaunchLog"
    name: str
    last: int | None = None

    def wait_stream(self, other):
        self.wait_event(other.last)

    def wait_event(self, launch):
        """A wait has a place of its own in the queue of the stream."""
        if launch is not None:
            self.log.launch(f"{self.name} waits at launch {len(self.log.launches)}", WAIT, self, [launch])

    def record_event(self):
        return self.last


class LaunchLog:
    """All that a rank launches, in order. Stands in for `torch.cuda`, as far as `CopyStreams` needs it."""

    def __init__(self):
        self.launches, self.action, self.memory = [], None, None
        self.streams = {COMPUTE: Stream(self, COMPUTE)}
        self._current = self.streams[COMPUTE]

    def Stream(self):
        return self.named(f"side stream {len(self.streams)}")

    def named(self, name):
        return self.streams.setdefault(name, Stream(self, name))

    def set_device(self, device):
        """Nothing is launched on a device."""

    def current_stream(self):
        return self._current

    @contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        yield
        self._current = before

    def launch(self, text, kind, stream, waits=(), event=None):
        waits = [number for number in (*waits, stream.last) if number is not None]
        self.launches.append(RecordedLaunch(text, stream.name, waits, event, kind, self.action))
        stream.last = len(self.launches) - 1
        if self.memory is not None:
            self.memory.poll()

    def behind_current(self, text, kind, name, event):
        """Launch on a stream of a communicator, as NCCL does: behind all that the current stream has so far."""
        stream = self.named(name)
        stream.wait_stream(self._current)
        self.launch(text, kind, stream, event=event)
        return Work(self, stream.last)


@dataclass
class Work:
    log: LaunchLog
    launch: int

    def wait(self):
        self.log.current_stream().wait_event(self.launch)


class RecordedCopies(CopyStreams):
    """The streams of offloads and loads, on a log that is told their direction."""

    def __init__(self, log):
        super().__init__(log)
        self.log = log

    @contextmanager
    def copying(self, out, *after):
        with super().copying(out, *after), EachCopy(self.log, OFFLOAD if out else LOAD):
            yield


class EachCopy(TorchFunctionMode):
    """Notes every copy, which is made at once: the first of an action under its name, with its time."""

    def __init__(self, log, kind):
        super().__init__()
        self.log, self.kind, self.number = log, kind, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            is_own = self.log.action is not None and self.log.action.op in (Op.O, Op.L) and not self.number
            text = str(self.log.action) if is_own else f"{self.kind} at launch {len(self.log.launches)}"
            self.log.launch(text, self.kind, self.log.current_stream())
            self.number += 1
        return function(*args, **(kwargs or {}))


class _Actions(Recorder):
    """Launches one piece of compute where an action begins to be timed."""

    def __init__(self, log):
        super().__init__(enabled=False)
        self.log = log

    @contextmanager
    def action(self, action):
        if operation(action.op).track is Track.COMPUTE:
            self.log.launch(str(action), COMPUTE, self.log.current_stream())
        yield

    def waiting(self, receive):
        return nullcontext()


class _Executor(Executor):
    log: LaunchLog

    def perform(self, action, handler):
        self.log.action = action
        super().perform(action, handler)


class Reductions(nullcontext):
    """Reductions of a rank's stages when the plan says so. Stands in for `mcore.iteration.reduction.Reduction`."""

    def __init__(self, stages):
        super().__init__()
        self.stages = stages

    def before_last_gradient(self, index):
        """Nothing is done by hooks."""

    def reduce(self, index):
        self.stages[index].start_reduction()


class RecordedStage(PlainStage):
    """Reduces gradients on a communicator, which all replicas join, when its rank's `Reductions` do, bucket by bucket.

    Megatron has buckets in the first of a rank's model chunks, which is its first stage; those of the others are one launch.
    """

    def __init__(self, part, batch, log, number, num_buckets=1, coalesces=True):
        super().__init__(part, batch)
        self.log, self.number, self.num_buckets, self.coalesces = log, number, num_buckets, coalesces
        self.reductions, self.index = None, 0

    def before_last_gradient(self):
        self.reductions.before_last_gradient(self.index)

    def reduce_gradients(self):
        self.reductions.reduce(self.index)

    def start_reduction(self):
        text = f"{self.number}{Op.REDUCE}{self.log.action.chunk}"
        for bucket in range(1 if self.coalesces and self.index else self.num_buckets):
            name = f"{text} bucket {bucket}" if bucket else text
            self.log.behind_current(name, REDUCTION, "reductions", ("reduce", self.number, bucket))


@dataclass
class _Messages:
    """The functions that start messages. The n-th of a communicator between two ranks meets the n-th on the other side."""

    log: LaunchLog
    rank: int
    replica: int
    counts: Counter = field(default_factory=Counter)

    def isend(self, tensor, peer, group):
        return self._start(SEND, (self.rank, peer), group, tensor)

    def irecv(self, buffer, peer, group):
        buffer.zero_()
        return self._start(RECEIVE, (peer, self.rank), group, buffer)

    def _start(self, kind, way, group, tensor):
        number = self.counts[way, group]
        self.counts[way, group] += 1
        name = f"{group} {way[0]} to {way[1]}"
        if self.log.memory is not None:
            self.log.memory.note(tensor, name)
        return self.log.behind_current(str(self.log.action), kind, name, ("message", way, group, number, self.replica))


def _uploaded(program, batch, log):
    """The program with the upload of its segment tables, and of the tokens and loss masks of its chunks."""
    sent = [offsets_of(layout.table) for layout in program.layouts]
    for arrays in map(batch.chunk, range(len(program.layouts))):
        sent += [arrays.tokens, arrays.loss_mask]
    with EachCopy(log, UPLOAD):
        upload = Uploader(torch.device("cpu"), log).begin(sent)
    return replace(program, upload=upload)


def record(plan, rank, replica=0, make_stage=RecordedStage, make_reductions=Reductions, memory=None):
    """Run this rank's part of a plan of plain stages; return the log of its launches.

    Args:
        make_reductions: makes the reductions of the rank's stages, by ascending number.
        memory: a `MessageMemory` that watches.
    """
    log, batch = LaunchLog(), batch_of(plan)
    log.memory = memory
    here = [number for number, where in enumerate(plan.placement) if where == rank]
    stages = {number: make_stage(build_part(plan.num_layers, number), batch, log, number) for number in here}
    reductions = make_reductions(list(stages.values()))
    for index, stage in enumerate(stages.values()):
        stage.reductions, stage.index = reductions, index
    messages = _Messages(log, rank, replica)
    groups = {"activations": "activations", "gradients": "gradients", "figures": None, "control": None}
    down = {"activations_down": "activations down", "gradients_up": "gradients up"}
    links = Links(tuple(range(plan.num_ranks)), rank, **groups, **down, directions=(), slots_on_cpu=True)
    host = HostMemory(torch.device("cpu"), 1 << 30, RecordedCopies(log))
    with (
        nullcontext() if memory is None else memory.watching(log),
        reductions,
        ActivationOffload(host, parameters_of(stages)) as saved,
        offload_handlers(plan, rank, stages, host, saved) as handlers,
        patch.object(dist, "isend", messages.isend),
        patch.object(dist, "irecv", messages.irecv),
    ):
        program = _uploaded(prepare(plan, rank), batch, log)
        own = weight_handlers(plan, stages) | handlers
        executor = _Executor(plan, rank, stages, program, links, recorder=_Actions(log), handlers=own)
        executor.log = log
        executor.run()
    return log
