"""The cost model: blocks of a stage, others' too, lines, bytes, what is derived from chunks, and the JSON form."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron_epp.cost.blocks import LAYER, BlockCosts
from megatron_epp.cost.memory import Static
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import ChunkWork, LinearTime, ModeCosts, TimeColumn, causal_pairs, work_of
from megatron_epp.features.learnt_costs.learner import fitted_costs
from megatron_epp.features.learnt_costs.timed import Learnt, Timed
from megatron_epp.plan import NO_RECOMPUTE, UNLIMITED_BYTES, Chunk, EppError, Op, Plan, Recompute, Segment
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.proof import check
from megatron_epp.planner import plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.tools.formulas import CPU, H100, ModelShape, analytic_costs, on_device
from megatron_epp.tools.formulas.analytic import analytic_profile, expansion_line
from megatron_epp.tools.report.gantt import item_colours
from megatron_epp.tools.report.text import peak_table
from tests.support.plan.campaign import faults_of_answer
from tests.support.plan.campaign_cases import Case
from tests.support.plan.stages import THREE_LAYERS, stage_of

SHAPE = ModelShape(num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
PROFILE = analytic_profile(SHAPE, CPU)
LENGTHS = (150, 64)
CHUNKS = [Chunk((Segment(0, 0, 100),)), Chunk((Segment(0, 100, 150),)), Chunk((Segment(1, 0, 64),))]
WORK = work_of(CHUNKS, LENGTHS)
STATE_BYTES = 20_000
STATES = "states between slices"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer(BlockCosts):
    """A layer that hands a state of fixed size from each slice of a sequence to the next, and keeps it until the backward."""

    kind: str = "state"
    state_bytes: int = STATE_BYTES

    @property
    def item(self) -> str:
        return STATES

    def kept_bytes(self, work: ChunkWork) -> TimeColumn:
        return np.where(work.sliced & ~work.last, float(self.state_bytes), 0.0)


STATE_LAYER = StateLayer(forward=LinearTime(7.0, 0.5), backward=LinearTime(9.0, 1.25), weight=LinearTime(0.0, 0.25))


def with_state_layers(costs: PipelineCosts, behind: bool = False) -> PipelineCosts:
    """Return the costs with such a layer ahead of the other layers of each stage, or behind them."""

    def longer(blocks: tuple[BlockCosts, ...]) -> tuple[BlockCosts, ...]:
        at = [block.kind for block in blocks].index(LAYER) + behind
        return *blocks[:at], STATE_LAYER, *blocks[at:]

    return replace(costs, stages=tuple(replace(stage, blocks=longer(stage.blocks)) for stage in costs.stages))


def made(costs: PipelineCosts, cap: int = UNLIMITED_BYTES, **options: object) -> Plan:
    ranks = tuple(range(len(costs.stages)))
    return plan(Problem(LENGTHS, ranks, (cap,) * len(ranks)), costs, Options(**options))  # type: ignore[arg-type]


def test_a_block_of_another_kind_takes_its_own_time_and_keeps_a_state_per_boundary_of_slices():
    bare = PROFILE.costs([3, 1])
    costs = with_state_layers(bare)
    assert costs.num_layers == bare.num_layers
    for stage in (0, 1):
        own_us = STATE_LAYER.forward.time_us(WORK.tokens, WORK.pairs)
        np.testing.assert_allclose(costs.forward_us(stage, WORK) - bare.forward_us(stage, WORK), own_us)
        more = costs.activation_bytes(stage, WORK) - bare.activation_bytes(stage, WORK)
        assert more.tolist() == [STATE_BYTES, 0, 0]


@pytest.mark.parametrize("layers", [[2, 2], [3, 1]])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("options", [{}, {"split_weight": True, "slices": 2}])
def test_such_a_block_is_planned_checked_simulated_and_explained(layers: list[int], behind: bool, options: dict[str, object]):
    costs = on_device(with_state_layers(PROFILE.costs(layers, state_bytes_per_parameter=0.0), behind))
    wide = made(costs, **options)
    tight = made(costs, int(0.8 * max(wide.predicted.peak_bytes)), **options | {"slices": 2})
    for found in (wide, tight):
        assert check(found) == []
        assert (
            list(faults_of_answer(Case(Problem(LENGTHS, found.placement, found.cap_bytes), costs, Options()), (found,))) == []
        )
    breakdown = memory_breakdown(tight, costs)
    (first, *_) = (step.action for step in tight.ranks[0] if tight.chunks[step.action.chunk].slice_of(LENGTHS) is not None)
    assert first.op is Op.F
    assert STATES in breakdown.items
    assert breakdown.takes[first][STATES] == pytest.approx(STATE_BYTES * (1 + costs.fragmentation_share), abs=1)
    assert any(STATES in moment.items for moment in breakdown.moments(0))
    assert STATES in item_colours(breakdown)
    sliced = made(costs, **options | {"slices": 2, "recompute": 2})
    assert any(STATES in row for row in peak_table(memory_breakdown(sliced, costs)))


@pytest.mark.parametrize("layers", [[3, 1], [0, 3, 1], [4]])
def test_the_bytes_of_a_stage_are_the_sum_of_its_blocks_bytes(layers: list[int]):
    costs = PROFILE.costs(layers)
    for number, stage in enumerate(costs.stages):
        kept = sum(block.count * block.kept_per_token(WORK) for block in stage.blocks)
        weights = sum(block.count * block.weight_bytes_per_token for block in stage.blocks)
        np.testing.assert_allclose(costs.activation_bytes(number, WORK), kept * WORK.tokens, atol=1)
        np.testing.assert_allclose(costs.weight_bytes(number, WORK), weights * WORK.tokens, atol=1)


def test_learnt_times_are_shared_with_such_a_block():
    base = with_state_layers(PROFILE.costs([3, 1]))
    sizes = [(64 * n, 2080 * n * n) for n in range(1, 7)]
    times = {
        (stage, op): [Timed(*size, 2 * line.time_us(*size)) for size in sizes]
        for stage, own in enumerate(base.stages)
        for op, line in ((Op.F, own.line("forward")), (Op.B, own.line("backward")))
    }
    learnt = fitted_costs(base, [Learnt(times)])
    for own, then in zip(learnt.stages, base.stages, strict=True):
        assert own.line("forward").time_us(100, 5050) == pytest.approx(2 * then.line("forward").time_us(100, 5050), rel=1e-3)
        assert own.inner[0].forward.per_token_us == pytest.approx(2 * then.inner[0].forward.per_token_us, rel=0.02)
    assert learnt.activation_bytes(0, WORK, NO_RECOMPUTE).min() > 0


OF_TABLE = (10, 3, 4)
SPLIT = Chunk((Segment(0, 0, 6),))
HYBRID = Chunk((Segment(0, 6, 10), Segment(1, 0, 3)))
BATCHED = Chunk((Segment(2, 0, 4),))
TABLE = (SPLIT, HYBRID, BATCHED)

FORWARD, BACKWARD, HEAD = LinearTime(10.0, 1.0, 0.5), LinearTime(20.0, 2.0, 1.25), LinearTime(1.0, 0.25)
STAGE = stage_of(forward=FORWARD, backward=BACKWARD, extra_forward=HEAD, static=Static(weights=1000), **THREE_LAYERS)
COSTS = PipelineCosts("by hand", (STAGE,), hidden_bytes_per_token=4.0, message_latency_us=7.0, message_us_per_byte=0.5)


def test_pairs_of_a_prefix_are_counted_one_by_one():
    assert causal_pairs(0, 5) == sum(query + 1 for query in range(5))
    assert causal_pairs(3, 7) == sum(query + 1 for query in range(3, 7))
    assert causal_pairs(0, 400) + causal_pairs(400, 1000) == causal_pairs(0, 1000)


def test_work_follows_the_chunk_table():
    work = work_of(TABLE, OF_TABLE, token_multiple=4)
    assert (work.tokens.tolist(), work.pairs.tolist()) == ([8, 8, 4], [21, 34 + 6, 10])
    assert (work.sliced.tolist(), work.first.tolist()) == ([True, True, False], [True, False, False])
    assert work.last.tolist() == [False, True, False]
    assert work.cache_tokens.tolist() == [16, 16, 0], "the slices, and what is batched with the last one"


def test_where_some_layers_cache_the_cache_has_theirs_and_a_layer_without_one_keeps_its_own():
    """Two of four layers cache 32 bytes of a token, as much as all four with 16."""
    work = work_of(TABLE, OF_TABLE)
    all_of_them = STAGE.changed(LAYER, count=4, full_bytes_per_token=140.0, attended_bytes_per_token=130.0)
    two = all_of_them.changed(LAYER, cached_share=0.5, kv=replace(STAGE.kv, bytes_per_token=32.0))
    whole, half = (replace(COSTS, stages=(stage,)) for stage in (all_of_them, two))
    assert half.cache_bytes(0, work).tolist() == whole.cache_bytes(0, work).tolist()
    assert half.gradient_bytes(0, work).tolist() == whole.gradient_bytes(0, work).tolist()
    assert half.activation_bytes(0, work).tolist() == whole.activation_bytes(0, work).tolist()
    first, last, unsliced = (half.layer_peak_bytes(0, work).num_bytes - whole.layer_peak_bytes(0, work).num_bytes).tolist()
    assert first == 6 * 16  # a layer that caches nothing keeps its own
    assert last == 140 * 7 - (130 - 16) * 7  # the same, when the gradients of all layers are there
    assert unsliced == 0


def test_of_unlike_layers_the_first_ones_recompute_and_what_is_left_keeps_its_own():
    layers = [replace(STAGE.layers, count=1, bytes_per_token=size, cached_share=float(size < 100)) for size in (180, 60, 60)]
    costs = replace(COSTS, stages=(replace(STAGE.changed(LAYER, cached_share=2 / 3), unlike=tuple(layers)),))
    work = work_of(TABLE, OF_TABLE)  # two slices, whose keys and values of 16 bytes are in the cache, and a whole sequence
    kept = [costs.activation_bytes(0, work, Recompute(count)).tolist() for count in range(4)]
    assert kept[0] == [6 * (180 + 2 * 44 + 5), 7 * (180 + 2 * 44 + 5), 4 * (180 + 2 * 60 + 5)]
    assert kept[1] == [6 * (8 + 2 * 44 + 5), 7 * (8 + 2 * 44 + 5), 4 * (8 + 2 * 60 + 5)]
    assert kept[3] == COSTS.activation_bytes(0, work, Recompute(3)).tolist()
    assert PipelineCosts.from_json(costs.to_json()) == costs
    short = replace(costs, stages=(replace(costs.stages[0], unlike=tuple(layers[:2])),))
    with pytest.raises(EppError, match="2 layers of the stage's 3"):
        PipelineCosts.from_json(short.to_json())


def test_slices_keep_no_keys_and_values_of_their_own_and_recomputed_layers_only_their_input():
    work = work_of(TABLE, OF_TABLE)
    assert COSTS.activation_bytes(0, work).tolist() == [6 * (3 * 84 + 5), 7 * (3 * 84 + 5), 4 * (3 * 100 + 5)]
    assert COSTS.activation_bytes(0, work, Recompute(2)).tolist() == [6 * (84 + 16 + 5), 7 * (84 + 16 + 5), 4 * (100 + 16 + 5)]
    assert COSTS.cache_bytes(0, work).tolist() == [3 * 16 * 13, 3 * 16 * 13, 0]


def test_the_gradient_of_keys_and_values_is_as_long_as_their_sequence_and_as_wide_as_it_is_said_to_be():
    work = work_of(TABLE, OF_TABLE)
    assert COSTS.gradient_bytes(0, work).tolist() == [0, 3 * 16 * 13, 0]
    assert [column.tolist() for column in COSTS.opened_bytes(0, work)] == [[3 * 16 * 13, 0, 0]] * 2
    long = work_of((Chunk((Segment(0, 0, 1000),)), Chunk((Segment(0, 1000, 1030),))), (1030,))
    assert COSTS.gradient_bytes(0, long).tolist() == [0, 3 * 16 * 1030]
    assert (COSTS.cache_bytes(0, long) > COSTS.gradient_bytes(0, long)).all()
    wide = replace(COSTS, stages=(STAGE.changed(LAYER, kv=replace(STAGE.kv, gradient_bytes_per_token=32.0)),))
    assert wide.gradient_bytes(0, work).tolist() == [0, 3 * 32 * 13, 0]
    assert (wide.cache_bytes(0, work) == COSTS.cache_bytes(0, work)).all()


def test_the_gradient_is_wider_where_a_sequence_has_more_than_eight_slices():
    """Next to such a sequence, one of two slices and a whole one."""
    many = [Chunk((Segment(0, i, i + 1),)) for i in range(9)]
    rest = [Chunk((Segment(1, 0, 2),)), Chunk((Segment(1, 2, 4),)), Chunk((Segment(2, 0, 5),))]
    work = work_of([*many, *rest], (9, 4, 5))
    assert work.num_slices.tolist() == [9] * 9 + [2, 2, 0]
    wide = replace(
        COSTS, stages=(STAGE.changed(LAYER, kv=replace(STAGE.kv, many_gradient_bytes_per_token=32.0)),), host_us_per_byte=1.0
    )
    assert wide.gradient_bytes(0, work).tolist() == [0] * 8 + [3 * 32 * 9, 0, 3 * 16 * 4, 0]
    assert wide.layer_peak_bytes(0, work).gradient[[8, 10]].tolist() == [32 * 9, 16 * 4]
    assert wide.kv_offload_costs(0, work).gradient_bytes.tolist() == [3 * 32 * 9] * 9 + [3 * 16 * 4] * 2 + [0]
    eight = work_of([*many[:7], Chunk((Segment(0, 7, 9),)), *rest], (9, 4, 5))
    assert wide.gradient_bytes(0, eight).tolist() == COSTS.gradient_bytes(0, eight).tolist()


@pytest.mark.parametrize(("bytes_per_value", "times"), [(2, 2.0), (4, 1.0)])
def test_by_formula_the_wider_sums_are_in_fp32(bytes_per_value: int, times: float):
    shape = ModelShape(
        num_layers=4, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, vocab_size=96, bytes_per_value=bytes_per_value
    )
    stage = analytic_costs(shape, CPU, [4]).stages[0]
    assert stage.kv.many_gradient_bytes_per_token == times * stage.kv.bytes_per_token
    assert stage.kv.gradient_bytes_per_token is None


def test_a_layer_holds_most_when_its_backward_begins_or_when_attention_has_made_the_gradient_of_keys_and_values():
    def peaks(mode: str = "", **changes: object):
        costs = replace(COSTS, stages=(STAGE.changed(LAYER, **changes),))
        return [column.tolist() for column in costs.layer_peak_bytes(0, work_of(TABLE, OF_TABLE), mode)]

    early, gradient = [6 * 84, 7 * 84, 4 * 100], 16 * 13
    none = [0, 0, 0]
    assert peaks() == [[early[0], early[1] + gradient, early[2]], [0, gradient, 0], none]
    assert peaks(attended_bytes_per_token=90.0) == [[early[0], 7 * 74 + gradient, early[2]], [0, gradient, 0], none]
    assert peaks(attended_bytes_per_token=50.0) == [early, none, none]
    assert peaks("mlp", recompute={"mlp": ModeCosts(LinearTime(), 40, 95)}, attended_bytes_per_token=50.0) == [
        [6 * 79, 7 * 79, 4 * 95],
        none,
        none,
    ]
    assert peaks("full", attended_bytes_per_token=50.0) == [early, none, none]


OF_CHUNKS = ModelShape(num_layers=8, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)


def with_shape(**changes: object) -> ModelShape:
    return replace(OF_CHUNKS, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [True, False])
def test_linear_work_is_six_operations_per_parameter_and_token(gated: bool):
    shape = with_shape(gated_mlp=gated)
    layer = 4 * 64 * 64 + (3 if gated else 2) * 64 * 256
    costs = analytic_costs(shape, replace(H100, memory_bytes=math.inf, attention_tile=0.0), [4, 4])
    per_token_us = sum(stage.line("forward").per_token_us + stage.line("backward").per_token_us for stage in costs.stages)
    assert per_token_us * H100.linear_flops / 1e6 == pytest.approx(6 * (8 * layer + 64 * 1000))


def test_attention_is_two_products_forward_and_five_backward_over_the_pairs_and_the_query_width():
    stage = analytic_costs(OF_CHUNKS, H100, [8]).stages[0]
    assert stage.layers.forward.per_pair_us * H100.attention_forward_flops / 1e6 == pytest.approx(2 * 2 * 64)
    assert stage.layers.backward.per_pair_us * H100.attention_backward_flops / 1e6 == pytest.approx(5 * 2 * 64)


def test_grouped_queries_shrink_keys_and_values_and_nothing_of_attention_itself():
    plain, grouped = (analytic_costs(with_shape(num_query_groups=groups), H100, [8]).stages[0] for groups in (8, 2))
    assert grouped.kv.bytes_per_token == plain.kv.bytes_per_token / 4
    assert grouped.layers.forward.per_pair_us == plain.layers.forward.per_pair_us
    assert grouped.layers.forward.per_token_us < plain.layers.forward.per_token_us
    assert grouped.layers.bytes_per_token == plain.layers.bytes_per_token - (
        plain.kv.bytes_per_token - grouped.kv.bytes_per_token
    )


def test_parallel_ranks_share_the_work_and_sequence_parallelism_also_the_residual_stream():
    one, tensor, sequence = (
        analytic_costs(shape, H100, [8]).stages[0]
        for shape in (OF_CHUNKS, with_shape(tensor_parallel=2), with_shape(tensor_parallel=2, sequence_parallel=True))
    )
    assert tensor.layers.forward.per_pair_us == one.layers.forward.per_pair_us / 2
    assert tensor.layers.input_bytes_per_token == one.layers.input_bytes_per_token
    assert sequence.layers.input_bytes_per_token == one.layers.input_bytes_per_token / 2
    assert sequence.layers.bytes_per_token == pytest.approx(one.layers.bytes_per_token / 2)
    assert sequence.layers.bytes_per_token < tensor.layers.bytes_per_token < one.layers.bytes_per_token


def test_context_parallel_ranks_share_the_tokens():
    one, two = (analytic_costs(shape, H100, [8]) for shape in (OF_CHUNKS, with_shape(context_parallel=2)))
    output = OF_CHUNKS.query_width * OF_CHUNKS.bytes_per_value  # which exchanging heads for tokens keeps twice
    assert two.hidden_bytes_per_token == one.hidden_bytes_per_token / 2
    assert two.stages[0].layers.bytes_per_token == (one.stages[0].layers.bytes_per_token + output) / 2
    assert two.stages[0].kv.bytes_per_token == one.stages[0].kv.bytes_per_token / 2
    assert two.stages[0].static_bytes == one.stages[0].static_bytes


def test_a_context_parallel_rank_has_whole_key_heads_so_too_few_are_repeated():
    def cached(ranks, groups):
        return with_shape(context_parallel=ranks, num_query_groups=groups).kv_bytes_per_token

    assert [cached(ranks, 2) for ranks in (1, 2, 4)] == [cached(1, 2), cached(1, 2) / 2, cached(1, 2) / 2]
    assert (cached(4, 1), cached(4, 4)) == (cached(1, 1), cached(1, 4) / 4)
    halves = with_shape(context_parallel=2, tensor_parallel=2, num_query_groups=2)
    assert halves.kv_bytes_per_token == with_shape(tensor_parallel=2, num_query_groups=2).kv_bytes_per_token


def test_a_tensor_parallel_rank_has_a_whole_key_head_where_there_are_fewer_heads_than_ranks():
    whole, divided = (with_shape(tensor_parallel=ranks, num_query_groups=2) for ranks in (2, 4))
    assert divided.kv_heads_on_rank == whole.kv_heads_on_rank == 1
    assert divided.kv_bytes_per_token == whole.kv_bytes_per_token == 2 * divided.head_width * divided.bytes_per_value


def test_layers_that_do_not_add_up_are_refused():
    with pytest.raises(EppError, match=r"\[3, 4\].*num_layers 8"):
        analytic_costs(OF_CHUNKS, H100, [3, 4])


def test_heads_that_tensor_parallel_ranks_cannot_share_evenly_are_refused():
    with pytest.raises(EppError, match="8 attention heads cannot be shared evenly by 3 tensor-parallel ranks"):
        with_shape(tensor_parallel=3, context_parallel=2)


def test_context_parallel_ranks_that_do_not_divide_the_heads_pay_for_those_of_the_rank_that_has_most():
    """24, 28 and 40 query heads of published models: all ranks take as long, and send as much, as with heads for all."""
    for heads, groups, filled in ((24, 4, 32), (28, 4, 32), (40, 8, 48)):
        sizes = {"kv_channels": 8, "num_query_groups": groups, "tensor_parallel": 4, "context_parallel": 4}
        uneven, even = (with_shape(num_attention_heads=count, **sizes) for count in (heads, filled))
        assert uneven.heads_on_rank == even.heads_on_rank == filled // 16
        assert uneven.kv_bytes_per_token == even.kv_bytes_per_token
        assert uneven.attention_exchanges[1] == even.attention_exchanges[1]
        assert uneven.attention_result_bytes_per_token == even.attention_result_bytes_per_token
        pairs = [analytic_profile(shape, H100).layer.forward.per_pair_us for shape in (uneven, even)]
        assert pairs[0] == pairs[1] > 0
        unshared = [analytic_profile(replace(shape, context_parallel=1), H100).layer.forward for shape in (uneven, even)]
        assert unshared[0].per_pair_us == pytest.approx(unshared[1].per_pair_us * heads / filled)


def test_key_heads_are_added_where_that_takes_fewer_query_heads():
    shape = with_shape(num_attention_heads=24, kv_channels=8, context_parallel=16)
    assert (shape.heads_on_rank, shape.kv_heads_on_rank) == (2, 2)


def test_latents_are_expanded_for_the_heads_of_the_rank_that_has_most():
    sizes = {"kv_channels": 8, "latent_rank": 16, "rotated_channels": 4, "relays_latents": True, "context_parallel": 4}
    uneven, even = (with_shape(num_attention_heads=count, **sizes) for count in (6, 8))
    assert uneven.expanded_heads == even.expanded_heads == 2
    assert expansion_line(uneven, H100).per_token_us == pytest.approx(expansion_line(even, H100).per_token_us)
