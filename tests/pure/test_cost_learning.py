"""Costs learnt from measured iterations, also of an output layer in shards or by blocks: their times, bytes and errors."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product

import pytest

from megatron_epp.cost.blocks import HEAD, INPUT, StageCosts
from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.cost.memory import WORKING, Static
from megatron_epp.cost.output_layer import PASS_US, VocabularyShards
from megatron_epp.cost.whole_microbatches import of_whole_microbatches, with_static
from megatron_epp.cost.work import LinearTime, causal_pairs, work_of
from megatron_epp.features.learnt_costs.learner import Learner, deviation, fitted_costs, size_of
from megatron_epp.features.learnt_costs.timed import Learnt, Timed, fitted_line, undetermined
from megatron_epp.features.trees.tree_work import work_of_tree
from megatron_epp.plan import NO_RECOMPUTE, UNLIMITED_BYTES, Action, Chunk, Op, Plan, Recompute, Segment
from megatron_epp.plan.chunk import NOTHING_BORROWED, Borrowed
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.serialize import load
from megatron_epp.plan.sizing import BLOCK_BYTES, loss_block_tokens, loss_workspace_bytes
from megatron_epp.planner import plan
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_flags, shape_of
from tests.support.plan.small_plans import one_f_one_b

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=128)
FORMULAS = analytic_profile(SHAPE, CPU).costs((2, 2))
FORWARD = {0: LinearTime(100.0, 2.0, 0.01), 1: LinearTime(50.0, 1.0, 0.0)}
BACKWARD = {0: LinearTime(200.0, 4.0, 0.02), 1: LinearTime(80.0, 3.0, 0.01)}
WEIGHT = {0: LinearTime(10.0, 1.0, 0.0), 1: LinearTime(20.0, 0.5, 0.0)}
SIZES = (64, 500, 1000, 3000)


def plan_of(sizes: tuple[int, ...] = SIZES, recompute: Recompute = NO_RECOMPUTE) -> Plan:
    chunks = tuple(Chunk((Segment(number, 0, length),)) for number, length in enumerate(sizes))
    rows = ((recompute,) * len(sizes),) * 2
    return replace(one_f_one_b(), lengths=sizes, chunks=chunks, recompute=rows)


def events(plan, stage, scale=1.0, split=False):
    """Events of an iteration that took `scale` times as long as `FORWARD`, `BACKWARD` and, if split, `WEIGHT` say."""
    found, now = [], 0.0
    for op, lines in ((Op.F, FORWARD), (Op.B, BACKWARD), (Op.W, WEIGHT))[: 3 if split else 2]:
        for chunk in range(len(SIZES)):
            took = scale * lines[stage].time_us(*size_of(plan, chunk))
            found.append((f"{stage}{op}{chunk}", now, now + took, None))
            now += took
    return tuple(found)


def warm_learner(plan):
    learner = Learner()
    for _ in range(WARM_UP):
        learner.add(plan, (), {})
    return learner


def learnt(scales=(1.0,) * RECORDED, kept_per_token=0, split=False):
    plan, found = plan_of(), []
    for rank in (0, 1):
        learner = warm_learner(plan)
        for scale in scales:
            kept = {
                (op, rank, chunk): kept_per_token * size_of(plan, chunk)[0] // (1 if op is Op.F else 4)
                for op in (Op.F, Op.W)[: 2 if split else 1]
                for chunk in range(len(SIZES))
            }
            learner.add(plan, events(plan, rank, scale, split), kept if kept_per_token else {}, 7, 0.75 - rank / 4)
        found.append(learner.learnt)
    return fitted_costs(FORMULAS, found)


SOME = ((64, 2080), (700, 245_350), (3000, 4_501_500))


def same(found: LinearTime, expected: LinearTime) -> bool:
    return all(found.time_us(*size) == pytest.approx(expected.time_us(*size)) for size in SOME)


@pytest.mark.parametrize("stage", [0, 1])
def test_times_are_those_that_were_measured(stage):
    own = learnt().stages[stage]
    assert same(own.line("forward"), FORWARD[stage])
    assert same(own.line("backward"), BACKWARD[stage])


@pytest.mark.parametrize("stage", [0, 1])
def test_weight_gradients_of_their_own_are_a_part_of_the_backward(stage):
    costs = learnt(kept_per_token=20_000, split=True)
    own = costs.stages[stage]
    assert same(own.line("weight"), WEIGHT[stage])
    assert same(own.line("backward"), BACKWARD[stage] + WEIGHT[stage])
    assert own.layers.weight_bytes_per_token * own.num_layers == pytest.approx(5_000)
    assert costs.splits_weight
    assert not learnt().splits_weight


def test_times_of_spans_are_those_of_as_many_tokens():
    plan, more = plan_of(), [0, 2000, 100, 700]

    def slower(rank):
        """Events in which spans take the first rank's passes as long as more tokens."""
        for text, start_us, end_us, _ in events(plan, rank):
            line, chunk = (FORWARD if text[1] == "F" else BACKWARD)[rank], int(text[2:])
            yield text, start_us, end_us + line.per_token_us * more[chunk] * (rank == 0), None

    learners = [warm_learner(plan) for _ in range(2)]
    for rank, learner in enumerate(learners):
        for _ in range(RECORDED):
            learner.add(plan, tuple(slower(rank)), {}, span_tokens=more.__getitem__)
    costs = fitted_costs(FORMULAS, [learner.learnt for learner in learners])
    for stage in (0, 1):
        assert same(costs.stages[stage].line("forward"), FORWARD[stage])


def test_copies_of_keys_and_values_are_as_much_slower_as_tokens_are_and_count_once():
    """Passes of a group with one prompt take three times as long as by formula, copies too."""
    base = replace(FORMULAS, copy_us_per_byte=0.01)
    prompt, lengths = 300, (700, 400, 350, 320, 310, 500)
    shared = (NOTHING_BORROWED, *(Borrowed(0, prompt) for _ in lengths[1:]))
    made = plan(Problem(lengths, (0, 1), (UNLIMITED_BYTES,) * 2, borrowed=shared), base, Options(chunks=3, shares=True))
    work, found, passes = (
        work_of_tree(made.chunks, made, lengths),
        list[Learnt](),
        ((Op.F, "forward_us"), (Op.B, "backward_us")),
    )
    for rank in (0, 1):
        learner = warm_learner(made)
        took_us = {f"{rank}{op}{c}": 3 * us for op, of in passes for c, us in enumerate(getattr(base, of)(rank, work).tolist())}
        learner.add(made, [(action, 0.0, us, None) for action, us in took_us.items()], {})
        found.append(learner.learnt)
    costs = fitted_costs(base, found)
    assert costs.copy_us_per_byte == pytest.approx(0.03, rel=0.01)
    for rank, (_, of) in product((0, 1), passes):
        assert getattr(costs, of)(rank, work) == pytest.approx(3 * getattr(base, of)(rank, work), rel=0.01)


def test_the_least_share_of_any_rank_can_be_offloaded():
    assert learnt().offloadable_share == 0.5


def test_one_slow_iteration_does_not_count():
    assert learnt((1.0, 9.0, 1.0)).stages[0].line("forward").time_us(64, 2080) == pytest.approx(FORWARD[0].time_us(64, 2080))


def test_bytes_are_those_that_were_measured():
    for stage in learnt(kept_per_token=20_000).stages:
        assert stage.layers.bytes_per_token * stage.num_layers + stage.ends_bytes_per_token == pytest.approx(20_000)
    assert learnt().stages[0].layers.bytes_per_token == FORMULAS.stages[0].layers.bytes_per_token


def test_a_layer_that_recomputes_keeps_its_input_as_by_formula():
    (stage, _) = learnt(kept_per_token=20_000).stages
    assert stage.layers.input_bytes_per_token == FORMULAS.stages[0].layers.input_bytes_per_token
    assert learnt(kept_per_token=1).stages[0].layers.bytes_per_token == stage.layers.input_bytes_per_token


def test_the_error_of_formulas_is_told_as_a_ratio():
    def slower(stage):
        for name in ("forward", "backward"):
            stage = stage.with_lines(name, *(line.scaled(2) for line in stage.lines(name)))
        return stage

    found = deviation(FORMULAS, replace(FORMULAS, stages=tuple(map(slower, FORMULAS.stages))), SOME)
    assert found[:3] == pytest.approx((2.0, 2.0, 2.0))
    assert (found[3:], str(found)) == ((None, None), "2.00 of the time by formulas (stages 2.00 to 2.00)")


def test_static_bytes_are_changed_by_stage():
    costs = with_static(learnt(), lambda stage, _: Static(weights=5 * stage))
    costs = with_static(costs, lambda _, held: replace(held, buffers=2))
    assert [stage.static_bytes for stage in costs.stages] == [2, 7]


LAYER = LinearTime(20.0, 2.0, 0.01)
OF_LAYERS, OF_BACKWARDS = LAYER.scaled(2), LinearTime(200.0, 9.0, 0.05)


def learner_of(plan: Plan, again_us: LinearTime = LinearTime()) -> Learner:  # noqa: B008 - frozen
    learner, lines = warm_learner(plan), (("F", OF_LAYERS), ("B", OF_BACKWARDS + again_us))
    sizes = [size_of(plan, chunk) for chunk in range(len(plan.chunks))]
    events = [(f"0{op}{chunk}", 0.0, line.time_us(*size), None) for chunk, size in enumerate(sizes) for op, line in lines]
    for _ in range(RECORDED):
        learner.add(plan, events, {})
    return learner


def first_stage(learner: Learner) -> StageCosts:
    formulas = replace(FORMULAS, stages=(only_layers(FORMULAS.stages[0]), FORMULAS.stages[1]))
    return fitted_costs(formulas, [learner.learnt], keeps_weights=True).stages[0]


def only_layers(stage: StageCosts) -> StageCosts:
    return stage.changed(INPUT, HEAD, forward=LinearTime(), backward=LinearTime(), weight=LinearTime())


def test_a_backward_is_learnt_without_the_forward_that_layers_run_again() -> None:
    stage = first_stage(learner_of(plan_of(recompute=Recompute(full=1)), again_us=LAYER))
    assert same(stage.line("forward"), OF_LAYERS)
    assert same(stage.line("backward"), OF_BACKWARDS)
    assert same(stage.layers.forward, LAYER)


def test_other_recompute_modes_change_as_the_forward_does() -> None:
    before, stage = FORMULAS.stages[0].layers.recompute, first_stage(learner_of(plan_of()))
    factors = {name: mode.again.per_token_us / before[name].again.per_token_us for name, mode in stage.layers.recompute.items()}
    assert factors
    assert len({round(factor, 9) for factor in factors.values()}) == 1
    assert factors.popitem()[1] != pytest.approx(1.0, rel=0.1)
    assert of_whole_microbatches(FORMULAS).stages[0].layers.recompute == {}


def test_weight_gradients_that_were_not_split_keep_their_share_of_the_backward() -> None:
    before, after = FORMULAS.stages[0], first_stage(learner_of(plan_of()))
    assert after.line("weight").per_token_us > 0
    assert after.layers.weight == after.layers.weight.within(after.layers.backward)
    assert after.line("weight").per_token_us != pytest.approx(before.line("weight").per_token_us, rel=0.1)


@pytest.mark.parametrize("sizes", [(700,), (700, 900), (700, 800, 900, 1000, 1100)])
def test_nearly_equal_sizes_scale_the_formulas(sizes: tuple[int, ...]) -> None:
    before, stage = only_layers(FORMULAS.stages[0]).layers.forward, first_stage(learner_of(plan_of(sizes)))
    after, size = stage.layers.forward, size_of(plan_of(sizes), 0)
    assert same(after, before.scaled(after.per_token_us / before.per_token_us))
    assert stage.line("forward").time_us(*size) == pytest.approx(OF_LAYERS.time_us(*size), rel=0.15)


def test_a_stage_shares_its_time_between_layers_and_the_rest_as_by_formula() -> None:
    stage = fitted_costs(FORMULAS, [learner_of(plan_of()).learnt]).stages[0]
    before = FORMULAS.stages[0]
    assert before.line_of_ends("forward").per_token_us > 0
    share = before.line_of_ends("forward").per_token_us / before.line("forward").per_token_us
    assert stage.line_of_ends("forward").per_token_us / stage.line("forward").per_token_us == pytest.approx(share)


def test_stages_without_layers_have_their_time_in_the_rest() -> None:
    stage = fitted_costs(analytic_profile(SHAPE, CPU).costs((0, 4)), [learner_of(plan_of()).learnt]).stages[0]
    assert stage.layers.forward == LinearTime()
    assert same(stage.line_of_ends("forward"), OF_LAYERS)


def test_tokens_that_are_not_trained_do_not_make_the_output_layer_seem_fast() -> None:
    plan, last, shares, slowness = plan_of(), FORMULAS.stages[1], (0.1, 1.0, 0.3, 0.0), 1.7
    learner, events = warm_learner(plan), []
    for (op, name), (chunk, share) in product((("F", "forward"), ("B", "backward")), enumerate(shares)):
        tokens, *_ = size = size_of(plan, chunk)
        time_us = last.line(name).time_us(*size) - last.line_of_ends(name).per_token_us * tokens * (1 - share)
        events.append((f"1{op}{chunk}", 0.0, slowness * time_us, None))
    for _ in range(RECORDED):
        learner.add(plan, events, {}, output_share=shares.__getitem__)
    found = fitted_costs(FORMULAS, [learner.learnt], keeps_weights=True).stages[1]
    assert same(found.line("forward"), last.line("forward").scaled(slowness))
    assert same(found.line("backward"), last.line("backward").scaled(slowness))
    assert found.line_of_ends("forward").per_token_us == pytest.approx(slowness * last.line_of_ends("forward").per_token_us)


def equal_in_time(line: LinearTime, length: int, count: int) -> list[tuple[int, int]]:
    """Starts and ends of slices of a sequence that take equal times."""

    def us(end: int) -> float:
        return line.time_us(end, causal_pairs(0, end))

    ends = [min(range(length + 1), key=lambda end: abs(us(end) - us(length) * part / count)) for part in range(1, count)]
    return [*pairwise([0, *ends, length])]


@pytest.mark.parametrize("seed", range(5))
def test_slices_that_take_equal_times_do_not_make_tokens_look_free(seed: int) -> None:
    """Any mixture of times per slice, token and pair goes through their times, so noise would choose one."""
    noise, truth = random.Random(seed), OF_LAYERS.scaled(1.5)
    slices = [(end - start, causal_pairs(start, end)) for start, end in equal_in_time(OF_LAYERS, 4000, 8)]
    times = [Timed(*size, truth.time_us(*size) * noise.uniform(0.9, 1.1)) for size in slices * RECORDED]
    line = fitted_line(OF_LAYERS, times)
    for start, end in equal_in_time(OF_LAYERS, 4000, 2):
        size = end - start, causal_pairs(start, end)
        assert line.time_us(*size) == pytest.approx(truth.time_us(*size), rel=0.1)


def test_it_is_told_which_times_the_batches_do_not_tell() -> None:
    cut = [(end - start, causal_pairs(start, end)) for start, end in equal_in_time(OF_LAYERS, 4000, 8)]
    assert undetermined(OF_LAYERS, [Timed(*size, 1.0) for size in cut]) == ("fixed time",)
    assert undetermined(OF_LAYERS, [Timed(700, 250_000, 1.0)]) == ("fixed time", "time per token", "time per pair")
    assert undetermined(OF_LAYERS, [Timed(size, causal_pairs(0, size), 1.0) for size in SIZES]) == ()
    assert undetermined(OF_LAYERS, []) == ()


OF_SHARDS = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=5000)
SHARES = (0.25, 0.75)
SHARDED = analytic_profile(OF_SHARDS, CPU).costs((2, 2), vocabulary_shares=SHARES)
WHOLE = {Op.S: LinearTime(400.0, 3.0), Op.T: LinearTime(100.0, 1.5)}
MOVED = {Op.SPREAD: LinearTime(30.0, 0.2), Op.GATHER: LinearTime(80.0, 0.4)}
FEW = (700, 900)

Disturbance = Callable[[float], float]


def measured(
    sizes: tuple[int, ...] = SIZES,
    disturbed: Disturbance = lambda time_us: time_us,
    share: Callable[[int], float] | None = None,
    slowness: tuple[float, float] = (1.0, 1.0),
    pipeline: int = 0,
) -> list[Learnt]:
    """Measurements of two ranks whose shards take `WHOLE` and whose collectives take `MOVED`; one of them enters earlier.

    Args:
        share: of a chunk's tokens that pass the output layer; None for all.
        slowness: factor of each rank's passes.
    """
    plan, learners = plan_of(sizes), [Learner(learnt=Learnt(pipeline=pipeline)) for _ in SHARES]
    for iteration in range(WARM_UP + RECORDED):
        for rank, learner in enumerate(learners):
            events, collectives = [], []
            for chunk, size in enumerate(sizes):
                tokens = size * (1.0 if share is None else share(chunk))
                for op, line in WHOLE.items():
                    time_us = slowness[rank] * (PASS_US + SHARES[rank] * line.time_us(tokens, 0))
                    events.append((f"{rank}{op}{chunk}", 0.0, disturbed(time_us), None))
                for op, line in MOVED.items():
                    waits_us = 5000.0 * ((iteration + chunk + rank) % 2)
                    collectives.append((Action(op, rank, chunk), waits_us + disturbed(line.time_us(tokens, 0))))
            is_recording = iteration >= WARM_UP
            learner.add(plan, events if is_recording else (), {}, 0, None, share, collectives if is_recording else ())
    return [learner.learnt for learner in learners]


def fitted(everyone: list[Learnt]) -> VocabularyShards:
    shards = fitted_costs(SHARDED, everyone, keeps_weights=True).vocabulary
    assert shards is not None
    return shards


def lines(shards: VocabularyShards) -> dict[Op, LinearTime]:
    return {Op.S: shards.logits, Op.T: shards.gradient, Op.SPREAD: shards.spread, Op.GATHER: shards.gather}


def check_times(shards: VocabularyShards, rel: float, sizes: tuple[int, ...] = SIZES) -> None:
    """Compare times of every rank's passes, and of collectives, with those that were measured."""
    for tokens in sizes:
        for op, line in WHOLE.items():
            for rank, share in enumerate(SHARES):
                own_us = shards.of_shard(lines(shards)[op], rank).time_us(tokens, 0)
                assert own_us == pytest.approx(PASS_US + share * line.time_us(tokens, 0), rel=rel), (op, rank, tokens)
        for op, line in MOVED.items():
            assert lines(shards)[op].time_us(tokens, 0) == pytest.approx(line.time_us(tokens, 0), rel=rel), (op, tokens)


def noisy(draw: random.Random) -> Disturbance:
    return lambda time_us: time_us * draw.uniform(0.9, 1.1)


def sometimes_long(draw: random.Random) -> Disturbance:
    return lambda time_us: time_us * (50.0 if draw.random() < 0.1 else 1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("disturbing", "rel"), [(noisy, 0.12), (sometimes_long, 1e-6)])
def test_times_are_those_that_were_measured_without_what_disturbed_them(
    seed: int, disturbing: Callable[[random.Random], Disturbance], rel: float
) -> None:
    check_times(fitted(measured(disturbed=disturbing(random.Random(seed)))), rel)


def test_shares_and_bytes_stay() -> None:
    found, before = fitted(measured()), SHARDED.vocabulary
    assert before is not None
    times = {"logits", "gradient", "spread", "gather"}
    assert replace(found, **{name: getattr(before, name) for name in times}) == before


def test_few_sizes_scale_the_formulas() -> None:
    before, found = SHARDED.vocabulary, fitted(measured(FEW))
    check_times(found, rel=0.25, sizes=FEW)
    assert found.spread == before.spread.scaled(found.spread.per_token_us / before.spread.per_token_us)


def test_tokens_that_are_not_trained_are_left_out() -> None:
    check_times(fitted(measured(share=(0.5, 1.0, 0.3, 0.5).__getitem__)), rel=1e-6)


def test_the_slowest_rank_counts() -> None:
    found = fitted(measured(slowness=(1.0, 1.5)))
    for op, line in WHOLE.items():
        own_us = found.of_shard(lines(found)[op], 1).time_us(1000, 0)
        assert own_us == pytest.approx(1.5 * (PASS_US + SHARES[1] * line.time_us(1000, 0)))


def test_each_replica_has_collectives_of_its_own() -> None:
    """A replica that is slower does not make a rank of the other wait."""
    found = fitted(measured() + measured(disturbed=lambda time_us: 3.0 * time_us, pipeline=2))
    assert found.spread.time_us(1000, 0) == pytest.approx(2.0 * MOVED[Op.SPREAD].time_us(1000, 0))  # the median of two


def test_collectives_that_a_rank_has_not_measured_are_left_out() -> None:
    first, second = measured()
    second.collectives.clear()
    found, before = fitted([first, second]), SHARDED.vocabulary
    assert (found.spread, found.gather) == (before.spread, before.gather)
    assert found.logits != before.logits


def test_equal_measurements_give_equal_costs_in_whatever_order_ranks_are() -> None:
    ranks = measured() + measured(slowness=(1.2, 1.1), pipeline=2)
    assert fitted_costs(SHARDED, ranks) == fitted_costs(SHARDED, ranks[::-1])


def test_the_error_of_formulas_is_told_for_passes_and_collectives() -> None:
    shards = SHARDED.vocabulary
    twice = {name: line.scaled(2.0) for name, line in (("logits", shards.logits), ("gradient", shards.gradient))}
    half = {name: line.scaled(0.5) for name, line in (("spread", shards.spread), ("gather", shards.gather))}
    learnt = replace(SHARDED, vocabulary=replace(shards, **twice, **half))
    said = str(deviation(SHARDED, learnt, [(64, 2080), (3000, 4_501_500)]))
    assert said == "1.00 of the time by formulas (stages 1.00 to 1.00, vocabulary shards 2.00, their collectives 0.50)"


FLAGS = load_flags("llama3-8b")
AT_ONCE = shape_of(FLAGS | {"epp_loss_block_tokens": 0})
BLOCKS = shape_of(FLAGS | {"epp_loss_block_tokens": 2048})


@pytest.mark.parametrize("vocabulary", [1000, 32000, 128256, 10**6])
def test_by_itself_it_is_on_where_a_sequences_logits_have_more_than_two_blocks(vocabulary):
    most = 2 * BLOCK_BYTES // (4 * vocabulary)
    assert loss_block_tokens(AUTO, vocabulary, most) == 0
    assert BLOCK_BYTES / 2 < 4 * vocabulary * loss_block_tokens(AUTO, vocabulary, most + 1) <= BLOCK_BYTES


def test_it_counts_what_is_on_one_rank():
    assert loss_block_tokens(AUTO, 10**9, 10**6) == 1
    long = FLAGS | {"seq_length": 131072}
    one, four = (shape_of(long | {"tensor_model_parallel_size": ranks}).loss_block_tokens for ranks in (1, 4))
    assert (one, four) == (2048, 8192)
    longest = 2 * BLOCK_BYTES // (4 * 128256)
    ranks = {"seq_length": 4 * longest, "context_parallel_size": 4}
    assert shape_of(FLAGS | ranks).loss_block_tokens == 0
    assert shape_of(FLAGS | ranks | {"context_parallel_size": 2}).loss_block_tokens > 0
    assert shape_of(FLAGS).loss_block_tokens == 0  # nobody says how long sequences are


def test_the_head_keeps_no_probabilities_and_computes_logits_twice():
    whole, blocks = (analytic_profile(shape, H100).head for shape in (AT_ONCE, BLOCKS))
    assert whole.bytes_per_token - blocks.bytes_per_token == 4 * AT_ONCE.vocab_size
    assert blocks.forward == whole.forward
    more_us = blocks.backward.per_token_us - whole.backward.per_token_us
    assert more_us == pytest.approx(1e6 * 2 * AT_ONCE.vocabulary_parameters / H100.linear_flops)
    assert (blocks.weight, blocks.weight_bytes_per_token) == (LinearTime(), 0)


def test_while_it_runs_a_device_holds_whole_logits_once_more_in_two_bytes_each():
    work = work_of([Chunk((Segment(0, 0, 3000),))], [3000])
    whole, blocks = (on_device(analytic_profile(shape, H100).costs([16, 16]), 0.0) for shape in (AT_ONCE, BLOCKS))
    of_layers = blocks.pass_items(0, work)[WORKING]
    assert whole.pass_items(0, work)[WORKING] == blocks.pass_items(1, work)[WORKING] == of_layers
    norm = 2 * 2 * AT_ONCE.hidden_size  # which the head keeps besides
    assert whole.pass_items(1, work)[WORKING] == 3000 * (2 * AT_ONCE.vocab_size + norm / 2) > of_layers


def test_a_workspace_does_not_grow_with_chunks_and_is_held_throughout():
    costs = analytic_profile(BLOCKS, H100).costs([16, 16])
    workspace = loss_workspace_bytes(2048, 128256, 4096, 2)
    assert [stage.workspace_bytes for stage in costs.stages] == [0, workspace]
    assert costs.static_bytes(1) == costs.stages[1].static_bytes + workspace
    assert loss_workspace_bytes(4096, 128256, 4096, 2) - workspace == 2048 * 128256 * 6
    assert loss_workspace_bytes(0, 128256, 4096, 2) == 0


def test_plan_takes_the_flag_and_by_itself_goes_by_the_longest_sequence(tmp_path):
    def planned(*flags):
        batch = ["--lengths", "60000,2000", "--stages", "2", "--layout", "even", "--tensor-parallel", "8", "--slices", "1"]
        batch += ["--layers", "8", "--planner", "1f1b"]
        assert cli.main(["plan", *batch, *flags, "-o", str(tmp_path / "plan.json")]) == 0
        return load(tmp_path / "plan.json").predicted

    whole, by_itself = planned("--loss-block-tokens", "0"), planned()
    assert by_itself == planned("--context", "100000") == planned("--loss-block-tokens", "16384")
    assert by_itself.peak_bytes[1] < whole.peak_bytes[1]
    assert planned("--context", "16000") == planned("--context", "16000", "--loss-block-tokens", "0")


def test_a_workspace_counts_the_tensors_of_a_block():
    """Bytes of 10 tokens, 100 entries and a hidden size of 8: logits, copies in bf16, and what the weight's gradient takes."""
    assert loss_workspace_bytes(10, 100, 8, 4) == 100 * (10 * 4 + 8 * 4)
    assert loss_workspace_bytes(10, 100, 8, 2) == 100 * (10 * (4 + 2) + 8 * (4 + 2))
    assert loss_workspace_bytes(10, 100, 8, 2, fused_accumulation=True) == 100 * (10 * (4 + 2) + 8 * 2)
    assert loss_workspace_bytes(10, 100, 8, 2, in_place=True) == 2 * 10 * (100 + 8) + 100 * 8 * (4 + 2)
