"""Stages without layers keep little and have no weight gradient, and links to the host may carry nothing or cost nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.cost.blocks import LAYER
from megatron_epp.plan.check import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.tables import tabulate
from tests.support.plan.planner_cases import pipeline, problem
from tests.support.seeds import some_by_default


@pytest.mark.parametrize("link_us_per_byte", [0.0, 1e-5])
def test_the_bound_under_a_cap_takes_no_recompute_of_a_stage_without_layers(link_us_per_byte: float):
    costs = pipeline(2)
    costs = replace(costs, stages=(costs.stages[0].changed(LAYER, count=0), costs.stages[1]), host_us_per_byte=link_us_per_byte)
    free = problem((9000, 300), 2)
    table = plan(free, costs).chunks
    capped = replace(free, cap_bytes=(1, UNLIMITED_BYTES))
    bounds = [lower_bound_us(tabulate(table, asked, costs), table, asked, Options(offload=True)) for asked in (free, capped)]
    assert bounds[0] == bounds[1]


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
