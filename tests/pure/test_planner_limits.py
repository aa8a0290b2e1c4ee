"""Random batches have plans within their limits, or errors that name caps that do; changes that are named make batches fit."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_epp.cost.work import causal_pairs
from megatron_epp.plan import InfeasibleError, Plan
from megatron_epp.plan.proof import check, report
from megatron_epp.planner import Options, least, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.least import proven
from megatron_epp.planner.message_room import MessageRoomError, with_room
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import greedy
from megatron_epp.planner.validation import MOST_BYTES, check_amounts
from megatron_epp.tools.formulas import H100, ModelShape, analytic_costs
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem, web_lengths

COSTS = pipeline(2, 1)
BATCH = (20000, 3000, 500)
CAP = 7 * GIB


def test_a_batch_is_held_to_what_a_plan_can_hold_by_its_tokens_and_not_by_their_pairs():
    tokens = 1 << 24
    assert causal_pairs(0, tokens) * COSTS.stages[0].layers.bytes_per_token > 10 * MOST_BYTES
    check_amounts((tokens,), COSTS)


def test_what_no_cap_would_let_through_is_refused_with_its_own_reason():
    asked = problem(BATCH, 2, CAP, token_multiple=8)
    with pytest.raises(InfeasibleError, match="cannot be padded to a multiple of 8; raise chunk_tokens to 8"):
        plan(asked, COSTS, Options(chunk_tokens=4))


def test_a_sequence_that_fits_only_in_slices_of_bounded_length_is_not_refused():
    costs = replace(COSTS, offloadable_share=0.9, host_us_per_byte=1e-5)
    assert plan(problem((1 << 20,), 2, 12 * GIB), costs, Options(offload=True)).kv_offload


def test_weights_are_too_large_only_where_they_exceed_the_cap_of_their_own_rank():
    shape = ModelShape(num_layers=8, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, vocab_size=4096)
    costs = analytic_costs(shape, H100, [6, 2], state_bytes_per_parameter=8.0)
    most, least = (costs.static_bytes(stage) for stage in range(2))
    caps = most + 80 * GIB, least + GIB // 4
    assert caps[1] < most
    with pytest.raises(InfeasibleError) as refusal:
        plan(replace(problem((400_000,), 2), cap_bytes=caps), costs)
    assert "whatever the batch" not in str(refusal.value)
    assert any(remedy.setting == "context" for remedy in refusal.value.remedies)


LENGTHS = (*web_lengths(20, seed=5, longest=20_000), 40_000)


def test_ranks_with_other_layers_or_caps_are_looked_at_too():
    costs = pipeline(8, 2)
    deeper = replace(costs, stages=(*costs.stages[:3], pipeline(8, 4).stages[3], *costs.stages[4:]))
    asked = problem(LENGTHS, 8)
    assert least_cap_bytes(asked, deeper, Options()) > least_cap_bytes(asked, costs, Options())
    lower = replace(asked, cap_bytes=(*[60 * GIB] * 5, 1 * GIB, *[60 * GIB] * 2))
    with pytest.raises(InfeasibleError):
        proven(lower, costs, Options())


def test_where_messages_of_fast_plans_are_too_many_there_is_one_no_slower_than_that_of_the_least_memory():
    costs = replace(pipeline(2, 2), message_bytes_per_token=200_000.0)
    options, asked = Options(), problem(web_lengths(8, seed=1, longest=6_000), 2)
    with pytest.raises(InfeasibleError) as refused:
        proven(replace(asked, cap_bytes=(1, 1)), costs, options)
    tight = replace(asked, cap_bytes=(refused.value.least_cap_bytes,) * 2)
    with pytest.raises((InfeasibleError, MessageRoomError)):
        with_room(tight, lambda one: build_plan(one, costs, options, greedy(one, costs, options)))
    made = plan(tight, costs, options)
    proof = proven(tight, costs, options)
    least_memory = build_plan(proof.problem, costs, options, proof.decisions).predicted
    assert made.predicted.makespan_us <= least_memory.makespan_us
    assert check(made) == []
    assert proof.peak_bytes == max(least_memory.peak_bytes)
    lower = replace(tight, cap_bytes=tuple(cap // 2 for cap in tight.cap_bytes))
    for make in (proven, plan):
        with pytest.raises(InfeasibleError) as named:
            make(lower, costs, options)
        assert named.value.least_cap_bytes == refused.value.least_cap_bytes


@pytest.mark.parametrize("cap_bytes", [1, 30 * GIB])
def test_what_tables_need_in_any_order_is_no_more_than_in_the_order_that_keeps_the_least(cap_bytes: int):
    asked, costs = problem(LENGTHS, 4, cap_bytes), pipeline(4, 2)
    replicas = Replicas((asked,), costs, Options())
    tables = [*least._tables(replicas)]
    for floor, table in zip(least._floors(tables, asked, costs, Options()), tables, strict=True):
        assert floor <= least._fit(replicas, table)[2].needed_bytes


pipelines = functools.cache(pipeline)

lengths = st.lists(st.floats(0, 1).map(lambda share: round(1e6**share)), min_size=1, max_size=24)
"""From one token to a million, every order of magnitude as likely as another: most tokens are in a few sequences."""
stages = st.sampled_from([1] * 8 + [2] * 10 + [3] * 8 + [4] * 8 + [5, 5, 6, 6, 7, 8, 12, 16])
"""Mostly few: what many stages cost is the many chunks they ask for."""
multiples = st.sampled_from([1, 1, 2, 16, 128, 1000])
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


def assert_sound(made: Plan) -> None:
    faults = check(made)
    assert not faults, report(made, faults)
    assert 0 < made.predicted.lower_bound_us <= made.predicted.makespan_us


@examples(350, batch=lengths, count=stages, multiple=multiples)
def test_any_batch_is_planned_no_slower_than_plain_1f1b(batch: list[int], count: int, multiple: int):
    costs = pipelines(count, 2)
    asked = problem(batch, count, token_multiple=multiple)
    plain = plan(asked, costs, Options(planner="1f1b"))
    assert_sound(plain)
    assert plan(asked, costs, Options(steps=STEPS)).predicted.makespan_us <= plain.predicted.makespan_us * (
        1 + 1e-12
    )  # sums in another order
