"""Parts of the plan language: actions, chunks, dependencies, operations, placements, layouts, trees, rows, violations."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_epp.plan import Action, EppError, Op, PlanError, Prediction, Segment, operations
from megatron_epp.plan.chunk import slice_neighbours
from megatron_epp.plan.communicators import LARGEST_MESH, tree_of
from megatron_epp.plan.grid import from_grid, to_grid
from megatron_epp.plan.layout import Layout, parse_layers
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.operations import At, Before, Collective, Need, Operation, Presence, operation, register
from megatron_epp.plan.placement import Placement
from megatron_epp.plan.proof import check, report
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.relations import deps
from megatron_epp.plan.serialize import from_json, to_json
from megatron_epp.plan.simulation import simulate
from megatron_epp.plan.sizing import SIZES_PER_OCTAVE, size_class, size_classes
from scripts import write_communicators
from scripts.write_communicators import CHANNEL_BYTES, link_use, num_connections
from tests.support.plan.added import unregister
from tests.support.plan.random_plans import sound_plans
from tests.support.plan.small_plans import chunk, make_plan, one_f_one_b, two_by_two, whole, with_rows, with_step


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


SLICED = (chunk((0, 0, 5)), chunk((0, 5, 8), (1, 0, 2)), chunk((2, 0, 4)))


def needed_by(text, optional=()):
    return {str(action) for action in deps(SLICED, 3, [Action.parse(word) for word in optional])(Action.parse(text))}


@given(st.sampled_from(Op.known()), st.integers(0, 10**6), st.integers(0, 10**6))
def test_an_action_prints_and_parses_back(op, stage, number):
    action = Action(op, stage, number)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X5", "2f5", "-1F0", "2F5 ", "2SEND5", "2.0F1"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def test_chunks_are_batched_split_or_hybrid_and_slices_know_their_neighbours():
    lengths, links = (8, 2, 4), slice_neighbours(SLICED)
    assert [c.kind(lengths) for c in SLICED] == ["split", "hybrid", "batched"]
    assert [c.slice_of(lengths) for c in SLICED[1:]] == [Segment(0, 5, 8), None]
    assert (SLICED[1].num_tokens, SLICED[1].padded_tokens(4)) == (5, 8)
    assert (links.previous, links.following) == (((), (0,), ()), ((1,), (), ()))


NEEDS = {
    # a forward: the stage before and the slice before
    "0F0": "", "0F1": "0F0", "1F1": "0F1 1F0", "1F2": "0F2",
    # a backward: its forward, the stage after and the slice after
    "2B1": "2F1", "2B0": "2F0 2B1", "0B0": "0F0 1B0 0B1", "0B2": "0F2 1B2",
    # every other operation: one action
    "1W0": "1B0", "1R0": "1F0", "1O0": "1F0", "1L0": "1O0", "1SEND_F0": "1F0", "1RECV_F0": "0SEND_F0",
    "1SEND_B0": "1B0", "1RECV_B0": "2SEND_B0",
}  # fmt: skip


@pytest.mark.parametrize("action", NEEDS)
def test_an_action_needs_what_makes_its_input_and_a_slice_its_neighbour(action):
    assert needed_by(action) == {*NEEDS[action].split()}


def test_backward_waits_for_the_recompute_and_load_of_its_own_chunk():
    assert needed_by("2B1", optional=["2R1", "2L0", "1L1"]) == {"2F1", "2R1"}
    assert needed_by("2B1", optional=["2L1", "2O1"]) == {"2F1", "2L1"}


K, SPREAD = Op.define("K"), Op.define("SPREAD_K")
OF_FORWARDS = Need(Op.F, At.LAST, carries=Collective(SPREAD))
SHARD = Operation(op=K, text="loss shard", presence=Presence.COMPLETE, sites=operations.of_ranks, needs=(OF_FORWARDS,))


def test_an_added_operation_is_known_with_its_collectives_until_it_is_removed():
    try:
        assert register(SHARD) is SHARD
        assert register(SHARD) is SHARD
        assert operation(K) is SHARD
        assert operation(SPREAD).text == f"collective {SPREAD}"
    finally:
        unregister(K, SPREAD)
    for op in (K, SPREAD):
        with pytest.raises(PlanError, match=f"operation {op} has no definition"):
            operation(op)


def test_another_definition_of_a_name_is_refused():
    with pytest.raises(ValueError, match=f"operation {Op.F} is already defined"):
        register(replace(operation(Op.F), text="another"))
    assert operation(Op.F).text != "another"


@pytest.mark.parametrize(
    "changes", [{"needs": (Need(SPREAD, At.LAST),)}, {"before": (Before(SPREAD, Need(K, At.EVERY)),)}], ids=["needs", "before"]
)
def test_an_operation_that_names_an_unknown_one_is_refused(changes):
    with pytest.raises(ValueError, match=f"operation {K} names {SPREAD}, which is not defined"):
        register(replace(SHARD, **{"needs": (), **changes}))
    with pytest.raises(PlanError):
        operation(K)


def test_what_is_received_has_a_colour_for_each_kind() -> None:
    assert len({operation(op).colour for op in (Op.RECV_F, Op.RECV_B, Op.F, Op.B)}) == 4


def joined(plan, rank, at):
    """The plan with two neighbouring steps of a rank as one, which takes as long as the longer of them."""
    row = plan.ranks[rank]
    one, two = row[at : at + 2]
    sizes = {name: getattr(one, name) + getattr(two, name) for name in ("alloc_bytes", "free_bytes")}
    both = one._replace(time_us=max(one.time_us, two.time_us), also=two.actions, **sizes)
    ranks = (*plan.ranks[:rank], (*row[:at], both, *row[at + 2 :]), *plan.ranks[rank + 1 :])
    return replace(plan, ranks=ranks, predicted=Prediction.none(plan.num_ranks), cap_bytes=(1 << 40,) * plan.num_ranks)


def first_pair(plan, rank):
    return next(i for i, (one, two) in enumerate(pairwise(plan.actions(rank))) if (one.op, two.op) == (Op.B, Op.F))


def test_a_step_of_two_actions_is_checked_simulated_lowered_and_survives_text():
    plan = one_f_one_b()
    braided = joined(plan, 0, first_pair(plan, 0))
    assert check(braided) == []
    assert simulate(braided).makespan_us < simulate(plan).makespan_us
    assert from_json(to_json(braided)) == braided
    grid = to_grid(braided)
    assert "+" in grid
    assert from_grid(grid) == tuple(plan.actions(rank) for rank in range(plan.num_ranks))
    rows = lower(braided)
    assert (sorted(map(str, rows[0])), blocked([rows])) == (sorted(map(str, lower(plan)[0])), [])


def test_a_step_whose_actions_need_each_other_is_refused_and_a_deadlock_by_way_of_another_rank():
    plan = one_f_one_b()
    chunk = plan.actions(1)[0].chunk
    row = [step for step in plan.ranks[0] if step.action.chunk != chunk]
    forward, backward = (next(s for s in plan.ranks[0] if s.action == Action(op, 0, chunk)) for op in (Op.F, Op.B))
    both = forward._replace(also=(backward.action,))
    faults = check(replace(plan, ranks=((both, *row), *plan.ranks[1:]), predicted=Prediction.none(plan.num_ranks)))
    assert any("deadlock" in str(fault) for fault in faults)
    faults = check(joined(plan, plan.placement[-1], 0))  # a chunk's forward and its backward
    assert any("one action of its step needs the other" in str(fault) for fault in faults)


def test_backwards_of_a_loss_group_wait_for_all_its_forwards_on_the_last_stage():
    plan = one_f_one_b()
    last = plan.num_stages - 1
    row = plan.actions(plan.placement[last])
    early, late = row[0].chunk, [a for a in row if a.op is Op.F][-1].chunk
    assert check(replace(plan, loss_groups=((early,), (late,)))) == []
    grouped = replace(plan, loss_groups=((early, late),))
    assert from_json(to_json(grouped)) == grouped
    faults = check(grouped)
    assert faults
    assert f"runs before {last}F{late}" in str(faults[0])
    assert "name a chunk twice" in str(check(replace(plan, loss_groups=((0,), (0,))))[0])
