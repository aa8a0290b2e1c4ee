"""A host whose copies happen as late as their streams may make them: when somebody waits for them."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from megatron_epp.features.offload.copy_streams import CopyStreams
from megatron_epp.features.offload.host import HostMemory


class _Recording(TorchFunctionMode):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        self.queue.append(args)
        return args[0]


class LateStreams(CopyStreams):
    """Streams of copies in queues: what reads memory too early, or writes it while a copy still needs it, is wrong.

    Args:
        eager: direction whose copies happen at once, with what they wait for; None for neither.
    """

    def __init__(self, eager=None):
        super().__init__()
        self.eager = eager
        self.queues, self.num_done = {True: [], False: []}, {True: 0, False: 0}

    @contextmanager
    def copying(self, out, *after):
        self.order(out, *after)
        with _Recording(self.queues[out]):
            yield
        if out is self.eager:
            self.wait(self.mark(out))

    def order(self, out, *after):
        self.queues[out].extend(mark for mark in after if mark is not None)

    def mark(self, out):
        return (out, self.num_done[out] + len(self.queues[out]))

    def wait(self, *marks):
        for out, position in filter(None, marks):
            while self.num_done[out] < position:
                self.num_done[out] += 1
                first = self.queues[out].pop(0)
                if isinstance(first[0], torch.Tensor):
                    first[0].copy_(first[1])
                else:
                    self.wait(first)


def late_host(eager=None):
    return HostMemory(torch.device("cpu"), 1 << 30, LateStreams(eager))


LATE_HOSTS = {"late loads": lambda: late_host(eager=True), "late offloads": lambda: late_host(eager=False)}
