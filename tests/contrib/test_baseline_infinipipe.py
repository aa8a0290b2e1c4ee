"""InfiniPipe's planner: chunking, checkpoints along diagonals, groups with a flush between."""

import ctypes
import random
import sys
from itertools import accumulate, pairwise, product

import pytest

from megatron_epp.contrib.papers.infinipipe import planner as infinipipe_planner
from megatron_epp.contrib.papers.infinipipe.checkpointing import Effort, diagonal_checkpoints
from megatron_epp.contrib.papers.infinipipe.integer_program import Model, Solution
from megatron_epp.contrib.papers.infinipipe.planner import Grouping, algorithm_1
from megatron_epp.contrib.papers.slices import Slicer
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import Action, Chunk, Op, Segment
from megatron_epp.plan.proof import check
from megatron_epp.planner import Options, plan
from megatron_epp.planner.baselines.contest import Contest, peaks_bytes
from megatron_epp.planner.baselines.seq1f1b import seq1f1b_order
from megatron_epp.planner.evaluate import makespan_us
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.tables import Tables, tabulate
from tests.support.plan.planner_cases import GIB, pipeline, problem, web_lengths
from tests.support.plan.stages import stage_of

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
