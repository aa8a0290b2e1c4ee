"""Offload ahead of need, of activations, keys and values; and actions in one step whose exchanges are overlapped."""

import random
import re
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product

import numpy as np
import pytest

from megatron_epp.contrib.overlap.joined import JoinedDecisions
from megatron_epp.contrib.overlap.pairing import WITH_FORWARDS, WITH_WEIGHTS
from megatron_epp.contrib.papers.spacing import SPLIT_UNITS, Spacing, whole_backwards
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime, work_of
from megatron_epp.features.copies.ahead import fit_ahead, longest_lived_shares
from megatron_epp.features.local_search.improvement import improve
from megatron_epp.mcore.arguments.table import TRAINING
from megatron_epp.plan import Chunk, InfeasibleError, Op, Plan, Segment, Step
from megatron_epp.plan.document import digest
from megatron_epp.plan.kv_offload import HOST_UNIT_BYTES, host_peak_bytes, slices_in
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check
from megatron_epp.plan.recompute import FULL_ONLY
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.units import enough_gib
from megatron_epp.planner import Options, Problem, elastic_1f1b, plan
from megatron_epp.planner.assemble import build_plan
from megatron_epp.planner.evaluate import play
from megatron_epp.planner.fit import held_bytes, peaks_of
from megatron_epp.planner.fitted import fitted, for_table
from megatron_epp.planner.kernels.codes import encode
from megatron_epp.planner.memory.kv_offload_tables import with_kv_offload
from megatron_epp.planner.memory.offload import Copied, peaks_with_copies, timed
from megatron_epp.planner.order import slice_groups
from megatron_epp.planner.result import greedy
from megatron_epp.planner.tables import Tables, tabulate
from megatron_epp.tools.formulas import H100, analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_flags, shape_of
from megatron_epp.tools.report.text import summary
from tests.pure.test_plan_memory import random_costs
from tests.support.plan.campaign import faults_of_answer
from tests.support.plan.campaign_cases import Case
from tests.support.plan.planner_cases import GIB, least_cap_bytes, pipeline, problem, web_lengths
from tests.support.plan.stages import stage_of
from tests.support.seeds import some_by_default, spread_by_default

OFFLOAD = Options(offload=True)
FIXED = Options(slices=24)
FIXED_ON = replace(FIXED, offload=True)


def slices(sequence: int, *ends: int) -> tuple[Chunk, ...]:
    return tuple(Chunk((Segment(sequence, start, end),)) for start, end in zip((0, *ends), ends, strict=False))


def pencil(per_pair_us: float) -> PipelineCosts:
    """Two layers, two heads, so four pieces of 5 bytes per token; the gradient has twice that. A byte takes a microsecond."""
    lines = {"forward": LinearTime(per_pair_us=per_pair_us), "backward": LinearTime(per_pair_us=2 * per_pair_us)}
    kv = {"kv_bytes_per_token": 10.0, "kv_gradient_bytes_per_token": 20.0, "kv_heads": 2}
    stage = stage_of(num_layers=2, layer_bytes_per_token=50.0, recomputed_layer_bytes_per_token=10.0, **lines, **kv)
    return PipelineCosts("pencil", (stage,), 1.0, host_latency_us=0.5, host_us_per_byte=1.0)


def test_what_streaming_takes_beyond_attention():
    """Slices of 4, 2 and 2 tokens. A copy of keys and values of n tokens of a piece is 5 n bytes and 1 us of latency."""
    work = work_of(slices(0, 4, 6, 8), (8,))
    found = pencil(0.0).kv_offload_costs(0, work)
    # In: the 0, 4 or 6 tokens before; out: the slice's own. Four pieces, and the first in and the last out once more.
    assert found.forward_us.tolist() == [5 * 21, 5 * (21 + 11), 5 * (31 + 11)]
    # In: keys and values up to the slice's end, and but for the last slice as much gradient; out: the gradient before it.
    assert found.backward_us.tolist() == [5 * (21 + 41), 5 * (31 + 61 + 41), 5 * (41 + 61)]
    assert found.again_us.tolist() == [0, 2 * 21, 2 * 31]
    assert pencil(0.0).kv_offload_costs(0, work, 2.0).forward_us.tolist() == (2 * found.forward_us).tolist()
    hidden = pencil(1e6).kv_offload_costs(0, work)
    assert (hidden.forward_us.tolist(), hidden.again_us.tolist()) == ([21, 21 + 11, 31 + 11], [0, 0, 0])


def test_what_is_on_the_device_and_at_the_host():
    found = pencil(0.0).kv_offload_costs(0, work_of((*slices(0, 4, 8), Chunk((Segment(1, 0, 3),))), (8, 3)))
    assert found.forward_bytes.tolist() == [2 * 5 * 8, 2 * 5 * 8, 0]
    assert found.backward_bytes.tolist() == [(2 * 5 + 10) * 8, (2 * 5 + 10) * 8, 0]
    assert (found.cache_bytes[0], found.gradient_bytes[0]) == (2 * 10 * 8, 2 * 20 * 8)
    assert found.forward_us[2] == found.backward_us[2] == 0


@pytest.mark.parametrize("seed", range(12))
def test_plans_with_anything_hosted_are_sound_and_their_account_adds_up(seed: int):
    draw = random.Random(seed)
    stages = draw.randint(1, 3)
    costs = random_costs(draw, stages)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 5))] + [draw.randint(200, 900), draw.randint(150, 300)]
    asked = problem(lengths, stages, forward_only=seed == 5, token_multiple=draw.choice([1, 4]))
    options = Options(slices=draw.randint(2, 5), split_weight=seed % 2 == 0, recompute=draw.choice(["auto", 1]))
    made = for_table(plan(asked, costs, options).chunks, asked, costs, options)
    pairs = list(product(range(stages), slices_in(made.chunks, asked.lengths)))
    made = replace(made, kv_offload=frozenset(draw.sample(pairs, draw.randint(1, len(pairs)))))
    built = build_plan(asked, costs, options, made)
    assert check(built) == []
    assert built.predicted.makespan_us == pytest.approx(made.makespan_us(asked, costs), rel=1e-12)
    assert list(faults_of_answer(Case(asked, costs, options), (built,))) == []


def test_tokens_that_are_not_trained_pass_no_output_layer_with_kv_offload_either():
    costs, chunks = pipeline(2, vocab_size=128_000), slices(0, 10_000, 20_000, 30_000)

    def more_us(trained: tuple[tuple[int, ...], ...]) -> list[float]:
        asked = problem([30_000], 2, trained=trained)
        bare = tabulate(chunks, asked, costs)
        hosted = with_kv_offload(bare, chunks, asked, costs, FULL_ONLY, frozenset({(1, 0)}))
        return [after - before for after, before in zip(hosted.passes[1].forward_us, bare.passes[1].forward_us, strict=True)]

    assert more_us(((3_000,),)) == pytest.approx(more_us(()))


BATCHES = some_by_default("lengths", [[400_000], [200_000, 150_000, 3_000, 900], [200_000, 3_000]], 2)


@BATCHES
def test_it_fits_where_nothing_else_does_and_within_the_host(lengths: list[int]):
    costs = replace(pipeline(2), offloadable_share=0.0)  # no activation can leave
    cap = int(0.85 * least_cap_bytes(problem(lengths, 2), costs, FIXED))
    with pytest.raises(InfeasibleError):
        plan(problem(lengths, 2, cap), costs, FIXED)
    made = plan(problem(lengths, 2, cap, host_cap_bytes=100 * GIB), costs, FIXED_ON)
    assert made.kv_offload
    assert not any(made.copies)
    assert max(simulate(made).peak_bytes) <= cap
    assert 0 < max(host_peak_bytes(made)) <= 100 * GIB
    assert "KV offload of" in summary(made)
    assert digest(made) == digest(plan(problem(lengths, 2, cap, host_cap_bytes=100 * GIB), costs, FIXED_ON))


def named_host_bytes(error: Exception) -> int:
    """The host memory that an infeasibility message names."""
    (found,) = re.findall(r"GiB \((\d+) bytes\) in host memory", str(error))
    return int(found)


@BATCHES
@some_by_default("offloadable_share", [0.0, 0.9], 1)
def test_where_the_host_has_too_little_the_error_names_what_would_do(lengths: list[int], offloadable_share: float):
    costs, host = replace(pipeline(2), offloadable_share=offloadable_share), GIB // 8
    cap = int(0.9 * least_cap_bytes(problem(lengths, 2), costs, FIXED))
    with pytest.raises(InfeasibleError) as refused:
        plan(problem(lengths, 2, cap, host_cap_bytes=host), costs, FIXED_ON)
    assert f"GiB ({host} bytes)" in str(refused.value).split("in host memory, where it may have ")[1]
    wanted = named_host_bytes(refused.value)
    assert f"or --epp-host-memory-gb to {enough_gib(wanted)}" in refused.value.text(TRAINING)
    assert max(host_peak_bytes(plan(problem(lengths, 2, cap, host_cap_bytes=wanted), costs, FIXED_ON))) <= wanted
    with pytest.raises(InfeasibleError) as refused:
        plan(problem(lengths, 2, cap, host_cap_bytes=wanted - HOST_UNIT_BYTES), costs, FIXED_ON)
    assert named_host_bytes(refused.value) == wanted


def test_where_more_at_the_host_would_not_help_the_error_does_not_ask_for_it():
    costs = pipeline(2)
    with pytest.raises(InfeasibleError, match="Raise cap_bytes to") as refused:
        plan(problem([60_000], 2, sum(costs.static_items(0).values()) // 2, host_cap_bytes=GIB), costs, FIXED_ON)
    assert "host" not in str(refused.value)


def test_local_search_which_knows_nothing_of_the_host_leaves_such_plans_alone_where_its_memory_is_bounded():
    costs, options = pipeline(2), Options(steps=2000)
    asked = problem([60_000, 50_000, 9_000, 900], 2)
    chunks = plan(asked, costs, Options(slices=3)).chunks
    made = fitted(elastic_1f1b(chunks, 2, forward_only=False), chunks, asked, costs, options)
    made = replace(made, kv_offload=frozenset({(0, 0), (1, 1)}))
    tables = made.tables(asked, costs)
    assert improve(made, tables, asked, options) != made
    assert improve(made, tables, replace(asked, host_cap_bytes=GIB), options) == made


def test_where_memory_suffices_or_nobody_asked_nothing_is_hosted():
    costs = pipeline(2)
    assert not plan(problem([60_000, 500], 2), costs, OFFLOAD).kv_offload
    cap = 2 * least_cap_bytes(problem([60_000], 2), costs, Options())
    assert not plan(problem([60_000], 2, cap), costs, Options()).kv_offload
    assert not plan(problem([60_000], 2, cap), replace(costs, host_us_per_byte=np.inf), OFFLOAD).kv_offload


@pytest.mark.parametrize("slices", [1, 8])
@pytest.mark.parametrize("seed", range(2))
def test_no_copies_make_more_slices_than_the_user_fixed(slices: int, seed: int):
    draw = random.Random(seed)
    costs, lengths = pipeline(2), [draw.randint(40_000, 80_000), *(draw.randint(1, 9_000) for _ in range(4))]
    options = Options(slices=slices, offload=True)
    least = least_cap_bytes(problem(lengths, 2), costs, options)
    for share in (1.0, 1.05, 1.3):
        made = plan(problem(lengths, 2, int(share * least), host_cap_bytes=900 * GIB), costs, options)
        assert sum(part.sequence == 0 for chunk in made.chunks for part in chunk.segments) <= slices


RANKS = 4
PLACEMENT = Placement("looped", RANKS, 2)


def costs_of() -> PipelineCosts:
    shape = shape_of(load_flags("llama3-8b") | {"num_layers": 16})
    return on_device(analytic_profile(shape, H100).costs([2] * 8, state_bytes_per_parameter=7.5))


def batch(count: int, cap_bytes: int = 1) -> Problem:
    return Problem((8192,) * count, PLACEMENT.rank_of, (cap_bytes,) * RANKS)


def even(count: int, weights: bool) -> tuple[Problem, Tables, tuple, list[int]]:
    """An even order of whole sequences, and what each rank holds without copies."""
    asked, costs = batch(count), costs_of()
    chunks = plan(replace(asked, cap_bytes=(1 << 50,) * RANKS), costs, Options(slices=1)).chunks
    tables = tabulate(chunks, asked, costs, OFFLOAD.modes(costs.recompute_modes))
    spaced = Spacing.of(RANKS, 2, 1, SPLIT_UNITS).order if weights else partial(whole_backwards, units=SPLIT_UNITS)
    order, none = spaced(slice_groups(chunks), PLACEMENT), [[0] * len(chunks)] * 8
    return asked, tables, order, peaks_of(held_bytes(encode(order, len(chunks)), tables, none))


def fitted_ahead(tables: Tables, order: tuple, caps: list[int], room: int = 1 << 50, limit_us: float = 1e18) -> Copied | None:
    return fit_ahead(order, tables, caps, [room] * RANKS, longest_lived_shares(tables), limit_us)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("share", "recomputes"), [(0.6, True), (0.7, True), (0.95, False)])
def test_ranks_are_within_their_caps_with_copies_and_recompute(weights: bool, share: float, recomputes: bool):
    _, tables, order, peaks = even(8, weights)
    caps = [static + int(share * (peak - static)) for static, peak in zip(tables.static, peaks, strict=True)]
    found = fitted_ahead(tables, order, caps)
    (made,) = found.offloads
    played = play(order, tables, made.recompute_steps, timed(made, tables))
    assert played.makespan_us == found.makespan_us
    assert all(peak <= cap for peak, cap in zip(peaks_with_copies(order, tables, made, played), caps, strict=True))
    assert any(made.copies)
    assert any(map(any, made.recompute_steps)) == recomputes


def test_without_a_cap_the_longest_lived_are_copied_first_what_the_host_lacks_is_told_and_a_limit_is_held():
    _, tables, order, peaks = even(8, weights=False)
    free = fitted_ahead(tables, order, peaks)
    (made,) = free.offloads
    assert not any(map(any, made.recompute_steps))
    for first, second in tables.stages_of:
        assert sum(made.shares[first]) >= sum(made.shares[second])
        assert any(made.shares[first])
    assert free.short_bytes == 0
    assert fitted_ahead(tables, order, peaks, room=max(free.offloads[0].most_away(tables)) - 5).short_bytes == 5
    assert fitted_ahead(tables, order, peaks, limit_us=free.makespan_us) is None
    assert fitted_ahead(tables, order, peaks, limit_us=free.makespan_us + 1) == free


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
    most = max(host_peak_bytes(free)) // 2
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
    assert (check(made), any(made.copies)) == ([], copies)


def test_the_more_is_hosted_the_less_the_device_holds_and_the_longer_it_takes():
    costs, asked = pipeline(2), problem([300_000, 5_000], 2)
    plain = for_table(plan(asked, costs, Options(slices=40)).chunks, asked, costs, Options())
    hosted = [set(), {(0, 0)}, {(0, 0), (1, 0)}]
    built = [build_plan(asked, costs, Options(), replace(plain, kv_offload=frozenset(pairs))).predicted for pairs in hosted]
    peaks, times = [made.peak_bytes for made in built], [made.makespan_us for made in built]
    assert peaks[0][0] > peaks[1][0] == peaks[2][0]
    assert peaks[0][1] == peaks[1][1] > peaks[2][1]
    assert times[0] <= times[1] <= times[2] < 1.1 * times[0]
    assert max(made.lower_bound_us for made in built) <= times[0]  # what streaming takes can be spared


ASKED = Options(overlap_exchanges=True)


def tensor_parallel_costs(tensor_parallel: int, stages: int = RANKS, shares: tuple[float, ...] = ()) -> PipelineCosts:
    shape = shape_of(load_flags("llama3-8b") | {"num_layers": 16, "tensor_model_parallel_size": tensor_parallel})
    layers = [16 // stages] * stages
    return analytic_profile(shape, H100).costs(layers, state_bytes_per_parameter=7.5, vocabulary_shares=shares)


def joined(made: Plan) -> list[Step]:
    return [step for step in chain.from_iterable(made.ranks) if step.also]


EQUAL, SKEWED = (8192,) * 24, (30000, 9000, 5000, *[900] * 40)
SPLIT, SEARCHED = Options(split_weight=True), Options(steps=50)


CASES = [(EQUAL, Options()), (SKEWED, SPLIT), (SKEWED, SEARCHED), (SKEWED, Options()), (EQUAL, SPLIT), (EQUAL, SEARCHED)]


@some_by_default(("lengths", "options"), CASES, 2)
def test_steps_of_two_actions_make_a_plan_of_tensor_parallel_ranks_faster(lengths: tuple[int, ...], options: Options):
    asked, costs = problem(lengths, RANKS, 40 * GIB), tensor_parallel_costs(8)
    plain, made = (plan(asked, costs, replace(options, overlap_exchanges=on)) for on in (False, True))
    assert not joined(plain)
    kinds = {tuple(action.op for action in step.actions) for step in joined(made)}
    assert (Op.B, Op.F) in kinds
    assert kinds <= {*WITH_WEIGHTS, *WITH_FORWARDS}
    assert not any({*pair} <= {Op.B, Op.W} for pair in (*WITH_WEIGHTS, *WITH_FORWARDS)), "autograd has one thread for a device"
    assert made.predicted.makespan_us < (0.98 if options.split_weight else 0.95) * plain.predicted.makespan_us
    assert check(made) == []


def test_weight_gradients_are_joined_with_forwards_where_these_have_no_backward_in_front():
    asked = Problem((8192,) * 24, Placement("v", RANKS, 2).rank_of, (80 * GIB,) * RANKS)
    made = plan(asked, tensor_parallel_costs(8, 8), replace(ASKED, split_weight=True))
    assert {(Op.B, Op.F), (Op.W, Op.F)} <= {tuple(action.op for action in step.actions) for step in joined(made)}
    assert check(made) == []


def test_slices_of_one_sequence_are_no_step():
    made = plan(problem(SKEWED, RANKS, 40 * GIB), tensor_parallel_costs(8), replace(ASKED, chunk_tokens=30000))
    steps = [step.actions for step in joined(made)]
    assert steps
    group_of = {c: number for number, group in enumerate(slice_groups(made.chunks)) for c in group}
    assert all(group_of[one.chunk] != group_of[two.chunk] for one, two in steps if one.op is two.op)


def test_without_tensor_parallel_ranks_and_in_an_evaluation_nothing_is_joined():
    asked = problem((9000, 8000, 3000, 2500), RANKS)
    assert plan(asked, tensor_parallel_costs(1), ASKED) == plan(asked, tensor_parallel_costs(1))
    evaluation = replace(asked, forward_only=True)
    assert plan(evaluation, tensor_parallel_costs(8), ASKED) == plan(evaluation, tensor_parallel_costs(8))


@spread_by_default(3, kind=("looped", "v"), share=(1.2, 2.0), seed=range(3))
def test_plans_under_caps_are_no_slower_and_within_them(kind: str, share: float, seed: int):
    placement = Placement(kind, RANKS, 2).rank_of  # type: ignore[arg-type]
    costs = tensor_parallel_costs(4, 8)
    batch = Problem(web_lengths(24, seed, longest=20000), placement, (1,) * RANKS)
    asked = replace(batch, cap_bytes=(int(share * least_cap_bytes(batch, costs, Options())),) * RANKS)
    plain, made = plan(asked, costs), plan(asked, costs, ASKED)
    assert any(map(any, plain.recompute_us)) or kind == "v" or share == 2.0, "the cap binds"
    assert joined(made) or share < 2 or kind == "v"
    assert made.predicted.makespan_us <= plain.predicted.makespan_us
    assert max(made.predicted.peak_bytes) <= asked.cap_bytes[0]
    assert check(made) == []


def test_backwards_that_would_wait_for_a_forwards_input_stay_alone():
    asked = Problem(web_lengths(40, 5, longest=20000), Placement("looped", RANKS, 2).rank_of, (80 * GIB,) * RANKS)
    costs = tensor_parallel_costs(4, 8)
    made = greedy(asked, costs, ASKED)
    every = frozenset(pair for row in made.order for pair in pairwise(row) if (pair[0].op, pair[1].op) == (Op.B, Op.F))
    assert isinstance(made, JoinedDecisions)
    assert made.joined < every
    slower = fitted(made.order, made.chunks, asked, costs, Options(), partial(JoinedDecisions, joined=every))
    assert made.makespan_us(asked, costs) < slower.makespan_us(asked, costs)


def test_shards_of_the_vocabulary_stand_between_the_steps():
    asked, costs = problem((8192,) * 24, RANKS, 60 * GIB), tensor_parallel_costs(8, shares=(0.25,) * RANKS)
    plain, made = plan(asked, costs), plan(asked, costs, ASKED)
    assert joined(made)
    assert any(step.action.op is Op.S for step in made.ranks[0])
    assert made.predicted.makespan_us < plain.predicted.makespan_us
    assert check(made) == []


def test_the_exact_planner_leaves_steps_of_two_actions_as_they_are():
    pytest.importorskip("ortools", reason="the exact planner needs OR-tools: pip install 'megatron-epp[milp]'")
    asked, costs = problem((4096,) * 8, 2), tensor_parallel_costs(8, 2)
    made = plan(asked, costs, ASKED)
    assert joined(made)
    assert plan(asked, costs, replace(ASKED, planner="milp")).ranks == made.ranks
