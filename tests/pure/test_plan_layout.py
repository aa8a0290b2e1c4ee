"""Layouts: consecutive half layers on stages, said by Megatron's string where it can, and by a versioned file."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import EppError
from megatron_epp.plan.layout import Layout, parse_layers
from megatron_epp.plan.placement import Placement

TWO = Placement("looped", 2, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_stages_hold_every_half_once_in_order(halves: list[int]) -> None:
    halves[-1] += sum(halves) % 2
    stages = list(Layout(tuple(halves), Placement("looped", len(halves), 1)).stages())
    assert [2 * one.num_whole + one.begins_with_mlp + one.ends_with_attention for one in stages] == halves
    run = [one for one in stages if one.num_modules]
    for before, after in pairwise(run):
        assert before.ends_with_attention == after.begins_with_mlp
        assert after.first == before.first + before.num_modules - before.ends_with_attention
    assert not run or (not run[0].begins_with_mlp and not run[-1].ends_with_attention)


@pytest.mark.parametrize(
    ("halves", "kind", "ranks", "said"),
    [
        ((14, 2, 0, 4), "looped", 4, "Et*7|t||t*2L"),
        ((4, 4, 4, 4), "looped", 2, "Et*2|t*2|t*2|t*2L"),
        ((4, 4, 4, 4), "v", 2, None),
        ((5, 3), "looped", 2, None),
    ],
)
def test_megatrons_string_says_whole_layers_in_its_own_placement(
    halves: tuple[int, ...], kind: str, ranks: int, said: str | None
) -> None:
    placement = Placement(kind, ranks, len(halves) // ranks)  # type: ignore[arg-type]
    assert Layout(halves, placement).to_megatron() == said
    assert Layout(halves, placement).to_megatron(2) == (said and f"{said[:-1]}mmL")


@pytest.mark.parametrize("placement", [Placement("looped", 2, 2), Placement("v", 2, 2), Placement("looped", 4, 1)])
def test_a_file_gives_back_the_layout(placement: Placement) -> None:
    layout = Layout((5, 3, 4, 4), placement)
    assert Layout.from_json(layout.to_json()) == layout


def test_a_file_of_earlier_versions_is_read() -> None:
    """Its keys are in another order, and those that say nothing are left out."""
    head = '{"schema": "megatron-epp/layout", "version": 1, "layers_per_stage": [2.5, 1], "rank_of": [0, 1]'
    layout = Layout.from_json(f'{head}, "vocabulary": "sharded", "chosen_with": {{"seq_length": 512}}}}\n')
    assert (layout, layout.chosen_with) == (Layout((5, 2), TWO, shards_vocabulary=True), {"seq_length": 512})
    assert Layout.from_json(f"{head}}}") == Layout((5, 2), TWO)


def changed(**fields: object) -> object:
    return json.loads(Layout((5, 3), TWO).to_json()) | fields


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "is not a JSON object"),
        (changed(version=2), "version 2, where this reads"),
        (changed(layers_per_stage=[2.5, 1.25]), "multiple of 0.5 up to 10000, and not 1.25"),
        (changed(layers_per_stage=[2.5, -1]), r"layers_per_stage\[1\]: .* multiple of 0.5"),
        (changed(layers_per_stage=[True, 1]), "multiple of 0.5"),
        (changed(layers_per_stage=[]), "names the rank of each of 0 stages"),
        (changed(rank_of=[0, 2]), "names the rank of each of 2 stages"),
        (changed(rank_of=[0, 1, 1]), "names the rank of each of 2 stages"),
        (changed(layers_per_stage=[], rank_of=[]), "or none"),
        (changed(rank_of="0,1"), "rank_of is '0,1', which is not a list"),
    ],
)
def test_a_file_that_is_no_layout_is_refused(body: object, message: str) -> None:
    with pytest.raises(EppError, match=message):
        Layout.from_json(json.dumps(body))


@pytest.mark.parametrize(
    ("halves", "message"),
    [((5, 4), "2.5, 2 layers has 4.5 in all, and the model has 4"), ((5, 5), "2.5, 2.5 layers has 5 in all")],
)
def test_a_layout_that_leaves_a_layer_out_or_holds_one_twice_is_refused(halves: tuple[int, ...], message: str) -> None:
    with pytest.raises(EppError, match=message):
        Layout(halves, TWO).check(4, 2)


def test_a_layout_for_other_ranks_is_refused() -> None:
    with pytest.raises(EppError, match="2 pipeline ranks, where there are 4"):
        Layout((4, 4), TWO).check(4, 4)
    with pytest.raises(EppError, match="has 2 stages, and its placement has 4"):
        Layout((4, 4), Placement("v", 2, 2))


@pytest.mark.parametrize(
    ("text", "halves"),
    [("8,7.5,8.5", (16, 15, 17)), ("0,4", (0, 8)), ("3", (6,)), ("1.3,2", None), ("2,", None), ("-1,5", None), ("inf", None)],
)
def test_layers_of_stages_are_read_from_text(text: str, halves: tuple[int, ...] | None) -> None:
    assert parse_layers(text) == halves
