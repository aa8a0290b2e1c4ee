"""A host whose copies happen as late as a stream may make them: when somebody waits for them."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

from megatron_epp.runtime.offload.host import HostMemory


class _Recording(TorchFunctionMode):
    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.copy_:
            return function(*args, **(kwargs or {}))
        self.queue.append(args)
        return args[0]


class LateHost(HostMemory):
    """Host memory with copies in a queue: what reads memory too early, or writes it while a copy still needs it, is wrong."""

    def __init__(self, cap_bytes=1 << 30):
        super().__init__(torch.device("cpu"), cap_bytes)
        self.queue, self.num_done = [], 0

    @contextmanager
    def copying(self):
        with _Recording(self.queue):
            yield

    def mark(self):
        return self.num_done + len(self.queue)

    def wait(self, mark):
        while mark is not None and self.num_done < mark:
            into, source = self.queue.pop(0)[:2]
            into.copy_(source)
            self.num_done += 1
