"""Changes that would make a batch fit: those named do, and a step less does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_epp.cost import H100, ModelShape, PipelineCosts, analytic_costs
from megatron_epp.plan import InfeasibleError, PlanError
from megatron_epp.planner import Options, plan
from megatron_epp.planner import limits as search_limits
from megatron_epp.planner.limits import BATCHES, Limit, Limits
from tests.support.plan.planner_cases import GIB, pipeline, problem

COSTS = pipeline(2, 1)
BATCH = (20000, 3000, 500)
CAP = 7 * GIB


def limits(cap: int = CAP, costs: PipelineCosts = COSTS, **options: object) -> Limits:
    return Limits(problem(BATCH, 2, cap), lambda _: costs, Options(**options))  # type: ignore[arg-type]


def fits(lengths: tuple[int, ...], cap: int = CAP) -> bool:
    try:
        return plan(problem(lengths, 2, cap), COSTS) is not None
    except InfeasibleError:
        return False


@pytest.mark.parametrize("others", [(), (3000, 500)])
def test_the_longest_sequence_fits_and_a_step_more_does_not(others: tuple[int, ...]):
    found = limits().context(others)
    assert found.value is not None
    assert found.step <= found.value / 16
    assert fits((found.value, *others))
    assert not fits((found.value + found.step, *others))
    assert not fits((2 * found.value, *others))


def test_the_smallest_cap_fits_and_a_byte_less_does_not():
    found, made = limits().cap()
    assert found.value is not None
    assert found.step == 1
    assert max(made.predicted.peak_bytes) <= found.value
    assert fits(BATCH, found.value)
    assert not fits(BATCH, found.value - 1)


def test_the_smallest_cap_of_a_large_plan_is_what_the_planner_names(monkeypatch: pytest.MonkeyPatch):
    exact, _ = limits().cap()
    monkeypatch.setattr(search_limits, "LARGE", 0)
    found, made = limits().cap()
    assert exact.value is not None and found.value is not None  # noqa: PT018
    assert fits(BATCH, found.value)
    assert (found.step, set(made.cap_bytes)) == (0, {found.value})
    assert exact.value <= found.value <= 1.01 * exact.value


def test_with_offload_a_smaller_cap_is_found_in_steps_that_are_small_beside_it():
    costs = replace(COSTS, offloadable_share=0.9, host_us_per_byte=1e-5)
    without, (having, made) = limits(costs=costs, slices=4).cap()[0], limits(costs=costs, slices=4, offload=True).cap()
    assert without.value is not None and having.value is not None  # noqa: PT018
    assert max(made.predicted.peak_bytes) <= having.value < without.value
    assert having.step < having.value / 200


def test_memory_does_not_grow_with_the_batch_as_planners_let_earlier_sequences_end():
    found = limits().batch()
    assert (found.value, found.step) == (BATCHES * len(BATCH), 0)
    assert limits().context((3000,) * 40).value == limits().context((3000,)).value


def test_with_one_chunk_per_sequence_a_cap_that_the_longest_exceeds_leaves_the_shorter_ones():
    cap, _ = Limits(problem((3000, 500), 2), lambda _: COSTS, Options(planner="1f1b", recompute=0)).cap()
    assert cap.value is not None
    asked = replace(limits(cap.value, planner="1f1b", recompute=0), problem=problem((3000, 500, 20000), 2, cap.value))
    assert asked.batch() == Limit(2, 1)


@pytest.mark.parametrize("most", [1, 31, 32, 33, 47])
def test_what_fits_between_a_power_of_two_and_the_most_that_is_tried_is_found(monkeypatch: pytest.MonkeyPatch, most: int):
    for name in ("_fits", "_has_plan"):
        monkeypatch.setattr(Limits, name, lambda self, lengths, offload=False: len(lengths) <= most)
    assert limits().batch() == Limit(most, 1)


def test_where_nothing_fits_nothing_is_named():
    assert limits(cap=max(COSTS.static_bytes(s) for s in range(2))).context().value is None


def test_without_a_cap_only_the_smallest_cap_is_asked_for():
    assert [*Limits(problem((2000, 300), 2), lambda _: COSTS, Options()).questions()] == ["cap"]
    assert [*limits().questions()] == ["alone", "with_rest", "batch", "cap"]
    assert [*Limits(problem((2000,), 2, CAP), lambda _: COSTS, Options()).questions()] == ["alone", "batch", "cap"]


def test_an_error_that_is_not_about_memory_is_not_taken_for_an_answer():
    with pytest.raises(PlanError, match="at least 1"):
        limits(slices=0).context()


def test_what_no_cap_would_let_through_is_refused_with_its_own_reason():
    asked = Limits(problem(BATCH, 2, CAP, token_multiple=8), lambda _: COSTS, Options(chunk_tokens=4))
    with pytest.raises(InfeasibleError, match="cannot be padded to a multiple of 8; raise chunk_tokens to 8"):
        asked.cap()


@pytest.mark.parametrize("offload", [False, True])
def test_the_first_that_is_told_of_the_smallest_cap_is_what_the_planner_names(offload: bool, monkeypatch: pytest.MonkeyPatch):
    told: list[Limit] = []
    monkeypatch.setattr(search_limits, "CAP_BITS", 5)  # coarse: by default it takes a dozen plans
    replace(limits(offload=offload), on_better=told.append).cap()
    first = told[0]
    assert first.value is not None
    assert fits(BATCH, first.value)
    assert first.step == (first.value if offload else 0)  # with offload less may do
    assert [one.value for one in told] == sorted((one.value for one in told), reverse=True)  # type: ignore[type-var]


@pytest.mark.parametrize("most", [1, 17, 29, 46])
@pytest.mark.parametrize("offload", [False, True])
def test_whatever_is_told_before_the_end_is_true(most: int, offload: bool, monkeypatch: pytest.MonkeyPatch):
    told: list[Limit] = []
    monkeypatch.setattr(Limits, "_fits", lambda self, lengths: len(lengths) <= most)
    found = replace(limits(offload=offload), on_better=told.append).batch()
    assert found.value == most
    for one in told:
        assert one.value is not None
        assert one.value <= most
        assert one.step == 0 or one.value + one.step > most


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
