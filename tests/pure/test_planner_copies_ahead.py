"""Copies of all that links have time for, whether or not a cap requires them, and recompute for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.contrib.papers.spacing import SPLIT_UNITS, Spacing, whole_backwards
from megatron_epp.cost import H100, PipelineCosts, analytic_profile, on_device
from megatron_epp.cost.library import load_flags, shape_of
from megatron_epp.plan.check import check
from megatron_epp.plan.kv_offload import host_peaks
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.simulate import simulate
from megatron_epp.planner import Options, Problem, plan, tabulate
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.fit import held_bytes, peaks_of
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.ahead import fit_ahead, longest_lived_shares
from megatron_epp.planner.memory.offload import Copied, peaks_with_copies, timed
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.tables import Tables
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.seeds import some_by_default

RANKS = 4
PLACEMENT = Placement("looped", RANKS, 2)
OFFLOAD = Options(offload=True)


def costs_of() -> PipelineCosts:
    shape = shape_of(load_flags("llama3-8b") | {"num_layers": 16})
    return on_device(analytic_profile(shape, H100).costs([2] * 8, state_bytes_per_parameter=7.5))


def batch(count: int, cap_bytes: int = 1) -> Problem:
    return Problem((8192,) * count, PLACEMENT.rank_of, (cap_bytes,) * RANKS)


def even(count: int, weights: bool) -> tuple[Problem, Tables, tuple, list[int]]:
    """An even order of whole sequences, and what each rank holds without copies."""
    asked, costs = batch(count), costs_of()
    chunks = plan(replace(asked, cap_bytes=(1 << 50,) * RANKS), costs, Options(slices=1)).chunks
    tables = tabulate(chunks, asked, costs, OFFLOAD.modes(costs))
    if weights:
        order = Spacing.of(RANKS, 2, 1, SPLIT_UNITS).order(slice_groups(chunks), PLACEMENT)
    else:
        order = whole_backwards(slice_groups(chunks), PLACEMENT, SPLIT_UNITS)
    none = [[0] * len(chunks)] * 8
    return asked, tables, order, peaks_of(held_bytes(encode(order, len(chunks)), tables, none))


def fitted(tables: Tables, order: tuple, caps: list[int], room: int = 1 << 50, limit_us: float = 1e18) -> Copied | None:
    return fit_ahead(order, tables, caps, [room] * RANKS, longest_lived_shares(tables), limit_us)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("share", "recomputes"), [(0.6, True), (0.7, True), (0.95, False)])
def test_ranks_are_within_their_caps_with_copies_and_recompute(weights: bool, share: float, recomputes: bool):
    _, tables, order, peaks = even(8, weights)
    caps = [static + int(share * (peak - static)) for static, peak in zip(tables.static, peaks, strict=True)]
    found = fitted(tables, order, caps)
    assert found is not None
    (made,) = found.offloads
    played = play(order, tables, made.recompute_steps, timed(made, tables))
    assert played.makespan_us == found.makespan_us
    assert all(peak <= cap for peak, cap in zip(peaks_with_copies(order, tables, made, played), caps, strict=True))
    assert any(made.copies)
    assert any(map(any, made.recompute_steps)) == recomputes


def test_activations_are_copied_where_no_cap_requires_it_and_the_longest_lived_ones_first():
    _, tables, order, peaks = even(8, weights=False)
    found = fitted(tables, order, peaks)
    assert found is not None
    (made,) = found.offloads
    assert not any(map(any, made.recompute_steps))
    for first, second in tables.stages_of:
        assert sum(made.shares[first]) >= sum(made.shares[second])
        assert any(made.shares[first])


def test_what_the_host_lacks_is_told():
    _, tables, order, peaks = even(8, weights=False)
    free = fitted(tables, order, peaks)
    assert free is not None
    assert free.short_bytes == 0
    most = max(free.offloads[0].most_away(tables))
    short = fitted(tables, order, peaks, room=most - 5)
    assert short is not None
    assert short.short_bytes == 5


def test_nothing_slower_than_a_limit_is_fitted():
    _, tables, order, peaks = even(8, weights=False)
    found = fitted(tables, order, peaks)
    assert found is not None
    assert fitted(tables, order, peaks, limit_us=found.makespan_us) is None
    assert fitted(tables, order, peaks, limit_us=found.makespan_us + 1) == found


@some_by_default(("count", "cap_bytes"), [(20, 19_927_829_299), (24, 20_680_888_729)], 1)
def test_the_default_planner_is_as_fast_as_an_order_built_around_offload(count: int, cap_bytes: int):
    """Without copies ahead of need, other grains and even orders it took 2 % longer here."""
    asked, costs = batch(count, cap_bytes), costs_of()
    options = replace(OFFLOAD, split_weight=True)
    ours, theirs = plan(asked, costs, options), plan(asked, costs, replace(options, planner="pipeoffload"))
    assert check(ours) == []
    assert any(ours.copies)
    assert ours.predicted.makespan_us <= 1.005 * theirs.predicted.makespan_us


def test_the_default_planner_copies_no_more_ahead_than_the_host_has_room_for():
    asked, costs, options = batch(8, 20_616_702_360), costs_of(), replace(OFFLOAD, split_weight=True)
    free = plan(asked, costs, options)
    most = max(host_peaks(simulate(free))) // 2
    made = plan(replace(asked, host_cap_bytes=most), costs, options)
    assert check(made) == []
    assert check(replace(free, host_cap_bytes=(most,) * RANKS)) != []
    assert made.predicted.makespan_us > free.predicted.makespan_us


@some_by_default("lengths", [(2000, 6000, 20000), (20000, 4000, 6000, 4000), (2000, 6000, 2000, 20000, 2000)], 1)
@pytest.mark.parametrize(("share", "copies"), [(0.0, False), (1e-9, False), (1e-4, False), (1.0, True)])
def test_where_less_than_a_layers_input_may_leave_nothing_is_copied(lengths: tuple[int, ...], share: float, copies: bool):
    asked = problem(lengths, 2)
    costs = replace(pipeline(2, 2), offloadable_share=share, host_latency_us=1.0, host_us_per_byte=1e-5)
    free = plan(asked, costs)
    cap = (max(free.static_bytes) + max(free.predicted.peak_bytes)) // 2
    made = plan(replace(asked, cap_bytes=(cap,) * 2), costs, Options(offload=True, kv_offload=False))
    assert check(made) == []
    assert any(made.copies) == copies
