"""Device memory of messages does not depend on the host's lead over the device, and is what plans set aside."""

from dataclasses import replace

import pytest
import torch

from megatron_epp.plan import lower
from megatron_epp.plan.message_slots import message_peaks
from tests.support.runtime.allocator_model import MessageMemory
from tests.support.runtime.launch_recorder import RecordedStage, record
from tests.support.runtime.plain_stage import HIDDEN
from tests.support.runtime.runtime_plans import looped, planned, v_shape

PLANS = {
    "one stage per rank": lambda: planned((9, 8, 7, 9, 8, 7), (1, 1, 1), chunk_tokens=9),
    "looped": looped,
    "v": v_shape,
}
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
