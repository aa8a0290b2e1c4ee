"""Quality of plans, also under memory caps: close to a bound, faster with more freedom, and with the recompute that fits."""

import dataclasses
import itertools
import random
from dataclasses import replace
from itertools import product

import pytest

from megatron_epp.contrib.papers.spacing import whole_backwards
from megatron_epp.cost.blocks import INPUT, LAYER, BlockCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, ModeCosts, work_of
from megatron_epp.features.copies import fit_copies
from megatron_epp.features.local_search.improvement import improve
from megatron_epp.features.split_weights.split_orders import with_split_weights
from megatron_epp.plan import RECOMPUTE_MODES, Chunk, InfeasibleError, Op, Plan, Segment
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import whole_sequences
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.evaluate import makespan_us, play
from megatron_epp.planner.fit import fit_recompute, least_peaks, peaks_bytes
from megatron_epp.planner.fitted import for_table
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.offload import peaks_with_copies, timed
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.orders.warm_up import WarmUp, elastic_1f1b
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import greedy
from megatron_epp.planner.search import SMALL_PLAN_ITEMS, search
from megatron_epp.planner.tables import tabulate
from megatron_epp.tools.formulas import analytic_profile
from megatron_epp.tools.formulas.library import balanced_layers, load_cluster, load_flags, shape_of
from scripts.bench.small_cases import drawn
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem, web_lengths
from tests.support.plan.stages import stage_of
from tests.support.seeds import some_by_default, spread_by_default

WEB = web_lengths(200, seed=3)
WHALE = (131072, *web_lengths(120, seed=4, longest=2000))
EQUAL = (16384,) * 16
BIMODAL = tuple(60000 if i % 25 == 0 else 300 + 13 * i for i in range(100))
BATCHES = {"web": WEB, "whale": WHALE, "equal": EQUAL, "bimodal": BIMODAL}
SPLIT = Options(split_weight=True)
LOOPED, V = (0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)


def gap(made: Plan) -> float:
    return made.predicted.makespan_us / made.predicted.lower_bound_us - 1.0


def raw_bound_us(made: Plan, given: Problem, stages: int, options: Options, recompute_steps: int = 4) -> float:
    costs = pipeline(stages, recompute_steps)
    return lower_bound_us(
        tabulate(made.chunks, given, costs, options.modes(costs.recompute_modes)), made.chunks, given, options
    )


def ops(made: Plan) -> set[Op]:
    return {step.action.op for row in (*made.ranks, *made.copies) for step in row}


@spread_by_default(2, name=BATCHES, cap=(34, 48, 400))
def test_the_plan_is_close_to_a_bound_that_counts_the_recompute_the_cap_forces(name: str, cap: int):
    given = problem(BATCHES[name], 8, cap * GIB)
    made = plan(given, pipeline(8))
    assert gap(made) < 0.05
    assert raw_bound_us(made, given, 8, Options()) <= made.predicted.makespan_us * (1 + 1e-9)


@pytest.mark.parametrize("lengths", [WEB, EQUAL], ids=["web", "equal"])
def test_weight_gradients_of_their_own_are_faster_and_fit_the_same_cap(lengths: tuple[int, ...]):
    given = problem(lengths, 8, 40 * GIB)
    joint, split = plan(given, pipeline(8)), plan(given, pipeline(8), SPLIT)
    assert ops(split) == {Op.F, Op.B, Op.W}
    assert split.predicted.makespan_us < joint.predicted.makespan_us
    assert max(split.predicted.peak_bytes) <= 40 * GIB


def test_offload_takes_the_place_of_recompute_and_fits_the_same_cap():
    given = problem(WHALE, 8, 34 * GIB)
    without, made = plan(given, pipeline(8)), plan(given, pipeline(8), Options(offload=True))
    assert ops(made) == {Op.F, Op.B, Op.O, Op.L}
    assert check(made) == []
    assert made.predicted.makespan_us < 0.97 * without.predicted.makespan_us
    assert sum(map(sum, made.recompute_us)) < sum(map(sum, without.recompute_us))


@some_by_default(("lengths", "stages", "cap"), [(EQUAL, 4, 20), (WHALE, 8, 30), (EQUAL, 8, 20)], 1)
def test_weight_gradients_of_their_own_and_copies_go_together(lengths: tuple[int, ...], stages: int, cap: int):
    given, costs = problem(lengths, stages, cap * GIB), pipeline(stages)
    choices = Options(offload=True), SPLIT, Options(offload=True, split_weight=True)
    copied, split, both = (plan(given, costs, options) for options in choices)
    assert ops(both) == {Op.F, Op.B, Op.W, Op.O, Op.L}
    assert check(both) == []
    assert both.predicted.makespan_us < copied.predicted.makespan_us
    assert both.predicted.makespan_us < split.predicted.makespan_us
    assert raw_bound_us(both, given, stages, choices[-1]) <= both.predicted.makespan_us * (1 + 1e-9)


@pytest.mark.xfail(strict=True, reason="0.8 % slower: judged with weight gradients, the walk with copies ends in wider runs")
def test_where_weight_gradients_of_their_own_gain_nothing_beside_copies_asking_for_them_costs_next_to_nothing():
    given, costs = problem(EQUAL, 4, 16 * GIB), pipeline(4)
    choices = Options(offload=True), SPLIT, Options(offload=True, split_weight=True)
    copied, split, both = (plan(given, costs, options).predicted.makespan_us for options in choices)
    assert both <= 1.002 * min(copied, split)


@pytest.mark.slow
def test_ranks_that_take_turns_on_a_link_copy_no_slower_than_with_a_fixed_share_of_it():
    given, own = problem(WHALE, 8, 26 * GIB), pipeline(8)
    own = dataclasses.replace(own, host_us_per_byte=2 * own.host_us_per_byte)
    fixed, turns = dataclasses.replace(own, host_us_per_byte=2 * own.host_us_per_byte), dataclasses.replace(own, host_turns=2)
    took_us = [plan(given, costs, Options(offload=True)).predicted.makespan_us for costs in (own, turns, fixed)]
    assert took_us == sorted(took_us)
    assert took_us[1] < took_us[2]


@some_by_default("turns", [2, 3, 1], 2)
def test_what_the_search_plays_is_what_the_simulator_says(turns: int):
    given, costs = problem(WHALE, 4, 26 * GIB), dataclasses.replace(pipeline(4), host_turns=turns)
    made = greedy(given, costs, Options(offload=True))
    written = build_plan(given, costs, Options(offload=True), made)
    assert any(written.copies)
    assert written.host_links == {1: (), 2: (0, 0, 1, 1), 3: (0, 0, 0, 1)}[turns]
    assert made.makespan_us(given, costs) == written.predicted.makespan_us
    tables = made.tables(given, costs)
    played = play(made.order, tables, made.recompute_steps, timed(made.as_offload, tables))
    assert tuple(peaks_with_copies(made.order, tables, made.as_offload, played)) == written.predicted.peak_bytes


@pytest.mark.parametrize("seed", range(6))
def test_no_copies_bring_a_rank_below_what_it_holds_with_all_else_away(seed: int, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(seed)
    stages = draw.randint(1, 3)
    asked, costs = problem([draw.randint(3000, 50_000) for _ in range(draw.randint(1, 5))], stages), pipeline(stages)
    chunks = plan(asked, costs, Options(slices=6)).chunks
    tables = tabulate(chunks, asked, costs, Options().modes(costs.recompute_modes))
    order = WarmUp(lead=2, minimal=True).order(chunks, tables, asked)
    least = fit_copies.floors(order, encode(order, len(chunks)), tables)
    unlimited = [[UNLIMITED_BYTES] * stages]
    monkeypatch.setattr(fit_copies, "floors", lambda *_: [0] * stages)
    for rank in range(stages):
        caps = tuple(least[rank] - 1 if other == rank else UNLIMITED_BYTES for other in range(stages))
        assert fit_copies.fit_offload(order, (tables,), caps, unlimited) is None


def test_offload_spares_recompute_of_a_given_chunk_table():
    costs = dataclasses.replace(pipeline(4), host_us_per_byte=1e-6)
    free = plan(problem(EQUAL, 4), costs, Options(slices=2))
    given = problem(EQUAL, 4, int(0.6 * max(free.predicted.peak_bytes)))
    bare, copied = (for_table(free.chunks, given, costs, Options(offload=offload)) for offload in (False, True))
    assert bare.chunks == copied.chunks == free.chunks
    assert copied.copies
    assert copied.makespan_us(given, costs) < bare.makespan_us(given, costs)


GIVEN, COSTS, OPTIONS = problem((9000, 8000, 3000, 2500), 3, 9 * GIB), pipeline(3, 2), Options(slices=1)


def fastest(given, costs, options) -> Decisions:
    """The fastest that the search finds, before local search, with whole backwards."""
    return search(Replicas((given,), costs, options)).best().whole_backwards[0]


def test_steps_are_judged_with_weight_gradients_split_off_where_that_is_asked_for():
    given, costs, options = drawn(102)
    start = fastest(given, costs, options)
    tables = start.tables(given, costs)
    whole, split = (improve(start, tables, given, options, split_weight=asked) for asked in (False, True))

    def split_us(made: Decisions) -> float:
        return with_split_weights(made.order, tables, made.as_offload, given.cap_bytes)[1]

    assert split_us(split) < min(split_us(start), split_us(whole))
    assert split.makespan_us(given, costs) >= whole.makespan_us(given, costs)


def test_a_plan_of_few_chunks_is_searched_with_weight_gradients_split_off_unasked(monkeypatch: pytest.MonkeyPatch):
    given, costs, options = drawn(167)
    given = replace(given, cap_bytes=(30_200_000_000,) * given.num_ranks)
    made = greedy(given, costs, options)
    assert len(made.chunks) * given.num_stages <= SMALL_PLAN_ITEMS
    assert made.makespan_us(given, costs) == pytest.approx(222_763, abs=1)
    monkeypatch.setattr("megatron_epp.features.local_search.improvement.SMALL_PLAN_ITEMS", 0)
    assert greedy(given, costs, options).makespan_us(given, costs) > 1.05 * made.makespan_us(given, costs)


LONG_AND_SHORT = (65536, 20000, *web_lengths(30, seed=5, longest=4000))


def small_case(seed: int):
    """A pipeline of one or two stages, two layers each, with few chunks and odd sizes; chunk tables and costs are random."""
    draw = random.Random(seed)
    stages = draw.choice([1, 2])
    cuts = [sorted(draw.sample(range(1, 40), draw.randint(0, 2))) for _ in range(draw.randint(1, 3))]
    lengths = [40] * len(cuts)
    cuts = [[0, *inner, 40] for inner in sorted(cuts, key=len, reverse=True)]
    chunks = [Chunk((Segment(q, *part),)) for q, inner in enumerate(cuts) for part in itertools.pairwise(inner)]
    costs, modes = small_costs(draw, stages), draw.choice([RECOMPUTE_MODES, RECOMPUTE_MODES[:2], RECOMPUTE_MODES[:1]])
    return elastic_1f1b(chunks, stages, False), tabulate(chunks, problem(lengths, stages), costs, modes)


def small_costs(draw: random.Random, stages: int) -> PipelineCosts:
    stage = stage_of(
        num_layers=2,
        forward=LinearTime(1.0, draw.random()),
        backward=LinearTime(1.0, draw.random()),
        layer_bytes_per_token=(layer := draw.randint(8, 20)),
        recomputed_layer_bytes_per_token=draw.randint(0, 9),
        extra_bytes_per_token=(extra := draw.randint(0, 9)),
        kv_bytes_per_token=(kv := draw.randint(0, 6)),
        recompute={
            "selective": ModeCosts(LinearTime(0.5, draw.random()), draw.randint(0, layer)),
            "mlp": ModeCosts(LinearTime(0.3, draw.random()), draw.randint(kv, layer)),
        },
        static=Static(weights=draw.randint(0, 50)),
        head_bytes_per_token=draw.randint(0, extra),
    )
    return PipelineCosts("small", (stage,) * stages, 0.0)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_peak_is_that_of_the_best_choice_there_is(seed: int):
    order, tables = small_case(seed)
    steps = range(2 * len(tables.passes[0].frontier.mode) + 1)
    choices = itertools.product(*([s for s in steps if s <= most] for most in tables.columns.most[: tables.num_chunks]))
    peaks = [peaks_bytes(order, tables, [list(recompute_steps)] * len(order)) for recompute_steps in choices]
    assert least_peaks(order, tables) == [min(column) for column in zip(*peaks, strict=True)]


@pytest.mark.parametrize("by_stay", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_every_cap_from_the_least_peak_up_is_met_and_below_it_the_least_peak_is_named(seed: int, by_stay: bool):
    order, tables = small_case(seed)
    least = max(least_peaks(order, tables))
    most = max(peaks_bytes(order, tables, [[0] * tables.num_chunks] * len(order)))
    for cap in {least, (2 * least + most) // 3, (least + most) // 2, most}:
        recompute_steps = fit_recompute(order, tables, (cap,) * len(order), Options(), by_stay).recompute_steps
        assert recompute_steps is not None
        assert max(peaks_bytes(order, tables, recompute_steps)) <= cap
    below = fit_recompute(order, tables, (least - 1,) * len(order), Options(), by_stay)
    assert (below.recompute_steps, below.needed_bytes) == (None, least)


def test_plans_get_slower_as_the_cap_falls_and_recompute_more():
    caps = [80, 40, 32, 28, 24, 20, 18]
    plans = [plan(problem(LONG_AND_SHORT, 4, cap * GIB), pipeline(4), Options(slices=24)) for cap in caps]
    spans, times = [made.predicted.makespan_us for made in plans], [sum(map(sum, made.recompute_us)) for made in plans]
    assert (spans, times[0], times[-1]) == (sorted(spans), 0.0, max(times))
    assert times[-1] > 0.1 * plans[-1].predicted.makespan_us
    for cap, made in zip(caps, plans, strict=True):
        assert max(made.predicted.peak_bytes) <= cap * GIB


def test_chunks_that_stay_long_are_recomputed_first_where_that_takes_less_recompute():
    """A rank's first stage keeps chunks for longer than its second, whose recompute takes 1 % less time for the same bytes."""
    placement, count, plain = Placement("looped", 4, 2), 32, pipeline(8)
    first = plain.stages[0].layers.forward
    dearer = replace(first, fixed_us=1.01 * first.fixed_us, per_token_us=1.01 * first.per_token_us)
    costs = replace(plain, stages=(plain.stages[0].changed(LAYER, forward=dearer),) * 4 + plain.stages[4:])
    asked = Problem((4096,) * count, placement.rank_of, (UNLIMITED_BYTES,) * 4)
    chunks = whole_sequences(asked.lengths)
    tables = tabulate(chunks, asked, costs)
    order = whole_backwards(slice_groups(chunks), placement)
    static, peak = max(tables.static), max(peaks_bytes(order, tables, [[0] * count] * 8))
    caps = (static + (peak - static) * 7 // 10,) * 4
    by_price, by_stay = (fit_recompute(order, tables, caps, Options(), stay).recompute_steps for stay in (False, True))
    assert sum(map(sum, by_stay)) < 0.5 * sum(map(sum, by_price))
    assert makespan_us(order, tables, by_stay) < 0.9 * makespan_us(order, tables, by_price)
    made = plan(replace(asked, cap_bytes=caps), costs, Options(slices=1))
    assert made.predicted.makespan_us <= makespan_us(order, tables, by_stay)


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_a_mode_whose_recompute_takes_no_time_is_taken_first(share: float):
    """Measured times of a mode may be zero."""
    plain = pipeline(2).stages[0]
    modes = {name: replace(mode, again=LinearTime()) for name, mode in plain.layers.recompute.items()}
    costs = replace(pipeline(2), stages=(plain.changed(LAYER, recompute=modes),) * 2)
    free = plan(problem((16384,) * 4, 2), costs, Options(slices=1))
    static, peak = max(free.static_bytes), max(free.predicted.peak_bytes)
    made = plan(problem((16384,) * 4, 2, int(static + share * (peak - static))), costs, Options(slices=1))
    assert check(made) == []
    assert any(sum(again) > again.full for row in made.recompute for again in row)


FIXED = (Options(slices=8), Options(chunk_tokens=4096), Options(recompute=2), Options(planner="1f1b"))


CASES = [(Options(), False), (Options(), True), *product(FIXED, (False,)), *product(FIXED, (True,))]


@some_by_default(("options", "wide_sums"), CASES, 4)
def test_the_cap_an_error_names_does_fit_and_one_byte_less_does_not(options: Options, wide_sums: bool):
    costs = pipeline(4)
    if not wide_sums:
        narrow = replace(costs.stages[0].kv, many_gradient_bytes_per_token=None)
        costs = replace(costs, stages=tuple(stage.changed(LAYER, kv=narrow) for stage in costs.stages))
    cap = least_cap_bytes(problem(LONG_AND_SHORT, 4), costs, options)
    peak = max(plan(problem(LONG_AND_SHORT, 4, cap), costs, options).predicted.peak_bytes)
    assert peak <= cap
    # With the sums of many slices wider, or fixed slices, the fastest plan under that cap has other chunks.
    assert wide_sums or options.chunk_tokens or options.slices or peak == cap
    with pytest.raises(InfeasibleError, match=rf"per rank \({cap - 1} bytes\)"):
        plan(problem(LONG_AND_SHORT, 4, cap - 1), costs, options)


def test_a_cap_on_one_rank_makes_that_rank_recompute():
    free = plan(problem(LONG_AND_SHORT, 4), pipeline(4), Options(slices=24))
    caps = tuple(peak - 5 * GIB if rank == 2 else 2 * peak for rank, peak in enumerate(free.predicted.peak_bytes))
    made = plan(replace(problem(LONG_AND_SHORT, 4), cap_bytes=caps), pipeline(4), Options(slices=24))
    assert [any(again.num_layers for again in row) for row in made.recompute] == [False, False, True, False]


@pytest.mark.parametrize("is_unlike", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_a_backward_rises_as_far_as_walking_through_its_layers_does(seed: int, is_unlike: bool):
    """Three layers of odd sizes, alike or not, and every step on the ladder of recompute."""
    draw = random.Random(seed)
    costs = small_costs(draw, draw.choice([1, 2]))
    own, kv = costs.stages[0], costs.stages[0].kv.bytes_per_token
    whole, linear, *sizes = sorted(draw.randint(0, 20) for _ in range(5))  # a level that recomputes more keeps less
    mlp, attended, layer = (kv + size for size in sizes)
    own = own.changed(
        LAYER,
        count=3,
        bytes_per_token=layer,
        attended_bytes_per_token=draw.choice([None, attended]),
        kv=replace(own.kv, gradient_bytes_per_token=draw.choice([None, 2 * kv])),
        weight_bytes_per_token=(weight := draw.randint(0, 20)),
        apart_bytes_per_token=draw.choice([None, layer + weight // 2]),
        input_bytes_per_token=whole,
        recompute={
            "selective": replace(own.layers.recompute["selective"], bytes_per_token=linear),
            "mlp": replace(
                own.layers.recompute["mlp"], bytes_per_token=mlp, full_bytes_per_token=draw.randint(int(mlp), int(layer))
            ),
        },
    ).changed(INPUT, weight_bytes_per_token=draw.randint(0, 9))
    if is_unlike:
        layers = [unlike_layer(draw, own.layers) for _ in range(3)]
        cached_share = sum(layer.cached_share for layer in layers) / 3
        own = replace(own.changed(LAYER, cached_share=cached_share), unlike=tuple(layers))
    costs, caches = replace(costs, stages=(own,) * len(costs.stages)), [int(at.cached_share) for at in own.unlike] or [1] * 3
    chunks = (Chunk((Segment(0, 0, 25),)), Chunk((Segment(0, 25, 40),)), Chunk((Segment(1, 0, 30),)))
    tables = tabulate(chunks, problem((40, 30), len(costs.stages)), costs, RECOMPUTE_MODES)
    work = work_of(chunks, (40, 30))
    gradient, cache = int(costs.gradient_bytes(0, work)[1]), int(costs.cache_bytes(0, work)[0])
    for c in range(len(chunks)):
        comes = [-(gradient + cache), gradient, 0][c]
        for taken, split in itertools.product(range(int(tables.columns.most[c]) + 1), (False, True)):
            recompute = tables.recompute(0, c, taken)
            assert tables.kept_bytes(0, c, taken) == costs.activation_bytes(0, work, recompute)[c]
            start = most = tables.kept_bytes(0, c, taken)
            stays = int(costs.layer_weight_bytes(0, work)[c]) if split else 0
            held = start - int(costs.head_bytes(0, work)[c])
            held += int(costs.weight_bytes(0, work)[c]) - 3 * stays if split else 0
            for layer in reversed(range(3)):
                which = recompute.mode(layer), layer if is_unlike else None
                kept, peak = costs.layer_bytes(0, work, *which), costs.layer_peak_bytes(0, work, *which, split=split)[0]
                most = max(most, held + int(peak[c] - kept[c]))
                held += caches[layer] * comes // max(1, sum(caches)) - int(kept[c]) + stays
            left = tables.passes[0].backward_residual[c] + (tables.passes[0].weight_bytes[c] if split else 0)
            assert getattr(tables.passes[0].ways, "split" if split else "whole")[c, taken] == max(most, left)


def unlike_layer(draw: random.Random, mean: BlockCosts) -> BlockCosts:
    """Return a layer that keeps no less than that, with a window or a state if it caches nothing."""
    more = draw.randint(0, 30)
    modes = {name: replace(mode, bytes_per_token=mode.bytes_per_token + more // 2) for name, mode in mean.recompute.items()}
    sizes = {"bytes_per_token": mean.bytes_per_token + more, "recompute": modes, "apart_bytes_per_token": None}
    return replace(mean, count=1, cached_share=float(draw.randint(0, 1)), **sizes)


def test_attention_is_not_run_again_where_that_would_cost_most():
    """One long sequence under a cap: with all levels little is recomputed whole, and the plan is faster."""
    free = plan(problem((65536,), 2), pipeline(2), Options(slices=8))
    given = problem((65536,), 2, (max(free.predicted.peak_bytes) + max(free.static_bytes)) // 2)
    every, whole = (plan(given, pipeline(2), Options(slices=8, recompute_modes=modes)) for modes in ("all", "full"))
    counts = [sum(again.full for row in made.recompute for again in row) for made in (every, whole)]
    assert counts[0] < counts[1] / 4
    assert sum(again.selective + again.mlp for row in every.recompute for again in row) > 0
    assert not any(again.selective or again.mlp for row in whole.recompute for again in row)
    assert every.predicted.makespan_us < 0.97 * whole.predicted.makespan_us


@pytest.mark.slow  # ten seconds of planning
def test_four_million_tokens_are_planned_for_64_stages():
    """A sequence of 4M tokens on devices of 141 GB, eight ways each of tensor and context parallelism."""
    flags = load_flags("llama3-70b") | {"tensor_model_parallel_size": 8, "context_parallel_size": 8, "sequence_parallel": True}
    cluster = load_cluster("h200x8")
    profile = analytic_profile(shape_of(flags), cluster.rates)
    costs = profile.costs(balanced_layers(profile, 80, 64))
    assert cluster.device_memory_gb is not None
    made = plan(problem((1 << 22,), 64, int(0.9 * cluster.device_memory_gb * GIB), token_multiple=64), costs)
    assert check(made) == []
    assert max(made.predicted.peak_bytes) <= 0.9 * cluster.device_memory_gb * GIB
