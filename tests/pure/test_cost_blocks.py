"""A stage is a list of blocks and takes their sum: halves add up to layers, and others add blocks of their own."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest

from megatron_epp.cost.blocks import LAYER, BlockCosts, StageCosts
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import ChunkWork, LinearTime, TimeColumn, work_of
from megatron_epp.features.learnt_costs.learner import fitted_costs
from megatron_epp.features.learnt_costs.timed import Learnt, Timed
from megatron_epp.plan import NO_RECOMPUTE, UNLIMITED_BYTES, Chunk, EppError, Op, Plan, Recompute, Segment
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.proof import check
from megatron_epp.planner import plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.tables import tabulate
from megatron_epp.tools.formulas import CPU, H100, ModelShape, on_device
from megatron_epp.tools.formulas.analytic import analytic_profile
from megatron_epp.tools.report.gantt import item_colours
from megatron_epp.tools.report.text import peak_table
from tests.support.plan.campaign import faults_of_answer
from tests.support.plan.campaign_cases import Case

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
    bare = PROFILE.costs([2.5, 1.5])
    costs = with_state_layers(bare)
    assert (costs.num_layers, costs.num_halves) == (bare.num_layers, bare.num_halves)
    for stage in (0, 1):
        own_us = STATE_LAYER.forward.time_us(WORK.tokens, WORK.pairs)
        np.testing.assert_allclose(costs.forward_us(stage, WORK) - bare.forward_us(stage, WORK), own_us)
        more = costs.activation_bytes(stage, WORK) - bare.activation_bytes(stage, WORK)
        assert more.tolist() == [STATE_BYTES, 0, 0]


@pytest.mark.parametrize("layers", [[2, 2], [2.5, 1.5]])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("options", [{}, {"split_weight": True, "slices": 2}])
def test_such_a_block_is_planned_checked_simulated_and_explained(layers: list[float], behind: bool, options: dict[str, object]):
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


EXPERTS = replace(SHAPE, num_experts=4, experts_per_token=2, tensor_parallel=2)
HALVES = [[2.5, 1.5], [0.5, 3.5], [1.5, 1, 1.5], [0.5, 0.5, 3], [1.5, 0.5, 2], [3.5, 0.5], [0, 2.5, 0, 1.5]]


def kinds(stage: StageCosts) -> list[str]:
    return [block.kind for block in stage.inner]


def totals(costs: PipelineCosts) -> list[float]:
    """Time and bytes of all stages together, without what every boundary adds."""
    stages = range(len(costs.stages))
    columns = costs.forward_us, costs.backward_us, costs.weight_us, costs.cache_bytes, costs.gradient_bytes
    blocks = [block for stage in costs.stages for block in (stage.layers, *stage.inner)]
    return [
        *(float(sum(column(stage, WORK).sum() for stage in stages)) for column in columns),
        sum(block.count * block.bytes_per_token for block in blocks),
    ]


@pytest.mark.parametrize("layers", HALVES)
@pytest.mark.parametrize("shape", [SHAPE, EXPERTS, replace(EXPERTS, dense_layers=(0, 2), dense_ffn_hidden_size=512)])
def test_halves_take_as_much_as_the_layers_that_they_are_of(layers, shape):
    profile = analytic_profile(shape, H100)
    whole = profile.costs([4] + [0] * (len(layers) - 1))
    costs = profile.costs(layers)
    assert totals(costs) == pytest.approx(totals(whole), abs=len(layers))
    assert sum(stage.static_bytes for stage in costs.stages) == pytest.approx(sum(s.static_bytes for s in whole.stages), abs=20)
    assert sum(stage.num_cached_layers for stage in costs.stages) == 4
    assert [count / 2 for count in costs.num_halves] == layers


@pytest.mark.parametrize("layers", HALVES)
def test_the_bytes_of_a_stage_are_the_sum_of_its_blocks_bytes(layers: list[float]):
    costs = PROFILE.costs(layers)
    for number, stage in enumerate(costs.stages):
        kept = sum(block.count * block.kept_per_token(WORK) for block in stage.blocks)
        weights = sum(block.count * block.weight_bytes_per_token for block in stage.blocks)
        np.testing.assert_allclose(costs.activation_bytes(number, WORK), kept * WORK.tokens, atol=1)
        np.testing.assert_allclose(costs.weight_bytes(number, WORK), weights * WORK.tokens, atol=1)


def test_a_stage_counts_an_mlp_at_its_start_and_an_attention_at_its_end_as_one_layer():
    first, middle, last = PROFILE.costs([1.5, 1, 1.5]).stages
    assert (first.num_layers, kinds(first), first.num_cached_layers) == (1, ["attention"], 2)
    assert (middle.num_layers, kinds(middle), middle.num_cached_layers) == (1, [], 1)
    assert (last.num_layers, kinds(last), last.num_cached_layers) == (1, ["mlp"], 1)
    assert middle.line("forward") == PROFILE.costs([1, 1, 2]).stages[1].line("forward")
    assert first.inner[0].forward.per_pair_us == PROFILE.layer.forward.per_pair_us
    assert last.inner[0].forward.per_pair_us == 0.0
    assert 0 < middle.layers.first_mlp_bytes_per_token < middle.layers.bytes_per_token


def test_only_an_attention_half_caches_keys_and_values_and_neither_recomputes():
    costs = PROFILE.costs([1.5, 2.5])
    for stage, caches in ((0, 2), (1, 2)):
        assert costs.cache_bytes(stage, WORK).tolist() == (caches * PROFILE.costs([1, 3]).cache_bytes(0, WORK)).tolist()
    all_layers = costs.activation_items(0, WORK, Recompute(full=1))
    assert all_layers["layers that keep everything"][2] == pytest.approx(64 * costs.stages[0].inner[0].bytes_per_token, abs=2)
    assert (
        costs.recompute_us(0, WORK, Recompute(full=1)).tolist()
        == PROFILE.costs([1, 3]).recompute_us(0, WORK, Recompute(full=1)).tolist()
    )


def test_tokens_that_are_not_trained_pass_the_half_of_the_last_stage_all_the_same():
    untrained = work_of(CHUNKS, LENGTHS, trained=[(0,), (0,)])
    half = PROFILE.costs([2.5, 1.5])
    whole = PROFILE.costs([3, 1])
    of_half = half.stages[1].inner[0].forward.time_us(untrained.tokens, untrained.pairs)
    assert half.forward_us(1, untrained).tolist() == pytest.approx((whole.forward_us(1, untrained) + of_half).tolist())


def test_the_backward_of_a_half_alone_has_room_for_the_gradient_of_its_keys_and_values():
    costs = PROFILE.costs([0.5, 3.5])
    gradients = "gradients of keys and values"
    assert costs.half_layer_items(0, WORK)[gradients].tolist() == [0, costs.gradient_bytes(0, WORK)[1], 0]
    assert costs.half_layer_items(1, WORK)[gradients].tolist() == [0, 0, 0]
    assert sum(PROFILE.costs([1, 3]).half_layer_items(0, WORK).values()).tolist() == [0, 0, 0]


def test_the_backward_of_a_sequences_first_slice_frees_the_keys_and_values_of_a_half_before_it_reaches_the_layers():
    costs = PROFILE.costs([1.5, 2.5])
    tables = tabulate(CHUNKS, Problem((150, 64), (0, 1), (UNLIMITED_BYTES,) * 2), costs)
    (goes, *_), kept = costs.cache_bytes(0, WORK) + costs.gradient_bytes(0, WORK), costs.half_freed_bytes(0, WORK)
    assert goes > 0
    assert (-tables.passes[0].backward().reached).tolist() == [kept[0] + goes // 2, kept[1], kept[2]]


@pytest.mark.parametrize(("num_steps", "stays"), [(0, True), (1, True), (2, False)])
def test_an_mlp_at_the_start_stays_until_the_backward_ends_unless_its_layer_recomputes(monkeypatch, num_steps, stays):
    """In the peak of a backward: of two layers the one that the two halves make recomputes last."""
    costs = on_device(PROFILE.costs([1.5, 2, 0.5]))
    problem = Problem((150, 64), (0, 1, 2), (UNLIMITED_BYTES,) * 3)
    tables = tabulate(CHUNKS, problem, costs, modes=("full",))
    assert costs.stages[1].layers.first_mlp_bytes_per_token > 0
    peak = tables.passes[1].ways.whole[2, num_steps]
    monkeypatch.setattr(PipelineCosts, "first_mlp_bytes", lambda *_: np.full(3, 10**6))
    assert (replace(tables.passes[1]).ways.whole[2, num_steps] > peak + 500_000) == stays


def test_layers_of_a_stage_are_halves_or_whole():
    with pytest.raises(EppError, match=r"multiple of 0\.5"):
        PROFILE.costs([2.25, 1.75])


def test_learnt_times_are_shared_with_the_half():
    base = PROFILE.costs([2.5, 1.5])
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
    assert [*pairwise(learnt.num_halves)] == [(5, 3)]
    assert learnt.activation_bytes(0, WORK, NO_RECOMPUTE).min() > 0
