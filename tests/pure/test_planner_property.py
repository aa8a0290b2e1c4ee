"""Random batches: every plan is sound and within its limits, or the error names a cap that does fit.

Some by default, two thousand in the set `slow`.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_epp.cost import PipelineCosts
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.check import check, report
from megatron_epp.planner import Options, Problem, plan
from tests.support.plan.planner_cases import named_cap_bytes, pipeline, problem

pipelines = functools.cache(pipeline)

lengths = st.lists(st.floats(0, 1).map(lambda share: round(1e6**share)), min_size=1, max_size=24)
"""From one token to a million, every order of magnitude as likely as another: most tokens are in a few sequences."""
stages = st.sampled_from([1] * 8 + [2] * 10 + [3] * 8 + [4] * 8 + [5, 5, 6, 6, 7, 8, 12, 16])
"""Mostly few: what many stages cost is the many chunks they ask for."""
multiples = st.sampled_from([1, 1, 2, 16, 128, 1000])
shares = st.floats(0.0, 1.2)
STEPS = 100
"""Steps of the local search: it is here to be sound, not to be thorough."""
pace = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SHARE = 30
"""Default runs take one example where `slow` takes as many."""


def examples(count: int, /, **strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a body that takes an example: of a part of them by default and, marked slow, of all."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        some, everything = (pace(max_examples=number)(given(**strategies)(body)) for number in (count // SHARE, count))

        @pytest.mark.parametrize(
            "run", [pytest.param(some, id="some"), pytest.param(everything, id="all", marks=pytest.mark.slow)]
        )
        def test(run: Callable[[], None]) -> None:
            run()

        return test

    return decorate


def capped(batch: list[int], costs: PipelineCosts, share: float, multiple: int) -> Problem:
    """A cap between what is static and a little more than all the batch's activations would take without any planning."""
    stage = costs.stages[-1]
    per_token = stage.num_layers * (stage.layers.bytes_per_token + stage.kv.bytes_per_token) + stage.ends_bytes_per_token
    cap = max(s.static_bytes for s in costs.stages) + int(share**3 * per_token * sum(batch))
    return problem(batch, len(costs.stages), cap, token_multiple=multiple)


def assert_sound(made: Plan) -> None:
    faults = check(made)
    assert not faults, report(made, faults)
    assert 0 < made.predicted.lower_bound_us <= made.predicted.makespan_us


def plan_or_named_cap(asked: Problem, costs: PipelineCosts, options: Options) -> Plan | None:
    """The plan, or None where the problem is infeasible; then the cap the error names must be larger, and must fit."""
    try:
        made = plan(asked, costs, options)
    except InfeasibleError as error:
        cap = named_cap_bytes(error)
        assert cap > min(asked.cap_bytes)
        stages = len(asked.placement)
        fits = problem(asked.lengths, stages, cap, token_multiple=asked.token_multiple)
        assert_sound(plan(fits, costs, options))
        return None
    assert_sound(made)
    return made


@examples(350, batch=lengths, count=stages, multiple=multiples)
def test_any_batch_is_planned_no_slower_than_plain_1f1b(batch: list[int], count: int, multiple: int):
    costs = pipelines(count, 2)
    asked = problem(batch, count, token_multiple=multiple)
    plain = plan(asked, costs, Options(planner="1f1b"))
    assert_sound(plain)
    assert plan(asked, costs, Options(steps=STEPS)).predicted.makespan_us <= plain.predicted.makespan_us * (
        1 + 1e-12
    )  # sums in another order


@examples(300, batch=lengths, count=stages, share=shares, multiple=multiples)
def test_any_batch_in_any_order_under_any_cap(batch: list[int], count: int, share: float, multiple: int):
    costs = pipelines(count, 2)
    made = plan_or_named_cap(capped(batch, costs, share, multiple), costs, Options(steps=STEPS))
    again = plan_or_named_cap(capped(sorted(batch), costs, share, multiple), costs, Options(steps=STEPS))
    assert (made is None) == (again is None)
    if made is not None and again is not None:
        assert again.predicted.makespan_us == pytest.approx(made.predicted.makespan_us, rel=1e-9)
