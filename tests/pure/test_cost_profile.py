"""Profiles: parts of a model put together to pipelines, how evenly these share work, their JSON form, and their fit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

import pytest

from megatron_epp.cost.balance import WORTH, advice, spread_layers, spreads
from megatron_epp.cost.line_fits import LEAST_US, Point, fit_line
from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import LinearTime
from megatron_epp.plan import Chunk, EppError, Segment
from megatron_epp.plan.layout import layout_flag
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.problem import Lengths
from megatron_epp.planner import UNLIMITED_BYTES, Problem, plan
from megatron_epp.tools.cli.measure_profile import fit_profile
from megatron_epp.tools.formulas import CPU, H100, H100_NODE, ModelPart, ModelShape, Profile, analytic_profile, on_device
from megatron_epp.tools.formulas.library import balanced_layers, load_flags, shape_of

SHAPE = ModelShape(num_layers=6, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, vocab_size=1000)
LAYER_SIZES = {"bytes_per_token": 100, "weight_bytes_per_token": 60, "parameters": 10}
HEAD_SIZES = {"bytes_per_token": 40, "weight_bytes_per_token": 11}
TOKEN_SIZES = {"recomputed_layer_bytes_per_token": 8, "kv_bytes_per_token": 16, "hidden_bytes_per_token": 8}
PROFILE = Profile(
    name="by hand",
    num_layers=6,
    layer=ModelPart(forward=LinearTime(5, 1, 0.5), backward=LinearTime(9, 2, 1), weight=LinearTime(1, 0.75), **LAYER_SIZES),
    attention=ModelPart(),
    embedding=ModelPart(forward=LinearTime(0, 0.25), backward=LinearTime(0, 0.5), bytes_per_token=3, parameters=7),
    head=ModelPart(forward=LinearTime(2, 3), backward=LinearTime(4, 6), weight=LinearTime(1, 2), **HEAD_SIZES),
    host_us_per_byte=0.5,
    host_latency_us=3.0,
    **TOKEN_SIZES,
)


def test_a_pipeline_has_the_embedding_in_its_first_stage_and_the_head_in_its_last():
    costs = PROFILE.costs([3, 2, 1], state_bytes_per_parameter=2.0)
    assert [stage.num_layers for stage in costs.stages] == [3, 2, 1]
    assert [stage.line_of_ends("forward") for stage in costs.stages] == [LinearTime(0, 0.25), LinearTime(), LinearTime(2, 3)]
    assert [stage.ends_bytes_per_token for stage in costs.stages] == [11, 8, 48]
    assert [stage.static_bytes for stage in costs.stages] == [2 * 37, 2 * 20, 2 * 10]
    assert PROFILE.costs([6]).stages[0].line_of_ends("backward") == LinearTime(4, 6.5)


def test_costs_without_weight_lines_do_not_split():
    stages = tuple(stage.changed(weight=LinearTime()) for stage in PROFILE.costs([2, 1]).stages)
    assert not replace(PROFILE.costs([2, 1]), stages=stages).splits_weight


FLAGS = {"num_layers": 6, "epp_loss_block_tokens": 64}
EXAMPLES = {
    "by hand": PROFILE,
    "without a link": replace(PROFILE, host_us_per_byte=math.inf),
    "loss by blocks": analytic_profile(shape_of(load_flags("llama3-8b") | FLAGS), H100),
    "launched": analytic_profile(SHAPE, H100_NODE),
    "latents": analytic_profile(shape_of(load_flags("deepseek-v3") | FLAGS | {"epp_latents": "on"}), H100),
}


@pytest.mark.parametrize("profile", EXAMPLES.values(), ids=EXAMPLES)
def test_profiles_and_costs_come_back_from_json_without_the_word_infinity(profile: Profile):
    shares = () if profile.shards is None else (0.25, 0.75)
    costs = [profile.costs([profile.num_layers - 2, 2]), on_device(profile.costs([2, profile.num_layers - 2]))]
    costs += [profile.costs([3, profile.num_layers - 3], vocabulary_shares=shares)]
    for written, read in ((profile, Profile.from_json), *((own, PipelineCosts.from_json) for own in costs)):
        text = written.to_json()
        assert read(text) == written
        assert "Infinity" not in text


TEXT = PROFILE.costs([4, 2]).to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"schema": "megatron-epp/profile", "version": 9}', TEXT])
@pytest.mark.parametrize("read", [Profile.from_json, PipelineCosts.from_json])
def test_text_that_is_no_profile_is_refused(read: Callable[[str], object], text: str):
    with pytest.raises(EppError, match="profile"):
        read(text.replace('"stages"', '"stage"'))


def test_half_a_rate_at_so_many_tokens_is_as_many_tokens_more():
    slow = replace(H100, saturation_tokens=0.0), replace(H100, saturation_tokens=200.0)
    fresh, late = (analytic_profile(SHAPE, rates).layer for rates in slow)
    linear = fresh.weight.per_token_us
    assert late.forward.fixed_us - fresh.forward.fixed_us == pytest.approx(200 * linear)
    assert late.backward.fixed_us - fresh.backward.fixed_us == pytest.approx(400 * linear)
    assert late.weight.time_us(200, 0) == pytest.approx(2 * fresh.weight.time_us(200, 0))


def test_every_token_pays_for_the_empty_half_of_its_tile():
    plain, tiled = (analytic_profile(SHAPE, replace(H100, attention_tile=tile)).layer.forward for tile in (0, 128))
    assert tiled.per_token_us - plain.per_token_us == pytest.approx(64 * plain.per_pair_us)


def test_the_weight_gradient_is_one_of_the_backwards_two_products():
    for part in (analytic_profile(SHAPE, H100).layer, analytic_profile(SHAPE, H100).head):
        assert 0 < part.weight.per_token_us < part.backward.per_token_us / 1.5
        assert part.weight.fixed_us <= part.backward.fixed_us


def test_a_token_pays_for_its_own_experts_and_memory_for_all_of_them():
    dense = SHAPE
    experts = replace(SHAPE, num_experts=8, experts_per_token=2)
    mlp = 3 * 64 * 256
    assert experts.parameters_per_token == dense.layer_parameters + mlp + 64 * 8
    assert experts.layer_parameters == dense.layer_parameters + 7 * mlp + 64 * 8
    assert experts.layer_bytes_per_token > dense.layer_bytes_per_token
    spread = replace(experts, expert_parallel=4)
    assert experts.layer_parameters_on_rank - spread.layer_parameters_on_rank == 6 * mlp
    one, four = (analytic_profile(shape, H100).layer.forward.per_token_us for shape in (experts, spread))
    assert four > one  # its copies travel


def test_ranks_that_share_a_layer_pay_for_what_they_exchange():
    assert not any(exchange.num_bytes for exchange in SHAPE.exchanges)
    tensor = replace(SHAPE, tensor_parallel=4, sequence_parallel=True)
    assert sum(exchange.num_bytes for exchange in tensor.exchanges) == 4 * 0.75 * 64 * 2
    free = replace(H100, exchange_bytes=math.inf)
    cost = analytic_profile(tensor, H100).layer.forward.per_token_us - analytic_profile(tensor, free).layer.forward.per_token_us
    assert cost == pytest.approx(1e6 * 384 / H100.exchange_bytes)


def test_a_fit_gives_a_line_back_and_of_other_points_one_without_negative_coefficients_with_its_error():
    line = LinearTime(40.0, 0.5, 0.01)
    points = [Point(n, p, line.time_us(n, p)) for n, p in ((64, 2080), (64, 70000), (512, 131328), (1024, 900000))]
    fit = fit_line(points)
    assert fit.line.time_us(2000, 10000) == pytest.approx(line.time_us(2000, 10000), rel=1e-6)
    assert fit.residuals()["worst"] < 1e-9
    fit = fit_line([Point(100, 0, 10.0), Point(200, 0, 40.0)], pairs=False)
    assert fit.line.fixed_us == 0.0
    assert fit.line.per_token_us > 0
    residuals = fit.residuals()
    assert residuals["points"] == 2
    assert residuals["worst"] > residuals["median"] * 0.99 > 0
    fit = fit_line([Point(100, 0, 0.0), Point(200, 0, 10.0), Point(400, 0, 20.0)], pairs=False)
    assert fit.line.time_us(100, 0) == pytest.approx(LEAST_US, rel=0.01)


KINDS = ("linear", "loss", "embedding", "attention")


def measured_points() -> dict[str, list[Point]]:
    line = LinearTime(10.0, 2.0)
    on_the_line = [Point(n, 0, line.time_us(n, 0)) for n in (64, 256)]
    points = {f"{kind} {way}": on_the_line for kind in KINDS for way in ("forward", "backward")}
    points["linear weight"] = [Point(n, 0, 0.75 * n + 2) for n in (64, 256)]
    points["loss weight"] = [Point(n, 0, 5 * n) for n in (64, 256)]
    return points


def test_a_fitted_profile_has_measured_times_and_the_formulas_bytes():
    profile = fit_profile(measured_points(), SHAPE, CPU, "here", {"machine": "mine"})
    formula = analytic_profile(SHAPE, CPU)
    assert profile.layer.forward.time_us(100, 0) == pytest.approx(2 * (10 + 200))
    assert profile.layer.weight.per_token_us == pytest.approx(0.75)
    assert profile.layer.bytes_per_token == formula.layer.bytes_per_token
    assert (profile.message_us_per_byte, profile.origin["machine"]) == (formula.message_us_per_byte, "mine")
    assert profile.origin["residuals"]["linear forward"]["points"] == 2
    assert {"memory", "message", "host copy"} <= set(profile.origin["by_formula"])
    assert Profile.from_json(profile.to_json()) == profile


def test_a_weight_gradient_measured_above_its_backward_is_held_below_it():
    head = fit_profile(measured_points(), SHAPE, CPU, "here", {}).head
    assert head.weight.per_token_us == head.backward.per_token_us


def test_a_line_is_held_below_the_one_that_it_is_a_part_of_in_every_coefficient():
    part, whole = LinearTime(3.0, 0.5, 2.0), LinearTime(1.0, 1.0, 1.0)
    assert (part.within(whole), part.within(part)) == (LinearTime(1.0, 0.5, 1.0), part)


def test_a_measured_link_takes_the_place_of_the_formula():
    points = measured_points() | {"message": [Point(n, 0, 100 + 0.25 * n) for n in (1000, 100000)]}
    profile = fit_profile(points, SHAPE, CPU, "here", {})
    assert (profile.message_latency_us, profile.message_us_per_byte) == pytest.approx((100, 0.25))
    assert "message" not in profile.origin["by_formula"]


@pytest.mark.parametrize(
    ("sharing", "tensor", "replicas", "at_once", "turns"),
    [
        (1, 1, 1, 1, 1),
        (2, 1, 1, 1, 2),  # stages are neighbours
        (2, 2, 1, 2, 1),  # a stage's own ranks are
        (2, 1, 2, 2, 1),  # replicas are
        (4, 2, 1, 2, 2),
        (8, 2, 2, 4, 2),
        (2, 2, 4, 2, 1),
        (4, 1, 3, 4, 1),  # not whole stages
    ],
)
def test_of_those_that_share_a_link_to_the_host_stages_take_turns_and_others_have_their_part(
    sharing: int, tensor: int, replicas: int, at_once: int, turns: int
):
    shape = replace(SHAPE, tensor_parallel=tensor)
    alone = analytic_profile(shape, H100).costs([3, 3])
    costs = analytic_profile(shape, replace(H100, host_sharing=sharing)).costs([3, 3], replicas=replicas)
    assert (costs.host_us_per_byte, costs.host_turns) == (at_once * alone.host_us_per_byte, turns)


SHORT, LONG = (2048,) * 64, (1 << 20,)
OF_FOUR = analytic_profile(shape_of(load_flags("llama3-8b")), H100)


def costs(layers: tuple[int, ...]) -> PipelineCosts:
    return OF_FOUR.costs(layers)


def whole(lengths: Sequence[int]) -> list[Chunk]:
    return [Chunk((Segment(q, 0, length),)) for q, length in enumerate(lengths)]


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
        plan(problem, costs(balanced_layers(OF_FOUR, 32, 16, [Lengths(lengths)], rank_of))).predicted.makespan_us
        for rank_of in ((), placement.rank_of)
    )
    assert of_ranks < 0.96 * of_stages


def test_the_excess_is_what_the_others_wait_for_the_busiest():
    own, best = spreads(costs((8,) * 4), whole(LONG))
    assert (own.layers, own.excess) == ((8,) * 4, pytest.approx(best.excess, abs=0.02))
    lopsided, _ = spreads(costs((16, 6, 5, 5)), whole(LONG))
    assert lopsided.excess == pytest.approx(1.0, abs=0.03)  # half of all layers on a quarter of the stages


def test_layers_are_weighed_by_what_chunks_compute_of_sequences_cut_or_begun_by_others():
    first, second = Chunk((Segment(0, 0, 30000),)), Chunk((Segment(0, 30000, 32768),))
    assert spreads(costs((4,) * 8), [first, second]) == spreads(costs((4,) * 8), whole([32768]))
    excesses = [spreads(costs((4,) * 8), chunks)[0].excess for chunks in ([second], whole([32768]), whole([2768]))]
    assert excesses == sorted(excesses)  # the head weighs least where each token attends to most
    assert excesses[0] < 0.8 * excesses[1]


def test_a_head_that_makes_others_wait_is_spoken_of_with_the_flag_that_mends_it():
    said = advice(costs((4,) * 8), range(8), whole(SHORT), lambda layers: f"--layout '{layout_flag(layers)}'")
    assert said is not None
    own, best = spreads(costs((4,) * 8), whole(SHORT))
    assert f"{own.excess:.0%} longer" in said
    assert f"--layout '{layout_flag(best.layers)}' would make it {best.excess:.0%}" in said
    assert own.excess - best.excess > WORTH
    assert advice(costs(best.layers), range(8), whole(SHORT)) is None


def test_nothing_is_said_of_layers_that_suit_the_sequences_are_meant_to_be_none_or_share_a_rank_and_where_nothing_is_known():
    for layers, rank_of, lengths in (
        ((4,) * 8, range(8), LONG),
        ((0, 2, 1, 0), range(4), SHORT),
        ((4,) * 8, (0, 1, 2, 3) * 2, SHORT),
        ((4,) * 8, range(8), ()),
    ):
        assert advice(costs(layers), rank_of, whole(lengths)) is None
    assert advice(costs(balanced_layers(OF_FOUR, 32, 8)), range(8), whole(LONG)) is not None
