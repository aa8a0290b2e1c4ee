"""Memory that runs out in an action ends the run with numbers and flags, or costs the iteration a second try."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_epp.plan import Action, Op, PlanError, simulate
from megatron_epp.runtime.drain import blank
from megatron_epp.runtime.offload.host import HostMemoryError
from megatron_epp.runtime.out_of_memory import LEAST_SHARE, ShortagePolicy, Usage
from tests.support.runtime.out_of_memory_runs import run_short, try_twice
from tests.support.runtime.rank_processes import Ranks, run_until_exit
from tests.support.runtime.runtime_plans import (
    hosting,
    looped,
    offloading,
    one_rank,
    one_rank_split,
    one_rank_two_stages,
    planned,
    two_ranks,
    two_ranks_split,
    v_shape,
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as job:
        yield job


@functools.cache
def hybrid(**options):
    return planned((41, 22, 3, 1, 6), (2, 2), slices=3, **options)


@pytest.mark.parametrize(
    ("make", "faulty_rank", "action"),
    [
        (two_ranks, 0, "F0"),  # the very first action
        (two_ranks, 0, "F1"),
        (two_ranks, 0, "B2"),  # the very last
        (two_ranks, 1, "F1"),
        (two_ranks, 1, "B1"),  # in the middle of a chain of slices
        (two_ranks, 1, "B0"),
        (two_ranks_split, 1, "W1"),
        (v_shape, 0, "F2"),
        (looped, 1, "B1"),
        (hybrid, 0, "F2"),
        (hybrid, 1, "B0"),
    ],
)
def test_peers_end_the_plan_and_a_second_try_is_as_if_nothing_had_happened(ranks, make, faulty_rank, action):
    plan = make()
    undisturbed, tried = (ranks.run(try_twice, plan, rank, action) for rank in (None, faulty_rank))
    assert [rank.shortage is not None for rank in tried] == [rank == faulty_rank for rank in (0, 1)]
    assert "out of memory on stage" in tried[faulty_rank].shortage
    for rank, (found, wanted) in enumerate(zip(tried, undisturbed, strict=True)):
        assert found.held == 0
        if rank != faulty_rank:
            assert found.computed == wanted.computed
        assert found.loss == wanted.loss
        assert found.gradients.keys() == wanted.gradients.keys()
        for name, gradient in found.gradients.items():
            np.testing.assert_array_equal(gradient, wanted.gradients[name], err_msg=name)


def test_a_rank_computes_nothing_after_it_ran_out(ranks):
    plan = two_ranks()
    for faulty_rank, action in ((0, "F1"), (1, "B1")):
        computed = ranks.run(try_twice, plan, faulty_rank, action)[faulty_rank].computed
        assert computed == [str(a)[1:] for a in plan.actions(faulty_rank)].index(action) + 1


def test_evaluation_survives_too(ranks):
    plan = planned((41, 30, 3, 1, 6), (2, 2), forward_only=True, slices=3)
    undisturbed, tried = (ranks.run(try_twice, plan, rank, "F1") for rank in (None, 0))
    assert tried[0].shortage is not None
    assert tried[1].loss == undisturbed[1].loss


def test_without_survival_the_run_ends_with_stage_chunk_bytes_and_two_flags(tmp_path):
    plan = two_ranks()
    ended = run_until_exit(2, tmp_path, run_short, plan, 1, "F1")
    assert [rank.exit_code for rank in ended] == [1, 1]
    assert "ShortageRunError: pipeline rank 1, step " in ended[1].stderr
    assert "action 1F1 failed: out of memory on stage 1, chunk 1: 8 tokens, 2 layers, recompute: none\n" in ended[1].stderr
    assert "in use: 3 GiB, 8 GiB reserved, and 2 GiB more wanted\n" in ended[1].stderr
    assert "most likely to help: PYTORCH_ALLOC_CONF=expandable_segments:True or --epp-" in ended[1].stderr
    assert "The above exception" not in ended[1].stderr


@pytest.mark.parametrize("make", [one_rank, one_rank_split, one_rank_two_stages])
@pytest.mark.parametrize(("share", "hosted"), [(0.0, False), (0.5, False), (1.0, False), (0.0, True), (0.5, True)])
def test_wherever_one_rank_runs_out_nothing_is_left_of_the_try(make, share, hosted):
    plan = offloading(make(), share) if share else make()
    if hosted:
        plan = hosting(plan)
    wanted = try_twice(0, None, plan, None, None)
    for action in [str(action)[1:] for action in plan.actions(0) if action.stage == 0]:
        tries = try_twice(0, None, plan, 0, action)
        assert tries.shortage is not None
        assert (tries.held, tries.loss) == (0, wanted.loss)
        for name, gradient in tries.gradients.items():
            np.testing.assert_array_equal(gradient, wanted.gradients[name], err_msg=name)


# What is said of a shortage, and how far the cap goes down.


def examined(error=None, usage=None, cap_bytes=None, **policy):
    plan = hybrid()
    if cap_bytes is not None:
        plan = replace(plan, cap_bytes=(cap_bytes,) * plan.num_ranks)
    action = next(a for a in plan.actions(1) if a.op is Op.B)
    error = error or torch.OutOfMemoryError("no")
    return plan, action, ShortagePolicy(usage=lambda _: usage, **policy).examine(plan, 1, action, error)


def test_the_cap_goes_down_by_what_is_in_use_beyond_the_plan():
    plan, action, _ = examined()
    planned_bytes, peak = simulate(plan).planned_bytes(1, action), simulate(plan).peak_bytes[1]
    excess = (peak - plan.static_bytes[1]) // 3
    _, _, shortage = examined(usage=Usage(planned_bytes + excess), cap_bytes=peak + 10)
    assert shortage.cap_bytes == peak + 10 - excess


@pytest.mark.parametrize("usage", [None, Usage(0)])
def test_the_cap_goes_below_the_plans_peak_even_where_no_excess_was_seen(usage):
    plan, _, shortage = examined(usage=usage)
    peak, static = simulate(plan).peak_bytes[1], plan.static_bytes[1]
    assert plan.cap_bytes[1] > 2 * peak
    assert 0.9 * LEAST_SHARE <= (peak - shortage.cap_bytes) / (peak - static) <= 1.1 * LEAST_SHARE


def test_what_could_not_be_had_counts_as_in_use():
    plan, action, _ = examined()
    usage = Usage(simulate(plan).planned_bytes(1, action))
    peak = simulate(plan).peak_bytes[1]
    caps = [
        examined(torch.OutOfMemoryError(f"Tried to allocate {size}."), usage, cap_bytes=peak)[2].cap_bytes
        for size in ("20.00 KiB", "30.00 KiB", "30720 bytes")
    ]
    assert caps == [peak - 20 * 1024, peak - 30 * 1024, peak - 30 * 1024]


def advice(*args, **kwargs):
    text = examined(*args, **kwargs)[2].text
    return text[text.index("most likely to help: ") + len("most likely to help: ") :].split(" or ")


def test_the_flags_named_follow_the_signs(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    full, gaps = Usage(1, 1), Usage(1, 10)
    assert [flag.split()[0] for flag in advice(torch.OutOfMemoryError("no"), full)] == [
        "--epp-memory-cap-gb",
        "--epp-chunk-tokens",
    ]
    assert advice(torch.OutOfMemoryError("no"), gaps)[0] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert advice(torch.OutOfMemoryError("no"), full, recompute_is_fixed=True)[0] == "--epp-recompute auto"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert advice(torch.OutOfMemoryError("no"), gaps)[0].startswith("--epp-memory-cap-gb")


def test_other_pools_bring_their_own_words_and_flags_and_end_the_run():
    """A lower cap on the device would only move more to the host."""
    error = HostMemoryError("the host gives no more than 3 GB", ("--some-flag 3",))
    _, _, shortage = examined(error)
    assert "\nthe host gives no more than 3 GB\n" in shortage.text
    assert shortage.cap_bytes is None
    assert advice(error)[0] == "--some-flag 3"


def test_planned_bytes_are_those_of_the_plans_own_account():
    plan = hybrid()
    timeline = simulate(plan)
    for rank in range(plan.num_ranks):
        live = [timeline.planned_bytes(rank, action) for action in plan.actions(rank)]
        assert max(live) == timeline.peak_bytes[rank]
        assert live[0] == plan.static_bytes[rank] + plan.ranks[rank][0].alloc_bytes
    with pytest.raises(PlanError, match="rank 0 has no action 1F0"):
        timeline.planned_bytes(0, Action(Op.F, 1, 0))


def test_what_stands_in_for_a_message_takes_no_memory():
    stand_in = blank((1000, 1000), torch.float32, torch.device("cpu"))
    assert stand_in.shape == (1000, 1000)
    assert stand_in.untyped_storage().nbytes() == 4
    assert not stand_in.any()
