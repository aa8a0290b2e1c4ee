"""Uploads: tensors of all types in one buffer, by one copy on a stream of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_epp.runtime.upload import Uploader
from tests.support.runtime.launch_recorder import COMPUTE, UPLOAD, WAIT, EachCopy, LaunchLog

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(5),
    torch.rand(1, 3),
    torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32),
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
