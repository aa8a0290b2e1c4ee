"""Hundreds of iterations leave nothing behind: no cache, no tensor, no memory."""

import gc
import random

import psutil
import pytest
import torch

from megatron_epp.plan import Op
from megatron_epp.runtime.autograd.saved import SavedTensors
from megatron_epp.runtime.lowered import executor_of
from tests.support.runtime.plain_stage import CHANNELS, KV_HEADS, LONGEST, PlainStage, batch_of, build_part
from tests.support.runtime.runtime_plans import planned

STAGES = 2
"""On one rank, so that hidden states and gradients are handed on too."""


def plans():
    """Return plans that differ in number and lengths of sequences, slices, recompute, and split weight gradients."""
    draw = random.Random(0)
    found = []
    for number in range(40):
        lengths = [draw.randrange(LONGEST // 2, LONGEST), *(draw.randrange(1, 30) for _ in range(number % 3))]
        options = {"slices": 2 + (number % 4 == 0), "recompute": number % 2, "split_weight": number % 5 == 0}
        found.append(planned(lengths, (1,) * STAGES, placement=(0,) * STAGES, **options))
    return found


def live_tensors():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("iterations", "warm_up"),
    [(400, 200), pytest.param(2000, 600, marks=pytest.mark.slow)],  # whatever grows with every iteration shows in 200 of them
)
def test_hundreds_of_iterations_leave_nothing_behind(one_thread, iterations, warm_up):
    batches = [(plan, batch_of(plan)) for plan in plans()]
    assert len({plan.lengths for plan, _ in batches}) > 30
    assert any(action.op is Op.W for plan, _ in batches for action in plan.actions(0))
    stages = {s: PlainStage(build_part((1,) * STAGES, s), batches[0][1]) for s in range(STAGES)}
    parameters = [p for stage in stages.values() for p in stage.part.parameters()]
    process, draw = psutil.Process(), random.Random(1)
    tensors = resident = 0
    for iteration in range(iterations + 1):
        if iteration == warm_up:
            tensors, resident = live_tensors(), process.memory_info().rss
        plan, batch = draw.choice(batches)
        for stage in stages.values():
            stage.batch = batch
            stage.part.zero_grad()
            stage.calls.clear()
        with SavedTensors(parameters) as saved:
            executor_of(plan, 0, stages).run()
        assert saved.live_bytes == 0
        assert [stage.kv_cache.num_bytes for stage in stages.values()] == [0] * STAGES
    grown = process.memory_info().rss - resident
    assert live_tensors() <= tensors  # fewer where what earlier tests of this process left behind has gone meanwhile
    one_cache = 2 * (LONGEST // 2) * KV_HEADS * CHANNELS * 4
    print(f"\n{iterations - warm_up} iterations: {grown / 1024:.0f} KiB more, a cache has {one_cache / 1024:.0f} or more")
    assert grown < (iterations - warm_up) * one_cache / 4
