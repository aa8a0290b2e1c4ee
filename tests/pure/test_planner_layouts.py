"""The layout that is chosen for batches like those of a sample."""

import logging
from dataclasses import replace
from itertools import product

import pytest

from megatron_epp.cost import PipelineCosts
from megatron_epp.cost.work import NO_TIME
from megatron_epp.formulas import H100, analytic_profile
from megatron_epp.formulas.library import load_flags, shape_of
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.placement import Placement, placements_of
from megatron_epp.planner import UNLIMITED_BYTES, Options, Problem, plan
from megatron_epp.planner.layouts.estimates import Estimates
from megatron_epp.planner.layouts.layout_choice import MIN_GAIN_SHARE, Sample, choose
from megatron_epp.planner.layouts.rank_work import WHOLE, LayerWork, moved

PROFILE = analytic_profile(shape_of(load_flags("llama3-8b")), H100)
HEADLESS = replace(
    PROFILE,
    embedding=replace(PROFILE.embedding, forward=NO_TIME, backward=NO_TIME),
    head=replace(PROFILE.head, forward=NO_TIME, backward=NO_TIME),
)
BATCHES = ((9000, 4000, 4000, 2000, 1000, 700), (16000, 3000, 500, 400), (5000,) * 5)


def sample(profile=PROFILE, ranks: int = 4, num_layers: int = 16, **more) -> Sample:
    def costs_of(layout: Layout) -> PipelineCosts:
        return profile.costs([count // 2 for count in layout.halves], state_bytes_per_parameter=7.5)

    problems = tuple(Problem(lengths, tuple(range(ranks)), (UNLIMITED_BYTES,) * ranks) for lengths in BATCHES)
    return Sample(problems, costs_of, num_layers, halves=False, **more)


def test_no_other_whole_layers_have_a_lower_floor():
    asked = sample(ranks=3, num_layers=9)
    work, placement = LayerWork.of(asked.problems, asked.costs_of, halves=False), Placement("looped", 3, 1)
    every = [
        Layout.of_layers(layers, placement)
        for layers in product(range(10), repeat=3)
        if sum(layers) == 9 and layers[1]  # the first and the last stage may be without layers
    ]
    assert work.floor_us(work.spread(9, placement, WHOLE)) == pytest.approx(min(map(work.floor_us, every)))


def test_a_move_takes_layers_from_one_rank_to_others():
    layout = Layout((4, 4, 2), Placement("looped", 3, 1))
    assert [one.halves for one in moved(layout, 0, WHOLE)] == [(2, 6, 2), (2, 4, 4)]
    assert [one.halves for one in moved(layout, 2, WHOLE, [1])] == [(4, 6, 0)]
    middle = Layout((4, 2, 4), Placement("looped", 3, 1))
    assert not list(moved(middle, 1, WHOLE))


def test_a_large_vocabulary_moves_layers_off_the_last_stage(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        found = choose(sample())
    assert sum(found.layout.halves) == 32
    assert found.bound_us <= found.makespan_us < found.even_us
    assert found.gain == 1 - found.makespan_us / found.even_us > MIN_GAIN_SHARE
    last_rank = found.layout.placement.stages(found.layout.placement.last_rank)
    assert sum(found.layout.halves[stage] for stage in last_rank) < 8
    assert "candidates for 3 batches" in caplog.text


def test_even_layers_stay_where_no_other_layout_saves_enough():
    found = choose(sample(HEADLESS, placements=placements_of(4)[:1]))
    assert found.layout == sample().even
    assert found.gain == 0.0


def test_ranks_have_several_stages_only_where_that_is_allowed_and_pays():
    found, plainer = choose(sample(HEADLESS)), choose(sample(HEADLESS, placements=placements_of(4)[:1]))
    assert plainer.layout.placement.num_chunks == 1
    assert found.layout.placement.num_chunks == 1 or found.makespan_us <= plainer.makespan_us * (1 - MIN_GAIN_SHARE / 2)


def test_one_rank_has_one_layout():
    assert choose(sample(ranks=1)).layout == Layout.of_layers((16,), Placement("looped", 1, 1))


def test_plans_of_the_choice_are_made_with_the_options():
    found = choose(sample(placements=placements_of(4)[:1], options=Options(planner="seq1f1b", recompute=0)))
    by_default, again = (choose(sample(placements=placements_of(4)[:1])) for _ in range(2))
    assert found.makespan_us > by_default.makespan_us
    assert again == by_default


@pytest.mark.parametrize("placement", placements_of(4))
def test_an_estimate_and_a_plan_are_above_the_floor_and_the_estimate_a_little_above_the_plan(placement: Placement):
    asked = sample()
    work = LayerWork.of(asked.problems[:1], asked.costs_of, halves=False)
    layout = work.spread(16, placement, WHOLE)
    made = plan(replace(asked.problems[0], placement=placement.rank_of), asked.costs_of(layout))
    known = Estimates(asked.problems[:1], asked.costs_of, asked.options, work)
    assert work.floor_us(layout) <= min(known.batch_us(layout, 0), made.predicted.makespan_us)
    assert made.predicted.makespan_us * (1 - 1e-9) <= known.batch_us(layout, 0) <= 1.2 * made.predicted.makespan_us
