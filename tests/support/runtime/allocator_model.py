"""Model of torch's caching allocator: what messages take of a device while the host is ahead of it.

A block that only compute uses can be given out again once it is dropped, to work that is launched later on the same stream. One
that a communicator has used, which calls `record_stream`, can be when the device has passed all that was launched on the
communicator's stream before the drop.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from torch.multiprocessing.reductions import StorageWeakRef

from megatron_epp.plan import Op
from megatron_epp.runtime.links.links import Links, Receive


@dataclass
class _Block:
    storage: StorageWeakRef
    num_bytes: int
    born: int
    streams: set = field(default_factory=set, compare=False)
    held_from: int | None = None
    dropped: int | None = None
    passed: int = 0

    def is_counted(self, at, lead):
        """True if it is in use at a launch, and not as the input that a forward keeps, whose own bytes hold it."""
        if self.dropped is None or at < self.dropped:
            return self.born <= at and (self.held_from is None or at < self.held_from)
        return bool(self.streams) and at < self.passed + lead


class MessageMemory:
    """Blocks of the tensors that a rank sends and receives, in the order of its launches."""

    def __init__(self):
        self.log = None
        self._blocks, self._held = [], []

    def note(self, tensor, stream=None):
        """Note a message, and the stream of the communicator that uses it; return its block."""
        self.poll()
        storage = tensor.untyped_storage()
        block = next((one for one in self._held if one.storage.cdata == storage._weak_ref()), None)
        if block is None:
            block = _Block(StorageWeakRef(storage), storage.nbytes(), len(self.log.launches))
            self._blocks.append(block)
            self._held.append(block)
        if stream is not None:
            block.streams.add(stream)
        return block

    def poll(self):
        """Find the blocks that the host has dropped since the last call."""
        for block in [block for block in self._held if block.storage.expired()]:
            self._held.remove(block)
            block.dropped = len(self.log.launches)
            block.passed = max((self.log.streams[stream].last for stream in block.streams), default=0)

    def peak_bytes(self, lead):
        """Most bytes in use at one launch, where the host is ahead of the device by so many launches."""
        launches = range(len(self.log.launches) + 1)
        return max(sum(block.num_bytes for block in self._blocks if block.is_counted(at, lead)) for at in launches)

    @contextmanager
    def watching(self, log):
        """Note what links send, receive, and copy out of slots."""
        self.log = log
        send, wait = Links.send, Receive.wait

        def noted_send(links, tensor, peer, gradient):
            self.note(tensor)
            send(links, tensor, peer, gradient)

        def noted_wait(receive):
            message = wait(receive)
            block = self.note(message)
            if self.log.action.op is Op.F:
                block.held_from = len(self.log.launches)
            return message

        with ExitStack() as stack:
            stack.enter_context(patch.object(Links, "send", noted_send))
            stack.enter_context(patch.object(Receive, "wait", noted_wait))
            yield
