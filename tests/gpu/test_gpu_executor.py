"""On a GPU a plan gives the gradients of whole sequences, wherever what it keeps is meanwhile, and the host never waits."""

import pytest
import torch

from megatron_epp.features.offload.host import HostMemory
from tests.support.gpu_stage import DEVICE, relative_difference, run
from tests.support.runtime.runtime_plans import by_hand, offloading, offloading_kv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CHUNKS = [(0, 0, 2048)], [(0, 2048, 4096)], [(0, 4096, 5000), (1, 0, 700)], [(2, 0, 1024)], [(2, 1024, 2000)]
"""Two long sequences in slices, a short one next to a tail."""
ROW = "0F0 0F1 0F2 0F3 0F4 0B4 0B3 0B2 0B1 0B0"
WHOLE = [(0, 0, 5000)], [(1, 0, 700)], [(2, 0, 2000)]

MOVES = {"in place": lambda plan: plan, "offloaded": lambda plan: offloading(plan, 0.7), "hosted": offloading_kv}


def sliced(recompute_layers=0):
    return by_hand([ROW], CHUNKS, num_layers=4, recompute_layers=recompute_layers)


@pytest.fixture(scope="module")
def expected():
    """Gradients of whole sequences in fp32."""
    return run(by_hand(["0F0 0B0 0F1 0B1 0F2 0B2"], WHOLE, num_layers=4))[0]


@pytest.mark.parametrize("recompute_layers", [0, 2])
def test_slices_in_fp32_give_the_gradients_of_whole_sequences(expected, recompute_layers):
    assert relative_difference(run(sliced(recompute_layers))[0], expected) <= 1e-4


@pytest.mark.parametrize("preference", ["auto", "flash", "unfused"])
def test_slices_in_bf16_are_as_near_to_fp32_as_whole_sequences_in_bf16(expected, preference):
    whole = run(by_hand(["0F0 0B0 0F1 0B1 0F2 0B2"], WHOLE, num_layers=4), torch.bfloat16, preference)[0]
    found = run(sliced(), torch.bfloat16, preference)[0]
    assert relative_difference(found, expected) <= 1.5 * relative_difference(whole, expected)


@pytest.mark.parametrize("recompute_layers", [0, 2])
@pytest.mark.parametrize("move", ["offloaded", "hosted"])
def test_copies_beside_compute_change_nothing(move, recompute_layers):
    plan = sliced(recompute_layers)
    stays, moved = run(plan)[0], run(MOVES[move](plan), times=3)[0]
    assert relative_difference(moved, stays) <= 1e-5  # kernels may add in another order; a race would be far off


@pytest.mark.parametrize("move", MOVES)
def test_the_host_never_waits_once_kernels_are_chosen_and_pages_are_there(move):
    run(MOVES[move](sliced(2)), torch.bfloat16, "auto", HostMemory(DEVICE, 1 << 30), times=3, strict=True)


def test_every_action_and_copy_has_times_of_the_device_in_order():
    _, recorder = run(offloading(sliced(), 0.7), times=2)
    events = recorder.events()
    assert {name for name, *_ in events} == {f"0{op}{c}" for op in "FBOL" for c in range(len(CHUNKS))}
    assert all(0 <= start <= end for _, start, end, _ in events)
    backward = {name: start for name, start, *_ in events if name.startswith("0B")}
    loaded = {name: end for name, _, end, _ in events if name.startswith("0L")}
    assert all(loaded[f"0L{c}"] <= backward[f"0B{c}"] for c in range(len(CHUNKS)))
