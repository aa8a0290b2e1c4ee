"""Copies between device and host: activations that leave and come back, and the upload of a batch in one buffer."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_epp.features.offload.activations import ActivationOffload, OwnedStorage, choose
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.plan import EppError
from megatron_epp.runtime.upload import Uploader
from tests.support.runtime.late_host import LATE_HOSTS
from tests.support.runtime.launch_recorder import COMPUTE, UPLOAD, WAIT, EachCopy, LaunchLog
from tests.support.runtime.plain_stage import run_plan
from tests.support.runtime.runtime_plans import offloading, one_rank, one_rank_split, one_rank_two_stages
from tests.support.seeds import spread_by_default

KIB = 1024
CPU = torch.device("cpu")
OWNER = 0, 0


class Forward:
    """A chunk's forward that keeps two tensors of one size.

    Attributes:
        kept: their bytes.
    """

    def __init__(self):
        self.x = torch.ones(8 * KIB, requires_grad=True)
        self.host = HostMemory(CPU, 1 << 20)
        self.offload = ActivationOffload(self.host, [self.x])
        with self.offload, self.offload.of(OWNER):
            self.y = (self.x.exp() * 1.0).exp().sum()
        self.kept = self.offload.live_bytes

    @property
    def held_bytes(self):
        """On the device and in host memory."""
        return self.offload.live_bytes, self.host.held_bytes

    def run_backward(self):
        """And see that the gradient is right."""
        self.offload.before_backward(OWNER)
        self.y.backward()
        assert torch.equal(self.x.grad, self.x.exp() * self.x.exp().exp())


def storages(*sizes):
    return [OwnedStorage(torch.empty(size, dtype=torch.uint8).untyped_storage(), OWNER) for size in sizes]


MAKE = (one_rank, one_rank_split, one_rank_two_stages)


@spread_by_default(3, make=MAKE, recompute_layers=(0, 1), share=(0.3, 0.7, 1.0), when=("at once", *LATE_HOSTS))
def test_gradients_are_those_without_offload_whenever_copies_happen(make, recompute_layers, share, when):
    plan = make(recompute_layers=recompute_layers)
    host = LATE_HOSTS[when]() if when in LATE_HOSTS else None
    expected, found = run_plan(0, None, plan), run_plan(0, None, offloading(plan, share), host=host)
    for stage, wanted in expected.items():
        assert found[stage].loss == wanted.loss
        for name, gradient in wanted.gradients.items():
            np.testing.assert_array_equal(found[stage].gradients[name], gradient)
        assert found[stage].live_bytes == 0
    assert found[0].host_peak_bytes > 0


def test_what_others_hold_or_several_chunks_share_stays():
    x, shared = torch.ones(KIB, requires_grad=True), torch.ones(KIB)
    with ActivationOffload(host := HostMemory(CPU, 1 << 20), [x]) as offload:
        with offload.of(OWNER):
            ours = x.exp()  # autograd keeps it and so do we
            first = (ours.sin() * shared).exp().sum()  # keeps `ours`, `shared` and what exp makes
        with offload.of((0, 1)):
            second = x * shared
        kept = offload.live_bytes
        offload.offload(OWNER, 1.0)
        assert (kept, host.held_bytes) == (3 * x.nbytes, x.nbytes)
        del first, second


@pytest.mark.parametrize(
    ("share", "planned_share", "moved_share"),
    [(0.5, None, 0.5), (0.75, None, 0.75), (0.5, 0.75, 0.75)],
    ids=["whole storages", "a storage in part", "the bytes of the plan"],
)
def test_the_device_holds_less_between_free_and_back_and_the_host_holds_it_from_out_to_back(share, planned_share, moved_share):
    forward = Forward()
    kept, offload, moved = forward.kept, forward.offload, int(moved_share * forward.kept)
    offload.offload(OWNER, share, *[] if planned_share is None else [int(planned_share * kept)])
    assert forward.held_bytes == (kept, moved)
    offload.free(OWNER)
    assert forward.held_bytes == (kept - moved, moved)
    with pytest.raises(EppError, match="never loaded"):
        offload.assert_empty()
    offload.load(OWNER)
    assert forward.held_bytes == (kept, 0)
    forward.run_backward()
    assert forward.held_bytes == (0, 0)
    assert offload.peak_bytes == kept
    offload.assert_empty()


def test_as_much_leaves_as_was_asked_for_and_the_last_storage_in_part_where_the_others_make_room_for_what_stays():
    made, everything = storages(40, 100, 40, 7, 0), [100, 40, 40, 7]
    expected = {0: [], 7: [7], 50: [40, 7, 3], 100: [100], 101: [100, 1], 139: [100, 7, 32], 187: everything, 500: everything}
    expected[3] = [7]  # there is no room for the four bytes that would stay
    assert {share: [part.num_bytes for part in choose(made, share)] for share in expected} == expected
    assert [part.storage for part in choose(made, 40)] == [made[0]]


def test_a_storage_that_cannot_leave_in_part_spares_smaller_ones():
    made = storages(90, 20, 90, 8)
    assert [part.num_bytes for part in choose(made, 89)] == [90]  # and not 20 and 8 besides
    assert [part.num_bytes for part in choose(made, 25)] == [20, 5]
    assert [part.num_bytes for part in choose(storages(90, 90, 20), 60)] == [90]


def test_what_is_dropped_while_a_part_of_it_is_away_is_forgotten():
    forward = Forward()
    forward.offload.offload(OWNER, 0.75)
    forward.offload.free(OWNER)
    del forward.y
    assert forward.offload.live_bytes == 0


TENSORS = [
    torch.arange(5),
    torch.rand(1, 3),
    torch.arange(8, dtype=torch.int32).view(2, 4),
    torch.empty(0, dtype=torch.int64),
    torch.ones(4, dtype=torch.bool),
    torch.arange(12).view(3, 4).t(),
    torch.arange(6)[::2],
    torch.arange(4)[1::4],  # one element, as of a chunk of which every rank of a context-parallel group has one token
]


def test_tensors_of_all_types_and_shapes_are_copied_in_one_buffer_at_multiples_of_16_bytes():
    upload = Uploader(CPU).begin(TENSORS)
    assert [(x.dtype, x.shape) for x in upload.tensors] == [(x.dtype, x.shape) for x in TENSORS]
    assert all(map(torch.equal, upload.tensors, TENSORS))
    assert {x.untyped_storage().data_ptr() for x in upload.tensors} == {upload.buffer.untyped_storage().data_ptr()}
    upload.tensors[0].add_(1)
    assert TENSORS[0].tolist() == [0, 1, 2, 3, 4]
    assert [(x.data_ptr() - upload.buffer.data_ptr()) % 16 for x in upload.tensors] == [0] * len(TENSORS)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_any_number_of_tensors_is_one_copy_on_a_stream_that_waits_for_nothing(count):
    log = LaunchLog()
    uploader = Uploader(CPU, log)
    with EachCopy(log, UPLOAD):
        upload = uploader.begin([torch.arange(3)] * count)
    (copy,) = log.launches
    assert (copy.kind, copy.waits) == (UPLOAD, [])
    assert copy.stream != COMPUTE
    upload.wait()
    assert [(one.kind, one.stream, one.waits) for one in log.launches[1:]] == [(WAIT, COMPUTE, [0])]


def test_threads_may_upload_at_the_same_time():
    uploader = Uploader(CPU)
    with ThreadPoolExecutor(4) as threads:
        uploads = list(threads.map(lambda number: uploader.begin([torch.full((1000,), number)]), range(50)))
    assert [set(upload.tensors[0].tolist()) for upload in uploads] == [{number} for number in range(50)]
