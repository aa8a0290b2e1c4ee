"""Baselines: rows of 1F1B, and chunks of a fixed size of Seq1F1B."""

from dataclasses import replace

import pytest

from megatron_epp.plan import InfeasibleError, Op, Plan, PlanError
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.planner import PLANNERS, UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.baselines.contest import chunk_sizes, fixed_size_chunks
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.baselines.whole import UniformDecisions, packed_contest
from megatron_epp.planner.fit import peaks_bytes, uniform_steps
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem, web_lengths

BASELINES = ("1f1b-padded", "1f1b-packed", "seq1f1b", "chunkflow", "infinipipe")
"""Planners of one stage per rank that choose their chunks by their own rules."""


def assert_sound(made: Plan, name: str) -> None:
    assert check(made) == []
    assert made.planner == name
    assert all(peak <= cap for peak, cap in zip(made.predicted.peak_bytes, made.cap_bytes, strict=True))
    assert 0 < made.predicted.lower_bound_us <= made.predicted.makespan_us


@pytest.mark.parametrize("name", BASELINES)
def test_equal_arguments_give_equal_plans(name: str):
    asked = problem(web_lengths(30, seed=7, longest=30_000), 4, 22 * GIB)
    assert plan(asked, pipeline(4), Options(planner=name)) == plan(asked, pipeline(4), Options(planner=name))


@pytest.mark.parametrize("name", BASELINES)
def test_an_evaluation_has_forwards_only_and_recomputes_nothing(name: str):
    made = plan(problem((9000, 4000, 300), 3, forward_only=True), pipeline(3), Options(planner=name))
    assert {step.action.op for steps in made.ranks for step in steps} == {Op.F}
    assert not any(again.num_layers for row in made.recompute for again in row)


@pytest.mark.parametrize("name", BASELINES)
def test_two_stages_on_a_rank_are_refused_unless_megatron_places_them_so(name: str):
    placements = [(0, 1, 1, 0)] if name == "1f1b-packed" else [(0, 1, 1, 0), (0, 1, 0, 1)]
    for placement in placements:
        with pytest.raises(PlanError, match=name):
            PLANNERS[name](Problem((1000,) * 4, placement, (GIB * 80,) * 2), pipeline(4), Options(planner=name))


@pytest.mark.parametrize("name", ["chunkflow", "infinipipe"])
def test_a_fixed_recompute_is_refused_by_those_that_choose_their_own(name: str):
    with pytest.raises(PlanError, match=r"chooses recompute itself.*; set recompute to auto"):
        plan(problem((1000,), 2), pipeline(2), Options(planner=name, recompute=1))


@pytest.mark.parametrize("name", ["1f1b-padded", "1f1b-packed", "seq1f1b"])
def test_uniform_recompute_is_the_least_that_fits(name: str):
    lengths = (6000, 5000, *web_lengths(20, seed=3, longest=4000))
    options = Options(planner=name, chunk_tokens=2048 if name == "seq1f1b" else None, recompute_modes="full")
    most = max(plan(problem(lengths, 4), pipeline(4), options).predicted.peak_bytes)
    static = max(stage.static_bytes for stage in pipeline(4).stages)
    asked = problem(lengths, 4, static + (most - static) // 2)
    made = plan(asked, pipeline(4), options)
    (count,) = {again.full for row in made.recompute for again in row}
    assert count > 0
    assert plan(asked, pipeline(4), replace(options, recompute=count)).ranks == made.ranks
    with pytest.raises(InfeasibleError):
        plan(asked, pipeline(4), replace(options, recompute=count - 1))


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("name", ["1f1b", *BASELINES])
def test_no_chunk_is_longer_than_the_tokens_that_chunks_may_have(name: str, multiple: int):
    asked = problem((3000, 2500, *web_lengths(20, seed=3, longest=2000)), 2, token_multiple=multiple)
    for tokens in (3010, 4100, 9000):
        made = plan(asked, pipeline(2), Options(planner=name, chunk_tokens=tokens))
        assert_sound(made, name)
        assert max(chunk.padded_tokens(made.token_multiple) for chunk in made.chunks) <= tokens


@pytest.mark.parametrize(("count", "laps"), [(1, 1), (4, 2), (9, 2), (11, 3), (13, 2)])
def test_rows_run_in_megatrons_order_with_and_without_virtual_stages(count: int, laps: int):
    """Rows too few for the ranks cannot be interleaved; what is left over of groups is none, or as many as ranks."""
    asked = Problem((1000,) * count, Placement("looped", 4, laps).rank_of, (UNLIMITED_BYTES,) * 4)
    made = plan(asked, pipeline(4 * laps), Options(planner="1f1b-packed", context=1000))
    assert_sound(made, "1f1b-packed")
    together = {1: 4, 4: 4, 9: 5, 11: 6, 13: 7}[len(made.chunks)]
    for rank, steps in enumerate(made.ranks):
        ops = [step.action.op for step in steps]
        warm_up = (3 - rank) * (2 if laps > 1 else 1) + (laps - 1) * together
        assert ops.index(Op.B) == min(warm_up + 1, count * laps)
        forwards = [(step.action.stage // 4, step.action.chunk) for step in steps if step.action.op is Op.F]
        starts = range(0, count, together)
        assert forwards == [(lap, c) for at in starts for lap in range(laps) for c in range(at, min(at + together, count))]


def test_interleaved_rows_that_are_fewer_than_the_ranks_are_refused_and_long_ones_divided_where_that_makes_enough():
    looped = Problem((1000,) * 3, (0, 1, 2, 3) * 2, (UNLIMITED_BYTES,) * 4)
    with pytest.raises(InfeasibleError, match=r"3 sequences for 4 ranks.* raise global_batch_size to 4"):
        plan(looped, pipeline(8), Options(planner="1f1b-packed", context=3000))
    made = plan(replace(looped, lengths=(1000,) * 8), pipeline(8), Options(planner="1f1b-packed", context=4000))
    assert len(made.chunks) == 8, "two rows by first fit are fewer than the ranks"


def test_megatrons_recompute_is_the_fastest_that_fits_of_none_norms_and_mlps_and_blocks_of_layers():
    free = plan(problem((4000,) * 8, 4), pipeline(4), Options(planner="1f1b-packed"))
    times_us, kinds = [], []
    for share in (1.0, 0.8, 0.3, 0.2, 0.0):
        made = plan_within((4000,) * 8, share, free)
        (again,) = {again for row in made.recompute for again in row}  # the same in all stages and rows
        kinds.append(tuple(again))
        times_us.append(made.predicted.makespan_us)
    assert kinds == [(0, 0, 0), (1, 0, 0), (0, 0, 4), (3, 0, 0), (4, 0, 0)]
    assert times_us == sorted(times_us)


def test_layers_that_recompute_in_groups_keep_fewer_inputs_and_take_as_long_as_all_by_themselves():
    """A row for each rank is alive on the first one, with an input for each group; the activations of one group come back."""
    ranks, lengths, costs = 16, (4000,) * 32, pipeline(16, 4)
    options = Options(planner="1f1b-packed", context=4000)
    cap = least_cap_bytes(problem(lengths, ranks), costs, options)
    every = plan(problem(lengths, ranks, cap), costs, options)
    asked = problem(lengths, ranks, cap - 1)
    assert packed_contest(asked, costs, options).best is None
    best = (contest := packed_contest(asked, costs, options, in_groups=True)).best
    assert isinstance(best, UniformDecisions)
    assert best.group == 2
    assert contest.best_us == pytest.approx(every.predicted.makespan_us)
    peaks = []
    for group in (1, 2):
        tables = replace(best, group=group).tables(asked, costs)
        peaks.append(peaks_bytes(best.order, tables, uniform_steps(tables, 4))[0])
    layer = costs.stages[0].layers
    saved = 4000 * (ranks * 2 * layer.input_bytes_per_token - layer.bytes_per_token)
    assert peaks[0] - peaks[1] == pytest.approx(saved, rel=1e-6)


def plan_within(lengths: tuple[int, ...], share: float, free: Plan) -> Plan:
    """Plan under a cap between what all layers recomputed need (0) and what a free plan needs (1)."""
    options = Options(planner="1f1b-packed")
    low = least_cap_bytes(problem(lengths, 4), pipeline(4), options)
    cap = low + int(share * (max(free.predicted.peak_bytes) - low))
    return plan(problem(lengths, 4, cap), pipeline(4), options)


ROWS = (8000, *web_lengths(40, seed=11, longest=6000))


def made_by(name: str, lengths: tuple[int, ...] = ROWS, context: int | None = None, multiple: int = 1) -> Plan:
    return plan(problem(lengths, 4, token_multiple=multiple), pipeline(4), Options(planner=name, context=context))


@pytest.mark.parametrize(("context", "multiple", "row"), [(None, 16, 8000), (10_000, 1, 10_000), (10_001, 16, 10_016)])
def test_every_sequence_is_a_row_padded_to_the_context_rounded_up_to_the_multiple(context: int | None, multiple: int, row: int):
    made = made_by("1f1b-padded", context=context, multiple=multiple)
    assert [chunk.segments for chunk in made.chunks] == [((at, 0, length),) for at, length in enumerate(ROWS)]
    assert {made.padded_tokens(c) for c in range(len(made.chunks))} == {row}


def test_padding_costs_time_memory_and_messages():
    costs = pipeline(4)
    made = made_by("1f1b-padded", (8000, 10, 10))
    steps = {str(step.action): step for step in made.ranks[1]}
    assert steps["1F1"].time_us >= costs.stages[1].line("forward").per_token_us * 8000
    assert steps["1F1"].alloc_bytes == steps["1F0"].alloc_bytes
    assert made.messages.activation_us[0][1] == made.messages.activation_us[0][0]


def test_rows_hold_whole_sequences_and_at_most_one_row_is_half_empty():
    made = made_by("1f1b-packed")
    assert sorted(s.sequence for chunk in made.chunks for s in chunk.segments) == list(range(len(ROWS)))
    assert all(s.start == 0 and s.end == ROWS[s.sequence] for chunk in made.chunks for s in chunk.segments)
    sizes = [chunk.num_tokens for chunk in made.chunks]
    assert max(sizes) <= 8000
    assert sum(size <= 4000 for size in sizes) <= 1


CUT = (50_000, 9000, *web_lengths(60, seed=2, longest=20_000))


@pytest.mark.parametrize("size", [1000, 4096, 30_000])
def test_slices_are_of_the_chunk_size_and_nothing_is_larger(size: int):
    chunks = fixed_size_chunks(CUT, size)
    slices = [s for chunk in chunks for s in chunk.segments if s.end < CUT[s.sequence]]
    assert slices
    assert {s.end - s.start for s in slices} == {size}
    assert max(chunk.num_tokens for chunk in chunks) <= size
    assert sum(chunk.num_tokens <= size // 2 for chunk in chunks[-20:]) <= 20


def test_short_sequences_fill_up_tails_first():
    chunks = fixed_size_chunks((2500, 400, 300, 900), 1000)
    assert [[(s.sequence, s.start, s.end) for s in chunk.segments] for chunk in chunks] == [
        [(0, 0, 1000)],
        [(0, 1000, 2000)],
        [(0, 2000, 2500), (1, 0, 400)],
        [(2, 0, 300)],
        [(3, 0, 900)],
    ]


def test_the_size_is_the_best_of_those_tried():
    asked = problem(CUT, 4)
    best = plan(asked, pipeline(4), Options(planner="seq1f1b")).predicted.makespan_us
    sizes = chunk_sizes(asked, Options())
    assert len(sizes) >= 8
    each = [plan(asked, pipeline(4), Options(planner="seq1f1b", chunk_tokens=s)).predicted.makespan_us for s in sizes]
    assert best == min(each) < max(each)


def test_fewer_microbatches_than_stages_run_all_forwards_first():
    """`test_schedules.py` has orders of more."""
    assert " ".join(map(str, seq1f1b_order([[0], [1]], 4)[0])) == "0F0 0F1 0B0 0B1"


CUTS_NONE = r"'{}' does not cut sequences: .* 3008 tokens, above the 3007 .*; raise chunk_tokens to 3008"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(
            (Options(planner=name, chunk_tokens=3007), CUTS_NONE.format(name))
            for name in ("1f1b", "1f1b-packed", "1f1b-padded")
        ),
        (
            Options(planner="1f1b-padded", context=4096, chunk_tokens=4000),
            r"4096 tokens, above the 4000 .*; raise chunk_tokens to 4096, or set planner to greedy",
        ),
        *((Options(planner=name, context=2000), r"3000 .* 2000") for name in ("1f1b-padded", "1f1b-packed")),
    ],
    ids=lambda value: value.planner if isinstance(value, Options) else "",
)
def test_those_that_cut_no_sequences_refuse_one_that_is_longer_than_chunks_or_the_context(options: Options, words: str):
    with pytest.raises(InfeasibleError, match=words):
        plan(problem((3000, 100), 2, token_multiple=16), pipeline(2), options)
