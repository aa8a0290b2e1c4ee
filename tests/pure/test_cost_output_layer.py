"""The output layer in the costs: its loss by blocks, and the times of its shards as learnt from measured iterations."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_epp.cost.kept import RECORDED, WARM_UP
from megatron_epp.cost.memory import WORKING
from megatron_epp.cost.output_layer import PASS_US, VocabularyShards
from megatron_epp.cost.work import LinearTime, work_of
from megatron_epp.features.learnt_costs.learner import Learner, deviation, fitted_costs
from megatron_epp.features.learnt_costs.timed import Learnt
from megatron_epp.plan import NO_RECOMPUTE, Action, Chunk, Op, Plan, Segment
from megatron_epp.plan.flags import AUTO
from megatron_epp.plan.serialize import load
from megatron_epp.plan.sizing import BLOCK_BYTES, loss_block_tokens, loss_workspace_bytes
from megatron_epp.tools.cli import main as cli
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_profile, on_device
from megatron_epp.tools.formulas.library import load_flags, shape_of
from tests.support.plan.small_plans import one_f_one_b

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=5000)
SHARES = (0.25, 0.75)
FORMULAS = analytic_profile(SHAPE, CPU).costs((2, 2), vocabulary_shares=SHARES)
WHOLE = {Op.S: LinearTime(400.0, 3.0), Op.T: LinearTime(100.0, 1.5)}
MOVED = {Op.SPREAD: LinearTime(30.0, 0.2), Op.GATHER: LinearTime(80.0, 0.4)}
SIZES = (64, 500, 1000, 3000)
FEW = (700, 900)

Disturbance = Callable[[float], float]


def plan_of(sizes: tuple[int, ...]) -> Plan:
    chunks = tuple(Chunk((Segment(number, 0, length),)) for number, length in enumerate(sizes))
    return replace(one_f_one_b(), lengths=sizes, chunks=chunks, recompute=((NO_RECOMPUTE,) * len(sizes),) * 2)


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
    shards = fitted_costs(FORMULAS, everyone, keeps_weights=True).vocabulary
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
    found, before = fitted(measured()), FORMULAS.vocabulary
    assert before is not None
    times = {"logits", "gradient", "spread", "gather"}
    assert replace(found, **{name: getattr(before, name) for name in times}) == before


def test_few_sizes_scale_the_formulas() -> None:
    before, found = FORMULAS.vocabulary, fitted(measured(FEW))
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
    found, before = fitted([first, second]), FORMULAS.vocabulary
    assert (found.spread, found.gather) == (before.spread, before.gather)
    assert found.logits != before.logits


def test_equal_measurements_give_equal_costs_in_whatever_order_ranks_are() -> None:
    ranks = measured() + measured(slowness=(1.2, 1.1), pipeline=2)
    assert fitted_costs(FORMULAS, ranks) == fitted_costs(FORMULAS, ranks[::-1])


def test_the_error_of_formulas_is_told_for_passes_and_collectives() -> None:
    shards = FORMULAS.vocabulary
    twice = {name: line.scaled(2.0) for name, line in (("logits", shards.logits), ("gradient", shards.gradient))}
    half = {name: line.scaled(0.5) for name, line in (("spread", shards.spread), ("gather", shards.gather))}
    learnt = replace(FORMULAS, vocabulary=replace(shards, **twice, **half))
    said = str(deviation(FORMULAS, learnt, [(64, 2080), (3000, 4_501_500)]))
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
