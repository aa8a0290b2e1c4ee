"""Measured times: ordered, inside the iteration, one per compute action."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.plan import Action, Op
from megatron_epp.plan.document import digest
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.trace import trace
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.recorder import Recorder
from tests.support import ROOT
from tests.support.runtime.plain_stage import PlainStage, batch_of, build_part
from tests.support.runtime.runtime_plans import offloading, one_rank


def run(recorder):
    plan = one_rank()
    executor_of(plan, 0, {0: PlainStage(build_part(plan.num_layers, 0), batch_of(plan))}, recorder=recorder).run()
    return plan


def test_events_are_the_plans_actions_in_order_and_do_not_overlap():
    """An iteration starts its own clock and forgets the one before."""
    recorder = Recorder()
    ends = []
    for _ in range(2):
        plan = run(recorder)
        events = recorder.events()
        assert [name for name, *_ in events] == [str(action) for action in plan.actions(0)]
        times = [time for _, start, end, _ in events for time in (start, end)]
        assert times == sorted(times)
        assert times[0] >= 0.0
        assert all(start < end and cpu > 0.0 for _, start, end, cpu in events)
        ends.append(times[-1])
    assert times[0] < sum(ends)  # counted from its own start, not from the first's
    run(off := Recorder(enabled=False))
    assert off.events() == ()


def test_copies_are_recorded_between_their_forward_and_their_backward_and_drawn_on_a_track_of_their_own():
    plan, recorder = offloading(one_rank(), 1.0), Recorder()
    stages = {0: PlainStage(build_part(plan.num_layers, 0), batch_of(plan))}
    host = HostMemory(torch.device("cpu"), 1 << 30)
    with ActivationOffload(host) as saved, offload_handlers(plan, 0, stages, host, saved) as handlers:
        executor_of(plan, 0, stages, recorder=recorder, handlers=handlers).run()
    events = recorder.events()
    at = {name: start for name, start, _, _ in events}
    for chunk in range(len(plan.chunks)):
        assert at[f"0F{chunk}"] < at[f"0O{chunk}"] < at[f"0L{chunk}"] < at[f"0B{chunk}"]
    measured = Measured.of(digest(plan), [events])
    drawn = trace(plan, measured)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in drawn if event["name"] == "thread_name"}
    tracks = {(names[event["tid"]], event["name"]) for event in drawn if event["ph"] == "X"}
    assert {("planned copy", "0O0"), ("measured copy", "0O0"), ("measured compute", "0F0")} <= tracks


def test_waits_are_recorded_under_their_receives_and_add_up_and_an_action_that_fails_leaves_no_event():
    recorder = Recorder()
    recorder.begin()
    waits = [0.0]
    for chunk, work in enumerate((10**6, 0)):
        with recorder.waiting(Action(Op.RECV_F, 0, chunk)):
            sum(range(work))
        waits.append(recorder.wait_us)
        with pytest.raises(ValueError, match="boom"), recorder.action(Action(Op.F, 0, chunk)):
            raise ValueError("boom")
    assert waits[0] < waits[1] < waits[2]
    assert [name for name, *_ in recorder.events()] == ["0RECV_F0", "0RECV_F1"]


TOOL = ROOT / "tests" / "support" / "runtime" / "nvtx_tool.c"
RUN = """
import torch
torch.cuda.is_initialized = lambda: True  # ranges are for programs that use a GPU
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.plan import Action, Op
recorder = Recorder(enabled=False)
with recorder.action(Action(Op.F, 0, 1)):
    print("inside", flush=True)
try:
    with recorder.waiting(Action(Op.RECV_B, 0, 1)):
        raise ValueError
except ValueError:
    print("failed", flush=True)
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    headers = next(iter(Path(torch.__file__).parent.parent.glob("nvidia/*/include/nvtx3")), None)
    if headers is None:
        pytest.skip("NVTX's headers are not here: they come with torch built for CUDA")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler: install cc")
    library = tmp_path_factory.mktemp("nvtx") / "tool.so"
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{headers.parent}", "-o", library, TOOL], check=True)
    return library


def test_actions_and_waits_are_ranges_that_end_even_when_they_fail(tool):
    ran = subprocess.run(
        [sys.executable, "-c", RUN], env=os.environ | {"NVTX_INJECTION64_PATH": str(tool)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["push 0F1", "inside", "pop", "push 0RECV_B1", "pop", "failed"]
