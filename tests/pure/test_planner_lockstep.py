"""Plans of replicas that share experts: each sound, all in step, and what cannot be kept in step is refused or found."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_epp.cost import CPU, H100, ModelShape, analytic_costs
from megatron_epp.cost import memory as item
from megatron_epp.plan import Action, InfeasibleError, Op, PlanError, Recompute, Step, check, check_lockstep, simulate
from megatron_epp.plan.kv_offload import host_peaks, slices_of
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.chunks.align import align
from megatron_epp.planner.chunks.chunker import Chunker
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.result import plan_lockstep
from megatron_epp.planner.tables import tabulate

SHAPE = ModelShape(
    num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=512, num_experts=8, experts_per_token=2
)
COSTS = analytic_costs(SHAPE, CPU, [4, 4])
ROUGH = (3000, 40, 700, 20, 20, 55, 900, 310), (1500, 1400, 800, 60, 33)


def problems(*batches, cap_bytes=UNLIMITED_BYTES, **more):
    return [Problem(lengths=tuple(lengths), placement=(0, 1), cap_bytes=(cap_bytes,) * 2, **more) for lengths in batches]


def exchanges(made):
    """Return the actions of every rank that exchange tokens."""
    return [[action for action in made.actions(rank) if action.op in (Op.F, Op.B)] for rank in range(made.num_ranks)]


BATCHES = st.lists(st.lists(st.integers(1, 4000), min_size=1, max_size=12), min_size=2, max_size=3)


@given(BATCHES, st.sampled_from([1, 4]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_replicas_run_the_same_actions_in_the_same_order_whatever_they_have(batches, multiple, forward_only):
    asked = problems(*batches, token_multiple=multiple, forward_only=forward_only)
    plans = plan_lockstep(asked, COSTS, Options())
    assert check_lockstep(plans) == []
    assert [check(made) for made in plans] == [[]] * len(plans)
    assert [list(made.lengths) for made in plans] == batches
    assert all(exchanges(made) == exchanges(plans[0]) for made in plans)
    assert len({made.predicted.makespan_us for made in plans}) == 1


@pytest.mark.parametrize("options", [Options(slices=3), Options(chunk_tokens=600), Options(recompute=1), Options(seed=3)])
def test_what_the_user_fixes_holds_for_all_replicas(options):
    plans = plan_lockstep(problems(*ROUGH), COSTS, options)
    for made in plans:
        assert options.chunk_tokens is None or max(map(made.padded_tokens, range(len(made.chunks)))) <= options.chunk_tokens
        assert options.recompute == "auto" or {again for row in made.recompute for again in row} == {
            Recompute(options.recompute)
        }
    if options.slices:
        assert [segment.sequence for chunk in plans[0].chunks for segment in chunk.segments].count(0) >= options.slices


def test_whole_microbatches_of_replicas_stand_side_by_side_longest_with_longest():
    batches = ((3000, 40, 700, 20), (1500, 1400, 60, 33, 90))
    numbers = ((0, 1, 1, 2), (0, 1, 2, 2, 2))
    asked = [replace(own, microbatches=each) for own, each in zip(problems(*batches), numbers, strict=True)]
    plans = plan_lockstep(asked, COSTS, Options())
    assert check_lockstep(plans) == []
    for made, each in zip(plans, numbers, strict=True):
        assert sorted(tuple({each[part.sequence] for part in chunk.segments}) for chunk in made.chunks) == [(0,), (1,), (2,)]
        assert all(
            part.start == 0 and part.end == made.lengths[part.sequence] for chunk in made.chunks for part in chunk.segments
        )
    with pytest.raises(PlanError, match="equally many microbatches"):
        plan_lockstep([asked[0], replace(asked[1], microbatches=(0, 1, 1, 1, 1))], COSTS, Options())
    with pytest.raises(PlanError, match="microbatches of 2 sequences, and lengths of 4"):
        plan_lockstep([replace(asked[0], microbatches=(0, 1))], COSTS, Options())


def test_equal_problems_get_equal_plans():
    assert plan_lockstep(problems(*ROUGH), COSTS, Options()) == plan_lockstep(problems(*ROUGH), COSTS, Options())


def test_no_replica_goes_above_its_cap_and_all_recompute_alike():
    free = plan_lockstep(problems(*ROUGH), COSTS, Options())
    static = free[0].static_bytes[0]
    cap = static + (max(max(made.predicted.peak_bytes) for made in free) - static) * 4 // 10
    plans = plan_lockstep(problems(*ROUGH, cap_bytes=cap), COSTS, Options())
    assert all(max(made.predicted.peak_bytes) <= cap for made in plans)
    assert any(again.selective for row in plans[0].recompute for again in row)
    assert plans[0].recompute == plans[1].recompute


@pytest.mark.parametrize("batches", [ROUGH, ((3000,), (40, 30))])
def test_all_have_room_to_exchange_the_largest_chunk_of_any_from_start_to_end(batches):
    """The buffer is one of all ranks that share experts, and stays."""
    costs = replace(COSTS, exchange_bytes_per_token=10.0)
    plans, bare = (plan_lockstep(problems(*batches), each, Options()) for each in (costs, COSTS))
    largest = [max(map(made.padded_tokens, range(len(made.chunks)))) for made in plans]
    assert largest[0] != largest[1]
    for made, without in zip(plans, bare, strict=True):
        assert [ours - theirs for ours, theirs in zip(made.static_bytes, without.static_bytes, strict=True)] == [
            10 * max(largest)
        ] * 2
        assert [own[item.EXCHANGE] for own in memory_breakdown(made, costs).static] == [10 * max(largest)] * 2
    cap = max(max(made.predicted.peak_bytes) for made in plans) - 5 * max(largest)
    capped = plan_lockstep(problems(*batches, cap_bytes=cap), costs, Options())
    assert all(max(made.predicted.peak_bytes) <= cap for made in capped)


def test_being_in_step_costs_little_where_work_is_shared_evenly():
    """Two replicas of about the same work, against each alone."""
    batches = (3000, 700, 300, *(120,) * 8), (2600, 1700, *(90,) * 12)
    together = plan_lockstep(problems(*batches), COSTS, Options())[0].predicted.makespan_us
    alone = max(plan(one, COSTS).predicted.makespan_us for one in problems(*batches))
    assert alone <= together * (1 + 1e-9)
    assert together < 1.25 * alone


@pytest.mark.parametrize("lengths", [(3000, 700, 300, *(120,) * 8), (4000,), (500,) * 8], ids=str)
def test_replicas_with_equal_batches_lose_nothing_by_being_in_step(lengths):
    """But for the grains and recompute modes that are tried for one pipeline alone."""
    together = plan_lockstep(problems(lengths, lengths), COSTS, Options())[0].predicted.makespan_us
    alone = plan(problems(lengths)[0], COSTS).predicted.makespan_us
    assert alone * (1 - 1e-9) <= together <= 1.005 * alone


@pytest.mark.parametrize("batches", [((3000,), (300,) * 10), ((1000,) * 4, (200,) * 20)])
def test_a_replica_with_less_to_do_slows_the_one_with_most_by_little(batches):
    together = plan_lockstep(problems(*batches), COSTS, Options())[0].predicted.makespan_us
    most = max(plan(one, COSTS).predicted.makespan_us for one in problems(*batches))
    assert together <= 1.02 * most


def test_weight_gradients_may_stand_apart():
    plans = plan_lockstep(problems(*ROUGH), COSTS, Options(split_weight=True))
    assert check_lockstep(plans) == []
    assert all(any(action.op is Op.W for action in made.actions(1)) for made in plans)


@pytest.mark.parametrize("turns", [1, 2])
def test_each_replica_copies_what_it_has_to_and_none_waits_for_anothers_loads(turns):
    free = plan_lockstep(problems(*ROUGH), COSTS, Options())
    static, costs = free[0].static_bytes[0], replace(COSTS, host_turns=turns)
    cap = static + (max(max(made.predicted.peak_bytes) for made in free) - static) // 2
    asked = problems(*ROUGH, cap_bytes=cap)
    recomputed = plan_lockstep(asked, costs, Options())
    plans = plan_lockstep(asked, costs, Options(offload=True))
    assert check_lockstep(plans) == []
    assert plans[0].predicted.makespan_us < recomputed[0].predicted.makespan_us
    assert plans[0].offload_share != plans[1].offload_share
    timelines = list(map(simulate, plans))
    assert timelines[0].start_us == timelines[1].start_us
    assert all(any(made.copies) and max(made.predicted.peak_bytes) <= cap for made in plans)


def test_copies_and_weight_gradients_apart_in_step():
    cap = max(plan_lockstep(problems(*ROUGH), COSTS, Options())[0].predicted.peak_bytes) * 2 // 3
    plans = plan_lockstep(problems(*ROUGH, cap_bytes=cap), COSTS, Options(offload=True, split_weight=True))
    assert check_lockstep(plans) == []
    assert all({Op.W, Op.O} <= {step.action.op for _, rows in made.tables for row in rows for step in row} for made in plans)


LONG = (6000, 40, 700, 20), (5000, 1400, 60, 33)
FIXED = Options(slices=12)


def kv_offload_caps(costs, batches, share):
    """A cap below the least that does without anything in host memory."""
    with pytest.raises(InfeasibleError) as refused:
        plan_lockstep(problems(*batches, cap_bytes=1), costs, FIXED)
    static = max(map(costs.static_bytes, range(2)))
    return static + int(share * (refused.value.least_cap_bytes - static))


@pytest.mark.parametrize(("offloadable_share", "share"), [(0.0, 0.9), (0.4, 0.54)], ids=["alone", "next to copies"])
@pytest.mark.parametrize(
    "batches",
    [LONG, pytest.param((LONG[0], (300,) * 20), marks=pytest.mark.slow)],
    ids=["both have long sequences", "one has"],
)
def test_each_replica_has_its_own_keys_and_values_at_the_host_and_all_stay_in_step(batches, offloadable_share, share):
    costs = replace(COSTS, offloadable_share=offloadable_share, host_latency_us=1.0)
    cap, options = kv_offload_caps(costs, batches, share), replace(FIXED, offload=True)
    with pytest.raises(InfeasibleError):
        plan_lockstep(problems(*batches, cap_bytes=cap), costs, FIXED)
    plans = plan_lockstep(problems(*batches, cap_bytes=cap, host_cap_bytes=1 << 30), costs, options)
    assert check_lockstep(plans) == []
    assert [check(made) for made in plans] == [[], []]
    assert [{entry.sequence for entry in made.kv_offload} <= set(slices_of(made)) for made in plans] == [True, True]
    assert plans[0].kv_offload
    assert plans[0].kv_offload != plans[1].kv_offload
    assert any(any(made.copies) for made in plans) == (offloadable_share > 0)
    assert all(max(made.predicted.peak_bytes) <= cap for made in plans)
    assert plans[0].recompute == plans[1].recompute
    timelines = list(map(simulate, plans))
    assert timelines[0].start_us == timelines[1].start_us
    for made in plans:
        breakdown = memory_breakdown(made, costs)
        for step in (step for row in made.ranks for step in row):
            assert sum(breakdown.takes[step.action].values()) == step.alloc_bytes
    most = max(max(host_peaks(line)) for line in timelines)
    with pytest.raises(InfeasibleError, match=rf"in host memory, where it may have [\d.]+ GiB \({most // 8} bytes\)"):
        plan_lockstep(problems(*batches, cap_bytes=cap, host_cap_bytes=most // 8), costs, options)


def test_with_little_at_the_host_the_cap_that_the_error_names_would_do_beside_it():
    options = replace(FIXED, offload=True)
    with pytest.raises(InfeasibleError) as refused:
        plan_lockstep(problems(*LONG, cap_bytes=1, host_cap_bytes=1024), COSTS, options)
    cap = refused.value.least_cap_bytes
    plans = plan_lockstep(problems(*LONG, cap_bytes=cap, host_cap_bytes=1024), COSTS, options)
    assert all(max(made.predicted.peak_bytes) <= cap for made in plans)


def test_an_evaluation_in_step_fits_with_keys_and_values_at_the_host():
    free = plan_lockstep(problems(*LONG, forward_only=True), COSTS, FIXED)
    static = max(free[0].static_bytes)
    cap = static + (max(max(made.predicted.peak_bytes) for made in free) - static) * 6 // 10
    with pytest.raises(InfeasibleError):
        plan_lockstep(problems(*LONG, cap_bytes=cap, forward_only=True), COSTS, FIXED)
    plans = plan_lockstep(problems(*LONG, cap_bytes=cap, forward_only=True), COSTS, replace(FIXED, offload=True))
    assert all(made.kv_offload for made in plans)


def test_slices_stay_together_and_side_by_side():
    chunkers = [Chunker.of(problem, COSTS, None) for problem in problems((4000, 300, 300, 300), (2000, 1900, 500, 500))]
    aligned = align([chunker.table(chunker.grain(chunks=12)) for chunker in chunkers], chunkers)
    assert len({len(table) for table in aligned.chunks}) == 1
    assert sum(aligned.runs) == len(aligned.chunks[0])
    stops = {sum(aligned.runs[:number]) for number in range(len(aligned.runs))}
    for table in aligned.chunks:
        assert stops <= {group.start for group in slice_groups(table)}
    assert [len(group) for group in slice_groups(aligned.stand_in(()))] == list(aligned.runs)


def test_a_replica_with_too_few_tokens_for_the_chunks_another_needs_is_refused():
    with pytest.raises(InfeasibleError, match="has 3 tokens in all has too few; raise global_batch_size"):
        plan_lockstep(problems((4000,), (3,)), COSTS, Options(chunk_tokens=100))


def test_a_cap_that_is_too_small_is_refused_with_the_one_that_would_do():
    with pytest.raises(InfeasibleError, match="Raise cap_bytes to"):
        plan_lockstep(problems(*ROUGH, cap_bytes=1000), COSTS, Options())


@pytest.mark.parametrize("options", [Options(planner="1f1b"), Options(budget_ms=5)])
def test_other_planners_are_refused(options):
    with pytest.raises(PlanError, match="share experts"):
        plan_lockstep(problems(*ROUGH), COSTS, options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cap_bytes": (1 << 40, 1 << 30)}, "cap_bytes of replica 1 is .*1073741824.*, that of replica 0 is"),
        ({"placement": (0, 0), "cap_bytes": (1 << 40,)}, r"placement of replica 1 is \(0, 0\), that of replica 0 is \(0, 1\)"),
        ({"token_multiple": 4}, "token_multiple of replica 1 is 4, that of replica 0 is 1"),
        ({"forward_only": True}, "forward_only of replica 1 is True"),
        ({"host_cap_bytes": 5}, "host_cap_bytes of replica 1 is 5"),
    ],
)
def test_replicas_that_differ_in_more_than_their_lengths_are_refused(change, words):
    first, second = problems(*ROUGH)
    with pytest.raises(PlanError, match=words):
        plan_lockstep([first, replace(second, **change)], COSTS, Options())


def test_costs_of_another_pipeline_or_no_replicas_are_refused():
    with pytest.raises(PlanError, match="the placement has 2 stages, but the costs are of"):
        plan_lockstep(problems(*ROUGH), analytic_costs(SHAPE, CPU, [2, 2, 4]), Options())
    with pytest.raises(PlanError, match="there are none"):
        plan_lockstep([], COSTS, Options())


# ---- the check -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def matched():
    return plan_lockstep(problems(*ROUGH), COSTS, Options(slices=2))


def reordered(made, rank, change):
    rows = [list(row) for row in made.ranks]
    change(rows[rank])
    return replace(made, ranks=tuple(map(tuple, rows)))


def test_matched_plans_have_no_violations(matched):
    assert check_lockstep(matched) == []
    assert check_lockstep(matched[:1]) == []


def test_two_actions_in_another_order_are_found_where_they_are(matched):
    def swap(row):
        row[0], row[1] = row[1], row[0]

    faults = check_lockstep([matched[0], reordered(matched[1], 1, swap)])
    assert [(fault.rank, fault.position) for fault in faults] == [(1, 0), (1, 1)]
    assert str(faults[0]) == "rank 1 position 0 1F1: replica 1 runs it where replica 0 runs 1F0"


def test_an_action_missing_or_too_many_is_found(matched):
    last = matched[1].ranks[0][-1]
    missing = reordered(matched[1], 0, lambda row: row.pop())
    (fault,) = check_lockstep([matched[0], missing])
    assert f"has no exchange {len(matched[0].ranks[0]) - 1}, where replica 0 runs {last.action}" in fault.reason
    (fault,) = check_lockstep([missing, matched[1]])
    assert (fault.rank, fault.action) == (0, last.action)


def test_other_recompute_is_found(matched):
    rows = [list(row) for row in matched[1].recompute]
    rows[1][0] = Recompute(2)
    (fault,) = check_lockstep([matched[0], replace(matched[1], recompute=tuple(map(tuple, rows)))])
    assert str(fault) == "rank 1: stage 1 recomputes 2 full layers of chunk 0 on replica 1, none on replica 0"


def test_a_recompute_of_its_own_is_an_exchange_too(matched):
    def ahead(position):
        return lambda row: row.insert(position, Step(row[position].action._replace(op=Op.R), 1.0, 0, 0))

    at = next(position for position, action in enumerate(matched[0].actions(0)) if action.op is Op.B)
    both = [reordered(made, 0, ahead(at)) for made in matched]
    assert check_lockstep(both) == []
    faults = check_lockstep([both[0], matched[1]])
    assert (faults[0].rank, faults[0].position, faults[0].action) == (0, at, matched[1].actions(0)[at])
    assert str(faults[0]).endswith(f"replica 1 runs it where replica 0 runs {both[0].actions(0)[at]}")


def test_plans_of_other_shape_are_found(matched):
    other = plan_lockstep(problems(*ROUGH), COSTS, Options(slices=7))[0]
    assert any("chunks, replica 0 has" in fault.reason for fault in check_lockstep([matched[0], other]))
    (fault, *_) = check_lockstep([matched[0], replace(matched[1], num_layers=(5, 3))])
    assert fault.reason == "replica 1 has num_layers (5, 3), replica 0 has (4, 4)"


def test_a_weight_gradient_is_no_exchange(matched):
    extra = reordered(matched[1], 0, lambda row: row.append(Step(Action(Op.W, 0, 0), 1.0, 0, 0)))
    assert check_lockstep([matched[0], extra]) == []


@pytest.mark.slow  # seconds of planning
def test_copies_are_never_planned_with_the_sizes_of_another_candidates_kv_offload():
    """Where the token cap binds, the search goes on from a plan with KV offload: a cache that stays counts all the same."""
    shape = ModelShape(
        num_layers=6,
        hidden_size=2048,
        ffn_hidden_size=2048,
        num_attention_heads=16,
        vocab_size=4096,
        num_experts=8,
        experts_per_token=2,
    )
    costs, cap = analytic_costs(shape, H100, [2, 2, 2], state_bytes_per_parameter=8.0), 2_417_199_144
    batches = [
        (5142, 1665, 1152, 652, 602, 800, 112, 761, 5892, 470, 732, 3623, 489, 1045, 8597, 2468, 936, 6975, 399, 994),
        (1300, 40_000, 355, 4569, 4142, 713, 435, 745, 192, 366, 1968, 1813, 1721, 3519, 6796, 1878, 1718, 384, 5314, 1769),
        (895, 5908, 22_646, 149, 1915, 8815, 1577, 40_000, 14_521),
    ]
    asked = [Problem(lengths, (0, 1, 2), (cap,) * 3, token_multiple=4) for lengths in batches]
    options = Options(chunk_tokens=4096, recompute_modes="full", offload=True, seed=2)
    plans = plan_lockstep(asked, costs, options)
    assert any(made.copies for made in plans)
    for made, problem in zip(plans, asked, strict=True):
        caches = tabulate(made.chunks, problem, costs).forward_alloc
        kv_offload = {(entry.stage, entry.sequence) for entry in made.kv_offload}
        for step in (step for row in made.ranks for step in row if step.action.op is Op.F):
            _, stage, c = step.action
            assert (stage, made.chunks[c].segments[0].sequence) in kv_offload or step.alloc_bytes >= caches[stage][c]
