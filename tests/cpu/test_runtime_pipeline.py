"""A pipeline of 1, 2 or 4 ranks run by plan gives the loss and gradients of whole sequences run in one process."""

import functools

import pytest
import torch

from megatron_epp.plan import Op
from tests.support.runtime import runtime_plans as plans
from tests.support.runtime.dense_attention import relative_difference
from tests.support.runtime.plain_stage import run_plan, whole_run
from tests.support.runtime.rank_processes import Ranks
from tests.support.runtime.runtime_plans import planned
from tests.support.seeds import some_by_default

LAYERS = 2  # of each stage
BATCHES = {
    "sliced": ((57,), {"slices": 4}),
    "packed": ((9, 4, 7, 1, 5, 3), {"chunk_tokens": 12}),
    "hybrid": ((41, 22, 3, 1, 6), {"slices": 3}),
    "padded": ((41, 22, 3, 1, 5), {"slices": 3, "token_multiple": 4}),
    "split weight gradients": ((41, 22, 3, 1, 6), {"slices": 3, "split_weight": True}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Gives the ranks of a job by their number; all live as long as this file runs."""
    jobs = {}

    def of(size):
        if size not in jobs:
            jobs[size] = Ranks(size, tmp_path_factory.mktemp(f"ranks{size}"))
        return jobs[size]

    yield of
    for job in jobs.values():
        job.__exit__()


@functools.cache
def expected(plan, dtype):
    return whole_run(plan, plan.num_layers, dtype)


def run(ranks, plan, dtype=torch.float32, **options):
    if plan.num_ranks == 1:
        found = run_plan(0, None, plan, dtype, **options)
    else:
        found = {s: r for part in ranks(plan.num_ranks).run(run_plan, plan, dtype, *options.values()) for s, r in part.items()}
    return [found[s] for s in range(plan.num_stages)]


def assert_equals_whole_sequences(results, plan, tolerance, dtype=torch.float32):
    loss, gradients = expected(plan, dtype)
    assert abs(results[-1].loss - loss) / loss < tolerance
    for result, wanted in zip(results, gradients, strict=True):
        assert result.gradients.keys() == wanted.keys()
        for name, grad in result.gradients.items():
            assert relative_difference(torch.from_numpy(grad), wanted[name]) < tolerance, name


@some_by_default("recompute", [1, 0, LAYERS], 1)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_planned_batches(ranks, size, batch, recompute):
    lengths, options = BATCHES[batch]
    plan = planned(lengths, (LAYERS,) * size, recompute=recompute, **options)
    results = run(ranks, plan)
    assert_equals_whole_sequences(results, plan, 1e-5)
    assert [result.live_bytes for result in results] == [0] * size


def test_the_batches_are_what_they_are_called():
    kinds = {}
    for name, (lengths, options) in BATCHES.items():
        plan = planned(lengths, (LAYERS,) * 2, recompute=0, **options)
        kinds[name] = {chunk.kind(plan.lengths) for chunk in plan.chunks}
        assert any(plan.padded_tokens(c) > chunk.num_tokens for c, chunk in enumerate(plan.chunks)) == (name == "padded")
        has_weights = any(action.op is Op.W for rank in (0, 1) for action in plan.actions(rank))
        assert has_weights == (name == "split weight gradients")
    assert (kinds["sliced"], kinds["packed"]) == ({"split"}, {"batched"})
    assert all({"split", "hybrid"} <= kinds[name] for name in BATCHES.keys() - {"sliced", "packed"})


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize(
    ("make", "last"),
    [
        (plans.one_rank_split, "W0"), (plans.one_rank_two_stages, "B0 B2"), (plans.two_ranks, "B2"), (plans.looped, "B2"),
        (plans.two_ranks_split, "W2 W0"), (plans.v_shape, "B2"), (plans.v_shape_split, "W0 W2"),
    ],
)  # fmt: skip
def test_hand_made_plans_reduce_once_per_stage_around_the_last_action_that_gives_gradients(ranks, make, last, recompute):
    plan = make(recompute_layers=recompute)
    results = run(ranks, plan)
    assert_equals_whole_sequences(results, plan, 1e-5)
    assert [result.live_bytes for result in results] == [0] * plan.num_stages
    for result in results:
        *_, before, action, after = result.calls
        assert (before, after, result.calls.count("last"), result.calls.count("reduce")) == ("last", "reduce", 1, 1)
        assert action in last.split()


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_float64_nothing_but_rounding_is_left(ranks, reentrant):
    lengths, options = BATCHES["padded"]
    plan = planned(lengths, (LAYERS,) * 2, recompute=1, **options)
    assert_equals_whole_sequences(run(ranks, plan, torch.float64, reentrant=reentrant), plan, 1e-12, torch.float64)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_evaluation_gives_the_loss_and_leaves_nothing_behind(ranks, size):
    plan = planned((41, 30, 3, 1, 6), (LAYERS,) * size, forward_only=True, slices=3)
    results = run(ranks, plan)
    loss, _ = expected(plan, torch.float32)
    assert abs(results[-1].loss - loss) / loss < 1e-5
    for result in results:
        assert (result.live_bytes, set(result.gradients.values())) == (0, {None})
