"""Parts of the plan language: placements, layouts, sizes of buffers, trees of ranks, rows as text, violations."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, EppError, Op, PlanError
from megatron_epp.plan.communicators import LARGEST_MESH, tree_of
from megatron_epp.plan.grid import from_grid, to_grid
from megatron_epp.plan.layout import Layout, parse_layers
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check, report
from megatron_epp.plan.sizing import SIZES_PER_OCTAVE, size_class, size_classes
from scripts import write_communicators
from scripts.write_communicators import CHANNEL_BYTES, link_use, num_connections
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import make_plan, two_by_two, whole, with_rows, with_step


@pytest.mark.parametrize(
    ("placement", "ranks"),
    [
        (Placement("looped", 3, 1), (0, 1, 2)),
        (Placement("looped", 3, 2), (0, 1, 2, 0, 1, 2)),
        (Placement("v", 3, 2), (0, 1, 2, 2, 1, 0)),
        (Placement("v", 2, 3), (0, 1, 1, 0, 0, 1)),
    ],
)
def test_every_stage_has_a_rank_and_every_rank_its_stages_in_order(placement: Placement, ranks: tuple[int, ...]) -> None:
    assert placement.rank_of == ranks
    for rank in range(placement.num_ranks):
        stages = placement.stages(rank)
        assert len(stages) == placement.num_chunks
        assert [ranks[stage] for stage in stages] == [rank] * placement.num_chunks
        assert sorted(stages) == list(stages)
    assert placement.last_rank == ranks[-1]


def test_the_ends_meet_where_the_first_rank_has_the_last_stage_too() -> None:
    kinds = [("looped", 2, 2), ("v", 2, 2), ("v", 2, 3), ("v", 4, 4), ("looped", 1, 1)]
    assert [Placement(*kind).ends_share_rank for kind in kinds] == [False, True, False, True, False]


@given(st.lists(st.integers(0, 1 << 30), min_size=1).map(sorted))
def test_a_buffer_holds_what_it_is_for_and_an_eighth_more_at_most_and_is_never_smaller_for_more(counts):
    sizes = size_classes(np.array(counts)).tolist()
    assert sizes == [size_class(count) for count in counts] == list(map(size_class, sizes)) == sorted(sizes)
    assert all(count <= size <= count * (1 + 1 / SIZES_PER_OCTAVE) for count, size in zip(counts, sizes, strict=True))


def test_sizes_are_few():
    assert len(set(size_classes(np.arange(1024, 1 << 20)).tolist())) == 10 * SIZES_PER_OCTAVE + 1


@pytest.mark.parametrize("num_ranks", [1, 2, 63, 64])
def test_few_ranks_are_one_group(num_ranks):
    assert tree_of(num_ranks) == ((tuple(range(num_ranks)),),)
    assert num_connections(num_ranks, 0) == num_ranks - 1


@pytest.mark.parametrize(("num_ranks", "largest"), [(65, 64), (512, 64), (4096, 64), (5000, 64), (8, 4), (9, 2), (27, 3)])
def test_every_level_divides_the_first_ranks_of_the_one_below(num_ranks, largest):
    levels, members = tree_of(num_ranks, largest), tuple(range(num_ranks))
    for level in levels:
        assert tuple(rank for group in level for rank in group) == members
        sizes = [len(group) for group in level]
        assert max(sizes) <= largest
        assert max(sizes) - min(sizes) <= 1
        members = tuple(group[0] for group in level)
    assert members == (0,)


def test_a_rank_of_a_large_job_has_fewer_connections_than_two_full_groups_have():
    for num_ranks in (65, 512, 1024, 4096):
        assert max(num_connections(num_ranks, rank) for rank in range(num_ranks)) <= 2 * (LARGEST_MESH - 1)
    assert (num_connections(512, 0), num_connections(512, 1)) == (63 + 7, 63)


def test_the_page_is_written_from_the_formulas():
    current = write_communicators.TARGET.read_text()
    assert current == write_communicators.document(), "run: python -m scripts.write_communicators"


@pytest.mark.parametrize("placement", [Placement("looped", 8, 1), Placement("looped", 8, 2), Placement("v", 8, 2)])
@pytest.mark.parametrize("num_sms", [132, 108, 46])
def test_links_hold_a_quarter_of_the_sms_and_as_much_memory_as_their_ctas_have_channels(placement, num_sms):
    use = link_use(placement, num_sms)
    assert use.num_sms == use.num_links * use.ctas <= num_sms / 4
    assert use.num_bytes == use.num_sms * CHANNEL_BYTES
    assert link_use(placement, num_sms, ctas=16).num_bytes / use.num_bytes == 16 / use.ctas


def test_rank_numbers_line_up():
    lines = to_grid([[Action(Op.F, rank, 0)] for rank in range(11)]).splitlines()
    assert (lines[0], lines[10]) == ("rank  0 | 0F0", "rank 10 | 10F0")


@given(sound_plans())
def test_the_grid_reads_back(plan):
    text = to_grid(plan)
    assert from_grid(text) == tuple(plan.actions(rank) for rank in range(plan.num_ranks))
    copies = tuple(tuple(step.action for step in steps) for steps in plan.copies)
    assert from_grid(text, block="copy") == (copies if any(copies) else ())


@given(sound_plans())
def test_a_lowered_plan_reads_back(plan):
    rows = lower(plan)
    assert from_grid(to_grid(rows)) == rows


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank 0 | 0F0\nrank 2 | 1F0", "line 2 of the grid is rank 2; expected rank 1"),
        ("rank 0 | 0F0\nrank 0 | 1F0", "line 2 of the grid is rank 0; expected rank 1"),
        ("0F0 0F1", "expected 'rank <n>"),
        ("rank 0 | 0F0 0Q0", "'0Q0' is not an action"),
    ],
)
def test_what_is_no_grid_is_refused(text, reason):
    with pytest.raises(PlanError, match=reason):
        from_grid(text)


def test_the_report_puts_an_arrow_under_the_fault():
    plan = with_rows(two_by_two(), "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    assert report(plan, check(plan)[:2]).splitlines() == [
        "2 violations",
        "rank 0 | 0F0 0B0 0F1 0B1",
        "             ^^^ deadlock: waits for 1B0 (rank 1, position 3), which is never reached",
        "rank 1 | 1F1 1B1 1F0 1B0",
        "         ^^^ deadlock: waits for 0F1 (rank 0, position 2), which is never reached",
    ]
    plan = make_plan(["0F0 0B0"], whole(4), copies=["0L0 0O0"], offload_share=0.5)
    assert report(plan, check(plan)).splitlines()[1:] == [
        "rank 0 | 0F0 0B0",
        "copy 0 | 0L0 0O0",
        "         ^^^ runs before 0O0 (position 1), which it needs",
    ]
    assert report(two_by_two(), []) == "sound: 2 ranks, 2 stages, 2 chunks\n"


def test_the_report_cuts_long_rows_and_long_lists():
    many = range(60)
    plan = make_plan([" ".join([f"0F{c}" for c in many] + [f"0B{c}" for c in many])], whole(*[1] * 60))
    lines = report(plan, check(with_step(plan, "0B9", free_bytes=99))).splitlines()
    at = lines[1].index("0B9")
    assert lines[1].startswith("rank 0 | ... ")
    assert lines[1].endswith(" ...")
    assert lines[2][at - 1 : at + 3] == " ^^^"
    assert report(plan, check(replace(plan, ranks=((),)))).splitlines()[-1] == "... and 100 more"


@given(sound_plans(), st.integers(0, 2**32))
def test_the_report_shows_every_fault_of_a_broken_plan(plan, seed):
    rows = tuple(tuple(sorted(steps, key=lambda s: hash((seed, s.action.chunk, s.action.stage)))) for steps in plan.ranks)
    broken = replace(plan, ranks=rows)
    found = check(broken)[:20]
    text = report(broken, found)
    assert all(fault.reason in text for fault in found)
    assert text.count("^ ") == sum(fault.position is not None for fault in found)


TWO = Placement("looped", 2, 1)


@pytest.mark.parametrize(
    ("layers", "kind", "ranks", "said"),
    [
        ((7, 1, 0, 2), "looped", 4, "Et*7|t||t*2L"),
        ((2, 2, 2, 2), "looped", 2, "Et*2|t*2|t*2|t*2L"),
        ((2, 2, 2, 2), "v", 2, None),
    ],
)
def test_megatrons_string_says_layers_in_its_own_placement(
    layers: tuple[int, ...], kind: str, ranks: int, said: str | None
) -> None:
    placement = Placement(kind, ranks, len(layers) // ranks)  # type: ignore[arg-type]
    assert Layout(layers, placement).to_megatron() == said
    assert Layout(layers, placement).to_megatron(2) == (said and f"{said[:-1]}mmL")


@pytest.mark.parametrize("placement", [Placement("looped", 2, 2), Placement("v", 2, 2), Placement("looped", 4, 1)])
def test_a_file_gives_back_the_layout(placement: Placement) -> None:
    layout = Layout((5, 3, 4, 4), placement)
    assert Layout.from_json(layout.to_json()) == layout


def test_a_file_of_earlier_versions_is_read() -> None:
    """Its keys are in another order, and those that say nothing are left out."""
    head = '{"schema": "megatron-epp/layout", "version": 1, "layers_per_stage": [5.0, 2.0], "rank_of": [0, 1]'
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
        (changed(layers_per_stage=[2.5, 1.5]), "2.5 is not a whole number"),
        (changed(layers_per_stage=[2, -1]), r"layers_per_stage\[1\]: .* whole number from 0"),
        (changed(layers_per_stage=[True, 1]), "True is not a whole number"),
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
    ("layers", "message"),
    [((3, 2), "3, 2 layers has 5 in all, and the model has 4"), ((2, 1), "2, 1 layers has 3 in all")],
)
def test_a_layout_that_leaves_a_layer_out_or_holds_one_twice_is_refused(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(EppError, match=message):
        Layout(layers, TWO).check(4, 2)


def test_a_layout_for_other_ranks_is_refused() -> None:
    with pytest.raises(EppError, match="2 pipeline ranks, where there are 4"):
        Layout((2, 2), TWO).check(4, 4)
    with pytest.raises(EppError, match="has 2 stages, and its placement has 4"):
        Layout((2, 2), Placement("v", 2, 2))


@pytest.mark.parametrize(
    ("text", "layers"),
    [("8,7.0,9", (8, 7, 9)), ("0,4", (0, 4)), ("3", (3,)), ("2,", None), ("-1,5", None), ("inf", None), ("a.json", None)],
)
def test_layers_of_stages_are_read_from_text(text: str, layers: tuple[int, ...] | None) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize(("text", "near"), [("8,7.5,8.5", "8,8,8"), ("4.5,3.5", "4,4"), ("1.25,2", "1,2")])
def test_parts_of_layers_are_refused_with_whole_ones_that_are_near(text: str, near: str) -> None:
    with pytest.raises(EppError, match=f"begin between layers.* such as {near}$"):
        parse_layers(text)
