"""A stage is a list of blocks and takes their sum: others add blocks of their own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron_epp.cost.blocks import LAYER, BlockCosts
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import ChunkWork, LinearTime, TimeColumn, work_of
from megatron_epp.features.learnt_costs.learner import fitted_costs
from megatron_epp.features.learnt_costs.timed import Learnt, Timed
from megatron_epp.plan import NO_RECOMPUTE, UNLIMITED_BYTES, Chunk, Op, Plan, Segment
from megatron_epp.plan.problem import Options, Problem
from megatron_epp.plan.proof import check
from megatron_epp.planner import plan
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.tools.formulas import CPU, ModelShape, on_device
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
