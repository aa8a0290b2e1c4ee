"""How evenly stages share the work of sequences like those given, and what is said of it."""

from itertools import product
from typing import Literal

import pytest

from megatron_epp.cost.balance import WORTH, advice, spread_layers, spreads
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.plan.layout import layout_flag
from megatron_epp.plan.placement import Placement
from megatron_epp.planner import UNLIMITED_BYTES, Problem, plan
from megatron_epp.tools.formulas import H100, analytic_profile
from megatron_epp.tools.formulas.library import balanced_layers, load_flags, shape_of

SHORT, LONG = (2048,) * 64, (1 << 20,)
PROFILE = analytic_profile(shape_of(load_flags("llama3-8b")), H100)


def costs(layers: tuple[int, ...]) -> PipelineCosts:
    return PROFILE.costs(layers)


@pytest.mark.parametrize("rank_of", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1)])
@pytest.mark.parametrize(("extra_us", "num_layers"), [((1, 0, 0, 7), 12), ((0, 0, 0, 25), 8), ((2, 3, 0, 4), 11)])
def test_no_other_layers_make_the_busiest_rank_faster(rank_of: tuple[int, ...], extra_us: tuple[float, ...], num_layers: int):
    def busiest_us(layers: tuple[int, ...]) -> float:
        times = [5 * count + extra for count, extra in zip(layers, extra_us, strict=True)]
        return max(sum(time for time, rank in zip(times, rank_of, strict=True) if rank == wanted) for wanted in set(rank_of))

    found = spread_layers(5, extra_us, num_layers, rank_of)
    every = [layers for layers in product(range(1, num_layers), repeat=4) if sum(layers) == num_layers]
    assert found in every
    assert busiest_us(found) == min(map(busiest_us, every))


@pytest.mark.parametrize("kind", ["looped", "v"])
def test_with_two_stages_on_every_rank_ranks_are_balanced_and_plans_are_faster(kind: Literal["looped", "v"]):
    placement, lengths = Placement(kind, 8, 2), 8 * SHORT  # many, so that few ranks wait for anything but the busiest
    problem = Problem(lengths, placement.rank_of, (UNLIMITED_BYTES,) * 8)
    of_stages, of_ranks = (
        plan(problem, costs(balanced_layers(PROFILE, 32, 16, lengths, rank_of))).predicted.makespan_us
        for rank_of in ((), placement.rank_of)
    )
    assert of_ranks < 0.96 * of_stages


def test_the_excess_is_what_the_others_wait_for_the_busiest():
    own, best = spreads(costs((8,) * 4), LONG)
    assert (own.layers, own.excess) == ((8,) * 4, pytest.approx(best.excess, abs=0.02))
    lopsided, _ = spreads(costs((16, 6, 5, 5)), LONG)
    assert lopsided.excess == pytest.approx(1.0, abs=0.03)  # half of all layers on a quarter of the stages


def test_a_head_that_makes_others_wait_is_spoken_of_with_the_flag_that_mends_it():
    said = advice(costs((4,) * 8), range(8), SHORT, lambda layers: f"--layout '{layout_flag(layers)}'")
    assert said is not None
    own, best = spreads(costs((4,) * 8), SHORT)
    assert f"{own.excess:.0%} longer" in said
    assert f"--layout '{layout_flag(best.layers)}' would make it {best.excess:.0%}" in said
    assert own.excess - best.excess > WORTH
    assert advice(costs(best.layers), range(8), SHORT) is None


def test_nothing_is_said_of_layers_that_suit_the_sequences_are_meant_to_be_none_or_share_a_rank_and_where_nothing_is_known():
    for layers, rank_of, lengths in (
        ((4,) * 8, range(8), LONG),
        ((0, 2, 1, 0), range(4), SHORT),
        ((4,) * 8, (0, 1, 2, 3) * 2, SHORT),
        ((4,) * 8, range(8), ()),
    ):
        assert advice(costs(layers), rank_of, lengths) is None
    assert advice(costs(balanced_layers(PROFILE, 32, 8)), range(8), LONG) is not None
