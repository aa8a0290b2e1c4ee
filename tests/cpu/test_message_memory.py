"""Device memory of messages does not depend on the host's lead over the device, and is what plans set aside."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_epp.plan import Op, lower
from megatron_epp.plan.message_slots import message_peaks
from megatron_epp.runtime.links.links import Links, Receive
from tests.support.runtime.launch_recorder import RecordedStage, record
from tests.support.runtime.plain_stage import HIDDEN
from tests.support.runtime.runtime_plans import looped, planned, v_shape


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


PLANS = {"one stage per rank": lambda: planned((9, 8, 7, 9, 8, 7), (1, 1, 1), chunk_tokens=9), "looped": looped, "v": v_shape}
"""Without split weight gradients, whose own bytes hold the gradients that a backward keeps for them."""
FAR_AHEAD = 10**6


class ReleasingStage(RecordedStage):
    """Drops the storage of an output that is sent, as Megatron does."""

    def release_output(self, output):
        output.data = torch.empty(1).expand(output.shape)


def taken(case, slots):
    """Peak bytes of messages of each rank by the host's lead, and those of the plan."""
    plan = PLANS[case]()
    sizes = tuple(4 * HIDDEN * plan.padded_tokens(chunk) for chunk in range(len(plan.chunks)))
    plan = replace(plan, messages=replace(plan.messages, num_bytes=sizes))
    near, far = [], []
    for rank in range(plan.num_ranks):
        memory = MessageMemory()
        record(plan, rank, make_stage=ReleasingStage, slots=slots, memory=memory)
        near.append(memory.peak_bytes(0))
        far.append(memory.peak_bytes(FAR_AHEAD))
    return near, far, message_peaks(plan, lower(plan))


@pytest.mark.parametrize("case", PLANS)
def test_messages_in_slots_take_no_more_than_is_planned_however_far_the_host_is_ahead(case):
    near, far, planned = taken(case, True)
    assert near == far
    assert all(0 < size <= most for size, most in zip(far, planned, strict=True))


def test_tensors_of_their_own_would_take_more_than_is_planned_where_the_host_is_far_ahead():
    near, far, planned = taken("one stage per rank", False)
    assert sum(far) > sum(near)
    assert any(size > most for size, most in zip(far, planned, strict=True))
