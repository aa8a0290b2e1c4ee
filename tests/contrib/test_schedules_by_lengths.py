"""Schedules that divide a batch by its lengths, or offload and recompute by rules of their own: what their papers state.

``p`` are the ranks, ``m`` the microbatches, ``n`` the slices of a sequence. Units of time and memory are those of
`test_schedules.py`.
"""

import ctypes
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product

import numpy as np
import pytest

from megatron_epp.contrib.papers.chunkflow import recompute_all_but_last
from megatron_epp.contrib.papers.dynapipe import sorted_microbatches
from megatron_epp.contrib.papers.infinipipe import planner as infinipipe_planner
from megatron_epp.contrib.papers.infinipipe.checkpointing import Effort, diagonal_checkpoints
from megatron_epp.contrib.papers.infinipipe.integer_program import Model, Solution
from megatron_epp.contrib.papers.infinipipe.planner import Grouping, algorithm_1
from megatron_epp.contrib.papers.partition import least_latency
from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.contrib.papers.sppo import sequence_aware_shares
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import NO_RECOMPUTE, Action, Chunk, Op, Plan, Segment
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.planners import PLANNERS
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan, tabulate
from megatron_epp.planner.baselines.contest import Contest, fixed_size_chunks, peaks_bytes
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.tables import Tables
from scripts.bench.orders.unit import TOKENS, Unit
from tests.support.plan.planner_cases import GIB, LLAMA, pipeline, problem, web_lengths
from tests.support.plan.stages import stage_of

LENGTHS = (30000, 28000, 26000, 9000, 9000, 5000, 3000, 2000, 700, 700, 300)
OFFLOADING = [name for name, entry in PLANNERS.entries().items() if entry.offloads]


def latency_us(times_us: np.ndarray, ends: Sequence[int], p: int) -> float:
    """2102.07988, section 3.3; 2311.10418, section 4: ``sum(t) + (p - 1) max(t)``."""
    pieces = [times_us[start, end] for start, end in pairwise((0, *ends))]
    return sum(pieces) + (p - 1) * max(pieces)


def divisions(count: int) -> Iterator[tuple[int, ...]]:
    for cuts in range(count):
        for ends in combinations(range(1, count), cuts):
            yield (*ends, count)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("p", [1, 2, 4, 9])
def test_no_division_into_pieces_has_less_latency(p: int, seed: int):
    """Times as measured: longer pieces take longer, but not in proportion."""
    steps = np.cumsum(np.sort(np.random.default_rng(seed).uniform(1, 30, size=(9, 9)), axis=1), axis=1)
    times_us = np.array(
        [[steps[start, end - start - 1] + 3 if end > start else np.inf for end in range(9)] for start in range(9)]
    )
    assert latency_us(times_us, least_latency(times_us, p), p) == min(latency_us(times_us, ends, p) for ends in divisions(8))


def linear(fixed_us: float, per_token_us: float = 1.0, per_pair_us: float = 0.0, stages: int = 4) -> PipelineCosts:
    forward = LinearTime(fixed_us / 3, per_token_us / 3, per_pair_us / 3)
    kept = {"layer_bytes_per_token": 1.0, "recomputed_layer_bytes_per_token": 0.0, "kv_bytes_per_token": 0.0}
    stage = stage_of(num_layers=1, forward=forward, backward=forward.scaled(2), **kept)
    return PipelineCosts("linear", (stage,) * stages, hidden_bytes_per_token=0.0)


def test_terapipe_cuts_a_sequence_where_more_slices_cost_as_much_as_they_save():
    """2102.07988, section 3.3: n slices of L tokens with a fixed time c take ``n c + L + (p - 1)(c + L / n)``.

    That is least for ``n = sqrt((p - 1) L / c)``, here sqrt(3 * 12288 / 144) = 16.
    """
    made = plan(problem([12288], 4), linear(144.0), Options(planner="terapipe"))
    assert len(made.chunks) == 16
    assert made.predicted.makespan_us == pytest.approx(16 * 144 + 12288 + 3 * (144 + 12288 / 16))


def test_terapipes_slices_become_shorter_where_attention_makes_later_tokens_slower():
    """2102.07988, section 3.3: slices of equal time, so the first is the longest."""
    made = plan(problem([12288], 4), linear(144.0, 1.0, 1e-3), Options(planner="terapipe"))
    tokens = [chunk.segments[0].end - chunk.segments[0].start for chunk in made.chunks]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 2 * tokens[-1]


def test_terapipe_slices_all_sequences_of_a_batch_and_packs_short_ones():
    made = plan(problem([*LENGTHS, *[90] * 40], 4), LLAMA.costs([8] * 4), Options(planner="terapipe"))
    slices = [[chunk for chunk in made.chunks if chunk.segments[0].sequence == q] for q in range(3)]
    assert all(len(own) > 4 for own in slices)
    assert max(len(chunk.segments) for chunk in made.chunks) > 10


def test_dynapipe_divides_sorted_sequences_with_the_least_latency():
    """2311.10418, section 4: microbatches are neighbours in length, and no such division has less latency."""
    lengths, p = (700, 60, 500, 480, 60, 90, 300, 200), 4
    chunks = next(iter(sorted_microbatches(problem(lengths, 4), linear(100.0), Options())))
    falling = sorted(lengths, reverse=True)
    assert [lengths[part.sequence] for chunk in chunks for part in chunk.segments] == falling
    times_us = np.array([[100.0 + sum(falling[start:end]) for end in range(9)] for start in range(9)])
    least_us = min(latency_us(times_us, ends, p) for ends in divisions(8))
    assert latency_us(times_us, np.cumsum([len(chunk.segments) for chunk in chunks]).tolist(), p) == pytest.approx(least_us)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 32)])
def test_dynapipes_ranks_run_one_forward_and_one_backward_in_each_cycle(p: int, m: int):
    """2311.10418, section 5: a microbatch is ``p - r`` cycles away from the end and as many from its backward on rank r."""
    unit = Unit("dynapipe", p, m)
    made = unit.of_paper()
    for rank, row in enumerate(made.order):
        ahead = 2 * (p - rank) - 1
        assert [action.op for action in row[: ahead + 2]] == [Op.F] * ahead + [Op.B, Op.F]
    assert unit.waits(made) == (p - 1) * 3


@pytest.mark.parametrize("most", [4, 5, 6])
def test_dynapipe_delays_forwards_for_which_there_is_no_memory(most: int):
    """2311.10418, section 5: with memory for k microbatches no rank has more, and all are still trained."""
    asked = problem([1000] * 12, 4, most * 1000 + 200)
    made = plan(asked, linear(10.0), Options(planner="dynapipe", chunk_tokens=1000, recompute=0))
    assert max(made.predicted.peak_bytes) == most * 1000


def test_sppo_offloads_what_the_link_moves_while_a_slice_is_computed():
    """2503.10377, sections 3 to 6: ``share * A`` is one size M for all slices; of those with less the share is 1."""
    stage = stage_of(
        num_layers=1,
        forward=LinearTime(0.0, 1.0, 1e-3),
        backward=LinearTime(0.0, 2.0, 2e-3),
        layer_bytes_per_token=8.0,
        recomputed_layer_bytes_per_token=0.0,
        kv_bytes_per_token=0.0,
    )
    costs = PipelineCosts("sppo", (stage,) * 4, hidden_bytes_per_token=0.0, host_us_per_byte=0.5)
    asked = problem([12288], 4)
    made = plan(asked, costs, Options(planner="sppo", slices=8, offload=True))
    tables = tabulate(made.chunks, asked, costs)
    (shares, *_), sizes, times_us = sequence_aware_shares(tables), tables.passes[0].activation, tables.passes[0].forward_us
    moved = [share * size for share, size in zip(shares, sizes, strict=True)]
    assert moved == pytest.approx([min(size, us / 0.5) for size, us in zip(sizes, times_us, strict=True)])
    assert shares == sorted(shares)
    assert 0 < shares[0] < 1
    assert made.offload_share[0] == pytest.approx(shares, abs=1e-3)


@pytest.mark.parametrize("n", [8, 16])
def test_sppo_holds_half_of_a_sequence_if_half_of_each_slice_is_offloaded(n: int):
    """2503.10377, sections 3 to 6: ``M_i = M_(i-1) + A_i - share * A_(i-1)``, with what is still on its way.

    By its model of the pipeline n slices take ``(p - 1 + n) / n`` of the time of the whole sequence, with the copies.
    """
    made = Unit("sppo", 4, 1, slices=n, link=4 / 3).with_copies()
    assert max(made.predicted.peak_bytes) / TOKENS * n == 1 + (n - 1) / 2 + 1 / 2
    assert made.predicted.makespan_us / TOKENS == pytest.approx((3 + n) / n * 3)


@pytest.mark.parametrize("p", [4, 5, 7, 8, 16])
def test_chronos_waits_as_1f1b_and_keeps_three_quarters_of_its_memory(p: int):
    """A lower bound for two stages round the ranks, since the paper's abstract names no figure.

    F takes one unit and B two, so a chunk comes back to a rank after p units of forwards, 2 p of backwards, and 3 p round the
    end. A shallow stage keeps it for 6 p units, a deep one for 3 p, and one begins every 6 units: 3/2 p halves of microbatches.
    """
    unit = Unit("chronos", p, 4 * p)
    made = unit.of_paper()
    assert unit.waits(made) == (p - 1) * 3
    assert 0.75 * p <= unit.alive(made) <= 0.75 * p + 1


@pytest.mark.parametrize("p", [8, 12])
def test_pipeoffload_keeps_less_than_half_if_half_is_offloaded(p: int):
    """2503.01328, abstract: peak memory decreases "in a better-than-linear manner", "with negligible overhead".

    The link takes twice as long for all activations as ranks compute, so it has time for half of them.
    """
    unit = Unit("pipeoffload", p, 4 * p, link=2)
    without, made = unit.of_paper(), unit.with_copies()
    shallow, deep = made.offload_share[:p], made.offload_share[p:]
    assert {share for row in deep for share in row} == {0.0}
    assert sum(share > 0 for row in shallow for share in row) > 0.9 * p * 4 * p
    assert max(made.predicted.peak_bytes) < unit.peak_bytes(without) / 2
    assert made.predicted.makespan_us == pytest.approx(unit.makespan_us(without))


def two_stages_each(name: str, cap: int = UNLIMITED_BYTES) -> Problem:
    order = PLANNERS[name]
    return Problem(LENGTHS, Placement(order.kind, 4, order.chunks_per_rank or 2).rank_of, (cap,) * 4)


def sound(problem: Problem, name: str) -> Plan:
    costs = LLAMA.costs([32 // problem.num_stages] * problem.num_stages, state_bytes_per_parameter=7.5)
    options = Options(planner=name, slices=6, offload=True, split_weight=PLANNERS.entries()[name].splits_weight)
    made = plan(problem, costs, options)
    assert (check(made), blocked([lower(made)])) == ([], [])
    return made


@pytest.mark.parametrize("name", OFFLOADING)
def test_copies_are_made_without_a_cap_and_recompute_is_added_under_one(name: str):
    free = sound(two_stages_each(name), name)
    assert any(free.copies)
    assert not any(one.num_layers for row in free.recompute for one in row)
    capped = sound(two_stages_each(name, max(free.predicted.peak_bytes) - 6 * GIB), name)
    assert any(capped.copies)
    assert any(one.num_layers for row in capped.recompute for one in row)


@pytest.mark.parametrize("name", OFFLOADING)
def test_without_a_link_or_the_option_nothing_is_copied(name: str):
    problem = two_stages_each(name)
    costs = LLAMA.costs([32 // problem.num_stages] * problem.num_stages)
    assert not any(plan(problem, costs, Options(planner=name, slices=6)).copies)


COSTS = pipeline(1)
STAGE = COSTS.stages[0]


def retained(made: Plan, rank: int) -> int:
    """Most chunks alive at a time that keep all their activations."""
    alive = peak = 0
    for action in made.actions(rank):
        if made.recompute[action.stage][action.chunk] == NO_RECOMPUTE:
            alive += 1 if action.op is Op.F else -1
            peak = max(peak, alive)
    return peak


def test_long_sequences_are_cut_and_short_ones_stand_alone():
    lengths = (2500, 400, 5000, 500, 900)
    chunks = fixed_size_chunks(lengths, 1000, standalone=True)
    assert [chunk.kind(lengths) for chunk in chunks] == ["split"] * 8 + ["batched"] * 2
    assert [chunk.num_tokens for chunk in chunks] == [1000] * 5 + [1000, 1000, 500] + [900, 900]


@pytest.mark.parametrize("retain", [1, 2, 3, 4, 9])
def test_all_but_the_last_chunks_of_a_sequence_recompute_all_layers(retain: int):
    layers = recompute_all_but_last(fixed_size_chunks((4000, 2000, 500), 1000, standalone=True), (3, 5), retain)
    dropped = max(0, 4 - retain), max(0, 2 - retain)
    for row, most in zip(layers, (3, 5), strict=True):
        assert row == [*[most] * dropped[0], *[0] * (4 - dropped[0]), *[most] * dropped[1], *[0] * (2 - dropped[1]), 0]


@pytest.mark.parametrize("chunks", [4, 8, 16])
def test_activations_do_not_grow_with_the_sequence_but_caches_and_layer_inputs_do(chunks: int):
    """With K = 1: one chunk's activations, everyone's layer inputs, keys, values and their gradients."""
    size, length = 2048, 2048 * chunks
    kept = STAGE.num_layers * (STAGE.layers.bytes_per_token - STAGE.kv.bytes_per_token)
    inputs = STAGE.num_layers * STAGE.layers.input_bytes_per_token
    extra, cache = STAGE.ends_bytes_per_token, STAGE.num_layers * STAGE.kv.bytes_per_token
    least = STAGE.static_bytes + size * kept + (length - size) * inputs + length * (extra + 2 * cache)
    made = plan(problem((length,), 1, int(least) + chunks + 3), COSTS, Options(planner="chunkflow", chunk_tokens=size))
    assert retained(made, 0) == 1
    # The gradient of keys and values comes layer by layer, as the last chunk's activations go.
    assert least - length * cache <= made.predicted.peak_bytes[0] <= least + chunks + 3


def test_more_memory_retains_more():
    asked = [problem((65_536,), 1, cap * GIB) for cap in (16, 18, 22, 80)]
    kept = [retained(plan(p, COSTS, Options(planner="chunkflow", chunk_tokens=4096)), 0) for p in asked]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1] == 16


UNBALANCED = (4, 4, 3, 2, 1, 1, 1, 1)


def test_what_the_solvers_library_prints_is_no_part_of_a_commands_output(capfd, monkeypatch):
    optimize, libc = pytest.importorskip("scipy.optimize", reason="pip install 'megatron-epp[milp]'"), ctypes.CDLL(None)
    solve = optimize.milp

    def prints(*rest, **named):
        libc.puts(b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();")
        return solve(*rest, **named)

    monkeypatch.setattr(optimize, "milp", prints)
    libc.puts(b"a line of NCCL")  # in the C library's buffer, where stdout is a pipe or a file
    model = Model()
    model.at_least(model.variable(0.0, 9.0, integer=True, cost=1.0), 3.5)
    assert model.solve().values == [4.0]
    sys.stdout.write("[]\n")
    sys.stdout.flush()
    libc.fflush(None)
    out, err = capfd.readouterr()
    assert out == "a line of NCCL\n[]\n"
    assert "HighsMipSolverData" in err


def equal_chunks(counts: tuple[int, ...], stages: int, layers: int = 3) -> tuple[tuple[Chunk, ...], Tables]:
    """Sequences of so many chunks, all of the same time and size; no messages and no attention."""
    stage = stage_of(
        num_layers=layers,
        forward=LinearTime(0.0, 1.0),
        backward=LinearTime(0.0, 2.0),
        layer_bytes_per_token=10,
        recomputed_layer_bytes_per_token=1,
        extra_bytes_per_token=2,
        kv_bytes_per_token=1,
    )
    chunks = [Chunk((Segment(q, 8 * i, 8 * i + 8),)) for q, count in enumerate(counts) for i in range(count)]
    asked = problem([8 * count for count in counts], stages)
    return tuple(chunks), tabulate(chunks, asked, PipelineCosts("equal", (stage,) * stages, 0.0))


@pytest.mark.parametrize("seed", range(20))
def test_recompute_along_diagonals_adds_their_sum_of_layers_to_the_makespan(seed: int):
    """2509.21275, Equation 17, for chunks of equal time."""
    draw = random.Random(seed)
    stages = draw.choice([2, 3, 4])
    counts = UNBALANCED if seed < 10 else tuple(sorted((draw.randint(1, 5) for _ in range(draw.randint(1, 8))), reverse=True))
    chunks, tables = equal_chunks(counts, stages)
    order = seq1f1b_order(slice_groups(chunks), stages)
    diagonals = [draw.randint(0, 3) for _ in range(len(chunks) + stages - 1)]
    layers = [[0] * len(chunks) for _ in range(stages)]
    for p, actions in enumerate(order):
        for k, c in enumerate(action.chunk for action in actions if action.op is Op.B):
            layers[p][c] = diagonals[k + stages - 1 - p]
    none = [[0] * len(chunks)] * stages
    added = makespan_us(order, tables, layers) - makespan_us(order, tables, none)
    assert added == pytest.approx(sum(diagonals) * tables.passes[0].frontier.layer_us[0, 0])


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_finds_the_least_sum_of_layers(seed: int):
    draw = random.Random(seed)
    stages, layers = draw.choice([(1, 2), (2, 2), (2, 1), (3, 1)])
    chunks, tables = equal_chunks(draw.choice([(2, 1), (3,), (1, 1, 1), (2, 2)]), stages, layers)
    order = seq1f1b_order(slice_groups(chunks), stages)
    backwards = [[action.chunk for action in actions if action.op is Op.B] for actions in order]
    choices = {}
    for diagonals in product(range(layers + 1), repeat=len(chunks) + stages - 1):
        rows = [[diagonals[row.index(c) + stages - 1 - p] for c in range(len(chunks))] for p, row in enumerate(backwards)]
        peak = max(peaks_bytes(order, tables, rows))
        choices[peak] = min(sum(diagonals), choices.get(peak, 10**6))
    for cap in draw.sample(sorted(choices), min(6, len(choices))):
        found = diagonal_checkpoints(order, tables, (cap,) * stages)
        assert max(peaks_bytes(order, tables, found[1])) <= cap
        assert found[0] == min(sum_ for peak, sum_ in choices.items() if peak <= cap)
    assert diagonal_checkpoints(order, tables, (min(choices) - 1,) * stages) is None


@pytest.mark.parametrize("more_tokens", [False, True])
@pytest.mark.parametrize("slices", [1, 3, 8])
def test_slices_take_equal_times_and_all_sequences_are_cut_at_the_same_places(slices: int, more_tokens: bool):
    lengths = (60_000, 33_000, *web_lengths(60, seed=4, longest=20_000))
    chunker = Slicer.of(problem(lengths, 4), pipeline(4), None)
    chunks = algorithm_1(chunker, slices, more_tokens=more_tokens)
    longest = [s for chunk in chunks for s in chunk.segments if s.sequence == 0]
    times = [chunker.slice_us(s.start, s.end) for s in longest]
    assert (len(longest), max(times)) == (slices, pytest.approx(min(times), rel=0.01))
    ends = {s.end for s in longest}
    parts = [s for chunk in chunks for s in chunk.segments]
    assert all(s.end in ends for s in parts if s.end < lengths[s.sequence])
    assert sum(s.end - s.start for s in parts) == sum(lengths)
    assert all(segment.start == 0 for chunk in chunks for segment in chunk.segments[1:])
    if not more_tokens:
        assert max(chunk.num_tokens for chunk in chunks) <= max(s.end - s.start for s in longest)


def test_where_the_window_of_long_sequences_costs_short_ones_recompute_they_run_apart():
    chunks, tables = equal_chunks((6, 6, *[1] * 40), 2)
    order = seq1f1b_order(slice_groups(chunks), 2)
    low, high = (max(peaks_bytes(order, tables, [[count] * len(chunks)] * 2)) for count in (3, 0))
    lengths = [48, 48, *[8] * 40]
    for cap, groups in (((low + high) // 2, [set(range(12)), set(range(12, 52))]), (high, [set(range(52))])):
        contest = Contest(problem(lengths, 2, cap), pipeline(2), Options(planner="infinipipe"))
        made = Grouping(contest, tables, slice_groups(chunks), Effort()).pipelines()
        assert made is not None
        assert [{action.chunk for action in part.order[0]} for part in made] == groups
    assert len(made) == 1


def test_a_pipeline_ends_before_the_next_starts():
    lengths = (24_000, 22_000, *[2000] * 60)
    costs, options = pipeline(2), Options(planner="infinipipe", slices=8)
    free = plan(problem(lengths, 2), costs, options)
    static = costs.stages[0].static_bytes
    cap = static + int(0.6 * (max(free.predicted.peak_bytes) - static))
    made = plan(problem(lengths, 2, cap), costs, options)
    assert (drained(free.actions(0)), drained(made.actions(0))) == (1, 2)


def drained(actions: tuple[Action, ...]) -> int:
    """How often a rank has no chunk alive."""
    return list(accumulate(1 if action.op is Op.F else -1 for action in actions)).count(0)


def test_the_recompute_of_a_plan_lies_along_diagonals():
    made = plan(problem((40_000, 30_000, 9000), 3, 20 * GIB), pipeline(3), Options(planner="infinipipe", slices=8))
    if len(set(map(len, slice_groups(made.chunks)))) == 1:
        pytest.fail("the case should have sequences of several numbers of chunks")
    rows = [[made.recompute[p][action.chunk].full for action in made.actions(p) if action.op is Op.B] for p in range(3)]
    assert any(rows[0])
    pairs = [(above, below) for upper, lower in pairwise(rows) for above, below in zip(upper, lower[1:], strict=False)]
    assert sum(a == b for a, b in pairs) >= 0.9 * len(pairs)


def test_the_search_ends_with_its_best_when_its_effort_is_spent(monkeypatch: pytest.MonkeyPatch):
    solved: list[int] = []
    solve = Model.solve

    def counted(self: Model, **limits: object) -> Solution:
        solved.append(len(self.entries[0]))
        return solve(self, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(Model, "solve", counted)
    asked, costs, options = problem((40_000, 30_000, 9000), 3, 20 * GIB), pipeline(3), Options(planner="infinipipe")
    whole = plan(asked, costs, options)
    effort = sum(solved)
    monkeypatch.setattr(infinipipe_planner, "MOST_ENTRIES", effort // 10)
    solved.clear()
    short = plan(asked, costs, options)
    assert 0 < sum(solved) < effort / 2
    assert short.predicted.makespan_us >= whole.predicted.makespan_us
    assert check(short) == []
