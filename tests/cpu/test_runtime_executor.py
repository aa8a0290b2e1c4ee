"""One rank's executor: what it refuses, how it fails, what it drops and when, and the times that it measures, in order."""

import gc
import shutil
import subprocess
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from megatron_epp.features.offload.activations import ActivationOffload
from megatron_epp.features.offload.copy_handlers import offload_handlers
from megatron_epp.features.offload.host import HostMemory
from megatron_epp.plan import Action, Op, Step
from megatron_epp.plan.document import digest
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.measured import Measured
from megatron_epp.plan.trace import trace
from megatron_epp.runtime.attention.segments import KVCacheError, SliceView
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.executor import RunError
from megatron_epp.runtime.lowered import executor_of
from megatron_epp.runtime.recorder import Recorder
from megatron_epp.runtime.watchdog import Watchdog
from tests.support import ROOT
from tests.support.calls import run_python
from tests.support.runtime.plain_stage import PlainStage, parameters_of, stages_of
from tests.support.runtime.runtime_plans import by_hand, offloading, offloading_kv, one_rank, one_rank_two_stages, two_ranks


class FaultyStage(PlainStage):
    """Runs a fault, which is set, in the forward of chunk 1."""

    def forward(self, context, hidden):
        if context.chunk == 1:
            self.fault()
        return super().forward(context, hidden)


def faulty(plan, fault):
    stages = stages_of(plan, kind=FaultyStage)
    stages[0].fault = fault
    return stages


def with_action(plan, op, at):
    row = plan.ranks[0]
    return replace(plan, ranks=((*row[:at], Step(Action(op, 0, 1), 0.0, 0, 0), *row[at:]),))


ELSEWHERE = r"places stages \[0\] on pipeline rank 0, which has stages"


@pytest.mark.parametrize(
    ("plan", "stages", "said"),
    [
        (one_rank(), {}, ELSEWHERE),
        (one_rank(), {1: None}, ELSEWHERE),
        (one_rank(), {0: None, 1: None}, ELSEWHERE),
        (two_ranks(), {0: None}, "over 2 ranks needs links"),
        (offloading_kv(one_rank()), stages_of(one_rank()), "add offload"),
        (offloading(one_rank(), 0.5), {0: None}, "add offload"),
        (with_action(one_rank(), Op.R, 3), {0: None}, "no handler for the plan's R actions$"),
        (with_action(one_rank(), Op.W, 6), {0: None}, "no handler for the plan's W actions; add split_weight"),
    ],
)
def test_what_the_plan_needs_and_the_rank_lacks_is_refused(plan, stages, said):
    with pytest.raises(RunError, match=said):
        executor_of(plan, 0, stages)


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("no such word"), "ValueError: no such word"), (KVCacheError("layer 0: no cache"), "layer 0: no cache")],
    ids=["any", "our own"],
)
def test_a_failing_action_is_named_with_its_rank_and_the_grid(error, said):
    plan = one_rank()
    with pytest.raises(RunError) as failure:
        executor_of(plan, 0, faulty(plan, Mock(side_effect=error))).run()
    assert str(failure.value) == f"pipeline rank 0, step 1, action 0F1 failed: {said}\n{to_grid(plan)}"
    assert failure.value.__cause__ is error


def test_a_cache_left_over_is_found_at_the_end_of_the_plan():
    plan = one_rank()
    stages = stages_of(plan)
    stages[0].kv_cache.append(0, SliceView(8, 0, 2, 4, 4), torch.zeros(2, 1, 1), torch.zeros(2, 1, 1))
    with pytest.raises(RunError, match=r"step 7, the end of the plan failed: caches of \(layer, sequence\) \[\(0, 8\)\]"):
        executor_of(plan, 0, stages).run()


def test_a_stage_that_gives_its_input_no_gradient_is_found_out():
    class Cut(PlainStage):
        def forward(self, context, hidden):
            return super().forward(context, None if hidden is None else hidden.detach())

    plan = one_rank_two_stages()
    with pytest.raises(RunError, match="action 1B1 failed: stage 1 gave its input no gradient"):
        executor_of(plan, 0, stages_of(plan, kind=Cut)).run()


def test_a_hanging_action_is_named():
    expired, messages = threading.Event(), []

    def on_expiry(message):
        messages.append(message)
        if "action 0F1 " in message:  # on a busy machine others may take longer than the limit too
            expired.set()

    plan = one_rank()
    executor_of(plan, 0, faulty(plan, lambda: expired.wait(60)), watchdog=Watchdog(0.5, on_expiry)).run()
    assert messages[-1].startswith("pipeline rank 0, step 1, action 0F1 has not finished after 0.5 s")
    assert "wait_limit_seconds), in compute or in a collective of its own" in messages[-1]
    assert messages[-1].endswith(to_grid(plan))


class CountingStage(PlainStage):
    """Notes at the start of each of its actions which chunks' inputs and outputs are still alive."""

    def __init__(self, *args):
        super().__init__(*args)
        self._tensors = []
        self.alive = {}

    def forward(self, context, hidden):
        self._note(f"F{context.chunk}")
        output = super().forward(context, hidden)
        self._tensors += [(context.chunk, weakref.ref(x)) for x in (hidden, output) if x is not None]
        return output

    def backward(self, context, output, grad):
        self._note(f"B{context.chunk}")
        self._tensors.append((context.chunk, weakref.ref(output)))
        super().backward(context, output, grad)

    def _note(self, action):
        self.alive[action] = {chunk for chunk, tensor in self._tensors if tensor() is not None}


def test_inputs_and_outputs_live_from_forward_to_backward_and_no_longer():
    plan = one_rank_two_stages()
    stages = stages_of(plan, kind=CountingStage)
    executor_of(plan, 0, stages).run()
    assert stages[1].alive == {"F0": set(), "F1": {0}, "B1": {0, 1}, "F2": {0}, "B2": {0, 2}, "B0": {0}}
    assert stages[0].alive == {"F0": set(), "F1": {0}, "B1": {0, 1}, "F2": {0}, "B0": {0, 2}, "B2": {2}}
    assert not any(tensor() is not None for stage in stages.values() for _, tensor in stage._tensors)


def test_an_executor_that_has_run_is_gone_without_the_garbage_collector():
    plan, collects = one_rank(), gc.isenabled()
    stages = stages_of(plan)
    gc.disable()
    try:
        executor = executor_of(plan, 0, stages)
        executor.run()
        ended = weakref.ref(executor)
        del executor
        assert ended() is None
    finally:
        if collects:
            gc.enable()


def test_evaluation_drops_everything_at_once_and_builds_no_graph():
    plan = by_hand(
        ["0F0 1F0 0F1 1F1 0F2 1F2"], [[(0, 0, 9)], [(0, 9, 14), (1, 0, 3)], [(2, 0, 6)]], placement=(0, 0), forward_only=True
    )
    stages = stages_of(plan, kind=CountingStage)
    with SavedTensors() as meter:
        executor_of(plan, 0, stages).run()
    assert meter.peak_bytes == 0
    for stage in stages.values():
        assert stage.alive == {"F0": set(), "F1": set(), "F2": set()}


class UntrainedStage(CountingStage):
    """Refuses to compute gradients."""

    has_gradient = False

    def forward(self, context, hidden):
        assert context.forward_only
        assert not torch.is_grad_enabled()
        return super().forward(context, hidden)

    def backward(self, context, output, grad):
        raise AssertionError("nothing here trains")


def test_stages_before_the_first_that_trains_keep_nothing_and_pass_their_backwards_on():
    plan = one_rank_two_stages()
    stages = stages_of(plan, kind=CountingStage) | {0: stages_of(plan, kind=UntrainedStage)[0]}
    with SavedTensors(parameters_of(stages)) as meter:
        executor_of(plan, 0, stages).run()
        of_both = meter.peak_bytes
    assert all(parameter.grad is None for parameter in stages[0].part.parameters())
    expected = stages_of(plan)
    executor_of(plan, 0, expected).run()
    for ours, theirs in zip(stages[1].part.parameters(), expected[1].part.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with SavedTensors(parameters_of(expected)) as meter:
        executor_of(plan, 0, stages_of(plan)).run()
    assert 0 < of_both < meter.peak_bytes


def run(recorder):
    plan = one_rank()
    executor_of(plan, 0, stages_of(plan), recorder=recorder).run()
    return plan


def test_events_are_the_plans_actions_in_order_and_do_not_overlap():
    """An iteration starts its own clock and forgets the one before."""
    recorder, ends = Recorder(), []
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
    stages, host = stages_of(plan), HostMemory(torch.device("cpu"), 1 << 30)
    with ActivationOffload(host) as saved, offload_handlers(plan, 0, stages, host, saved) as handlers:
        executor_of(plan, 0, stages, recorder=recorder, handlers=handlers).run()
    events = recorder.events()
    at = {name: start for name, start, _, _ in events}
    for chunk in range(len(plan.chunks)):
        assert at[f"0F{chunk}"] < at[f"0O{chunk}"] < at[f"0L{chunk}"] < at[f"0B{chunk}"]
    drawn = trace(plan, Measured.of(digest(plan), [events]))["traceEvents"]
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
    ran = run_python(RUN, NVTX_INJECTION64_PATH=str(tool))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["push 0F1", "inside", "pop", "push 0RECV_B1", "pop", "failed"]
