"""An output layer in shards over the ranks, and the layout that is chosen for batches like those of a sample."""

import json
import logging
from dataclasses import replace
from itertools import product

import pytest

from megatron_epp.cost.model import PipelineCosts
from megatron_epp.cost.work import NO_TIME
from megatron_epp.features.local_search.improvement import improve
from megatron_epp.features.split_weights.split_orders import with_split_weights
from megatron_epp.features.vocabulary.shard_tables import shard_room
from megatron_epp.plan import Action, EppError, Op, Plan, Step
from megatron_epp.plan.grid import to_grid
from megatron_epp.plan.layout import Layout
from megatron_epp.plan.lowering import lower
from megatron_epp.plan.operations import OperationRows
from megatron_epp.plan.placement import Placement, placements_of
from megatron_epp.plan.proof import check
from megatron_epp.plan.proof.deadlock import blocked
from megatron_epp.plan.serialize import load, to_json
from megatron_epp.plan.trace import trace
from megatron_epp.planner import Options, Problem, plan
from megatron_epp.planner.bound import lower_bound_us
from megatron_epp.planner.chunks.chunker import whole_sequences
from megatron_epp.planner.decisions import Decisions
from megatron_epp.planner.memory.breakdown import memory_breakdown
from megatron_epp.planner.orders.completion import completed
from megatron_epp.planner.replicas import Replicas
from megatron_epp.planner.result import written
from megatron_epp.planner.search import search
from megatron_epp.planner.tables import tabulate
from megatron_epp.tools.cli.main import main
from megatron_epp.tools.formulas import H100, analytic_profile
from megatron_epp.tools.formulas.library import load_flags, shape_of
from megatron_epp.tools.layouts.estimates import Estimates
from megatron_epp.tools.layouts.layout_choice import MIN_GAIN_SHARE, Sample, choose, fastest
from megatron_epp.tools.layouts.rank_work import LayerWork, _stages_us, moved
from megatron_epp.tools.report.gantt import save_gantt
from tests.support.plan.planner_cases import GIB, LLAMA, problem
from tests.support.plan.queue_machine import stuck

LENGTHS = (30000, 9000, 5000, 3000, 2000, 700, 300)
PLACEMENTS = {"one stage per rank": (0, 1, 2, 3), "looped": (0, 1, 2, 3, 0, 1, 2, 3), "v": (0, 1, 2, 3, 3, 2, 1, 0)}


def costs(placement=(0, 1, 2, 3), shards: bool = True) -> PipelineCosts:
    layers = [16 // len(placement)] * len(placement)
    return LLAMA.costs(layers, state_bytes_per_parameter=7.5, vocabulary_shares=[0.25] * 4 if shards else [])


def made(lengths=LENGTHS, forward_only: bool = False) -> Plan:
    return plan(problem(lengths, 4, forward_only=forward_only), costs())


def actions(plan: Plan, op: Op) -> list[Action]:
    return [step.action for row in plan.ranks for step in row if step.action.op is op]


def without(plan: Plan, action: Action) -> Plan:
    return replace(plan, ranks=tuple(tuple(step for step in row if step.action != action) for row in plan.ranks))


@pytest.fixture(scope="module")
def usual() -> Plan:
    return made()


def with_step(plan: Plan, rank: int, step: Step) -> Plan:
    """The plan with a step ahead of a rank's others, which has it no longer where it was."""
    rows = [[own for own in row if own != step] for row in plan.ranks]
    rows[rank].insert(0, step)
    return replace(plan, ranks=tuple(map(tuple, rows)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((lambda plan, op=op: without(plan, actions(plan, op)[0]), "missing") for op in (Op.S, Op.N, Op.T)),
        (lambda plan: with_step(plan, 0, Step(Action(Op.S, 4, 0), 1.0, 0, 0)), "unknown site 4"),
        (lambda plan: with_step(plan, 3, next(s for s in plan.ranks[3] if s.action.op is Op.S)), "runs before"),
    ],
    ids=["no shard", "no loss", "no weight gradient", "a shard of another rank", "a shard ahead of its input"],
)
def test_check_finds_what_is_wrong_with_shards(usual, change, words):
    assert words in "".join(map(str, check(change(usual))))


def test_an_evaluation_has_losses_and_no_weight_gradients():
    plan = made(forward_only=True)
    assert {step.action.op for row in plan.ranks for step in row} == {Op.F, Op.S, Op.N}
    assert "forward-only" in "".join(map(str, check(with_step(plan, 0, Step(Action(Op.T, 0, 0), 1.0, 0, 0)))))


def test_crossed_shards_are_found_by_the_proof_and_by_the_independent_machine(usual):
    rows = [list(row) for row in lower(usual)]
    one, two, *_ = [i for i, action in enumerate(rows[1]) if action.op is Op.GATHER]
    rows[1][one], rows[1][two] = rows[1][two], rows[1][one]
    assert blocked([rows]) != []
    assert stuck(to_json(usual), to_grid(rows)) != []


def test_the_work_and_the_weights_of_the_output_layer_are_divided():
    whole, parts = costs(shards=False), costs()
    shards = parts.vocabulary
    head = LLAMA.head.forward + LLAMA.head.backward
    assert (shards.logits + shards.gradient).per_token_us == pytest.approx(head.per_token_us)
    assert parts.stages[-1].line("forward").per_token_us == pytest.approx(parts.stages[1].line("forward").per_token_us)
    moved = whole.stages[-1].static_bytes - parts.stages[-1].static_bytes
    gained = sum(stage.static_bytes for stage in parts.stages[:-1]) - sum(stage.static_bytes for stage in whole.stages[:-1])
    assert moved == pytest.approx(gained, abs=len(parts.stages) * 4)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_replicas_in_lockstep_are_searched_with_the_shards_in_their_orders(placement):
    problems = tuple(Problem(lengths, placement, (60 * GIB,) * 4) for lengths in (LENGTHS, (*LENGTHS[:-1], 900)))
    candidates = search(Replicas(problems, costs(placement), Options()))
    best = candidates.best()
    assert [made.predicted.makespan_us for made in written(candidates, best)] == pytest.approx([best.makespan_us] * 2)


def test_the_bound_holds_and_the_barrier_costs_little(usual):
    longer = made(lengths=(8192,) * 48)
    assert longer.predicted.lower_bound_us <= longer.predicted.makespan_us <= 1.08 * longer.predicted.lower_bound_us


@pytest.mark.parametrize("sequences", [1, 2, 6])
@pytest.mark.parametrize("forward_only", [True, False])
def test_the_bound_holds_where_shards_take_longer_than_layers(sequences, forward_only):
    profile = analytic_profile(replace(shape_of(load_flags("llama3-8b")), vocab_size=2_000_000), H100)
    uneven = profile.costs([5, 1, 1, 1], state_bytes_per_parameter=7.5, vocabulary_shares=[0.25] * 4)
    asked = problem((4096,) * sequences, 4, forward_only=forward_only)
    made = plan(asked, uneven)
    assert lower_bound_us(tabulate(made.chunks, asked, uneven), made.chunks, asked) <= made.predicted.makespan_us * (1 + 1e-9)


@pytest.mark.parametrize("split", [False, True])
def test_local_search_judges_steps_with_the_shards(split):
    given, shared = Problem((16_000, 9000, 5000, 2000), (0, 1, 2, 3), (30 * GIB,) * 4), costs()
    start = search(Replicas((given,), shared, Options(slices=1))).best().whole_backwards[0]
    tables = start.tables(given, shared)

    def took_us(found: Decisions) -> float:
        return completed(found.order, tables, found.as_offload, given.cap_bytes, with_split_weights if split else None)[1]

    aware, blind = (improve(start, known, given, Options(slices=1), split) for known in (tables, replace(tables, added={})))
    assert took_us(aware) < min(took_us(start), took_us(blind))


def test_costs_of_other_ranks_are_refused():
    wrong = LLAMA.costs([4, 4, 4, 4], vocabulary_shares=[0.5, 0.5])
    with pytest.raises(EppError, match="shards of 2 ranks, the pipeline has 4"):
        plan(problem(LENGTHS, 4), wrong)


def test_a_profile_from_before_shards_had_bytes_is_refused_where_it_needs_them():
    older = replace(LLAMA, shards=None)
    assert older.costs([8, 8, 8, 8]).vocabulary is None
    with pytest.raises(EppError, match="write it again with megatron-epp profile"):
        older.costs([8, 8, 8, 8], vocabulary_shares=[0.25] * 4)


def test_pictures_and_traces_name_them(usual, tmp_path):
    save_gantt(usual, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    categories = {event.get("cat") for event in trace(usual)["traceEvents"]}
    assert {"planned,vocabulary shard", "planned,loss", "planned,weight gradient of a shard"} <= categories


def test_what_a_shard_keeps_for_its_weight_gradient_is_one_item_of_memory_that_goes_with_it(usual):
    breakdown = memory_breakdown(usual, costs())
    assert {name for name in breakdown.items if "shard" in name} == {"vocabulary shard"}
    for rank in range(4):
        sizes = [moment.items.get("vocabulary shard", 0) for moment in breakdown.moments(rank)]
        assert max(sizes) > min(sizes) == sizes[-1] == 0


BATCHES = ((9000, 4000, 4000, 2000, 1000, 700), (16000, 3000, 500, 400), (5000,) * 5)


def sample_of(profile=LLAMA, ranks: int = 4, num_layers: int = 16, batches=BATCHES, **more) -> Sample:
    def costs_of(layout: Layout) -> PipelineCosts:
        return profile.costs(layout.layers, state_bytes_per_parameter=7.5, vocabulary_shares=layout.vocabulary_shares)

    return Sample(tuple(problem(lengths, ranks) for lengths in batches), costs_of, num_layers, **more)


def sample(vocab_size: int) -> Sample:
    profile = analytic_profile(replace(shape_of(load_flags("llama3-8b")), vocab_size=vocab_size), H100)
    batches = (LENGTHS * 4, (8192,) * 16)
    return sample_of(profile, batches=batches, placements=(Placement("looped", 4, 1),), vocabulary=(False, True))


@pytest.mark.parametrize(("vocab_size", "shards"), [(128256, True), (512, False)])
def test_the_layout_search_takes_shards_where_they_pay(vocab_size, shards):
    found = choose(sample(vocab_size))
    assert found.layout.shards_vocabulary is shards
    assert Layout.from_json(found.layout.to_json()) == found.layout
    two = [replace(found.layout, shards_vocabulary=each) for each in (False, True)]
    assert fastest(two, sample(vocab_size)).layout.shards_vocabulary is shards


@pytest.mark.parametrize(("setting", "shards"), [("on", True), ("auto", True), ("off", False)])
def test_the_command_line_plans_with_shards_where_they_are_asked_for_or_pay(setting, shards, tmp_path, capsys):
    lengths = ",".join(map(str, (8192,) * 12))
    out = tmp_path / "plan.json"
    asked = ["--lengths", lengths, "--stages", "4", "--layers", "16", "--vocab-parallel", setting]
    assert main(["plan", *asked, "-o", str(out)]) == 0
    assert bool(actions(load(out), Op.S)) is shards
    assert ("vocabulary over all ranks" in capsys.readouterr().out) is shards


def test_advice_names_the_flag(capsys):
    sizes = ["--devices", "4", "--tensor-parallel", "1", "--context-parallel", "1", "--pipeline-parallel", "4", "--layers", "8"]
    asked = ["--lengths", "9000,8000,8000", "--global-batch-size", "6", "--vocab-parallel", "on", "--json"]
    assert main(["advise", *sizes, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["epp"]["vocab_parallel"] == "on"


HEADLESS = replace(
    LLAMA,
    embedding=replace(LLAMA.embedding, forward=NO_TIME, backward=NO_TIME),
    head=replace(LLAMA.head, forward=NO_TIME, backward=NO_TIME),
)


def test_no_other_layers_have_a_lower_floor():
    asked = sample_of(ranks=3, num_layers=9)
    work, placement = LayerWork.of(asked.problems, asked.costs_of), Placement("looped", 3, 1)
    every = [
        Layout(layers, placement)
        for layers in product(range(10), repeat=3)
        if sum(layers) == 9 and layers[1]  # the first and the last stage may be without layers
    ]
    layout = work.spread(9, placement)
    assert work.floor_us(layout) == pytest.approx(min(map(work.floor_us, every)))
    assert work.ranks_us(layout)[:, 0] == pytest.approx(_stages_us(asked.problems[0], asked.costs_of(layout)))


def test_a_move_takes_layers_from_one_rank_to_others():
    layout = Layout((2, 2, 1), Placement("looped", 3, 1))
    assert [one.layers for one in moved(layout, 0)] == [(1, 3, 1), (1, 2, 2)]
    assert [one.layers for one in moved(layout, 2, [1])] == [(2, 3, 0)]
    assert not list(moved(Layout((2, 1, 2), Placement("looped", 3, 1)), 1))


def test_a_large_vocabulary_moves_layers_off_the_last_stage(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        found = choose(sample_of())
    assert sum(found.layout.layers) == 16
    assert found.bound_us <= found.makespan_us < found.even_us
    assert found.gain == 1 - found.makespan_us / found.even_us > MIN_GAIN_SHARE
    last_rank = found.layout.placement.stages(found.layout.placement.last_rank)
    assert sum(found.layout.layers[stage] for stage in last_rank) < 4
    assert "candidates for 3 batches" in caplog.text


def test_even_layers_stay_where_no_other_layout_saves_enough():
    found = choose(sample_of(HEADLESS, placements=placements_of(4)[:1]))
    assert (found.layout, found.gain) == (sample_of().even, 0.0)


def test_ranks_have_several_stages_only_where_that_is_allowed_and_pays():
    found, plainer = choose(sample_of(HEADLESS)), choose(sample_of(HEADLESS, placements=placements_of(4)[:1]))
    assert plainer.layout.placement.num_chunks == 1
    assert found.layout.placement.num_chunks == 1 or found.makespan_us <= plainer.makespan_us * (1 - MIN_GAIN_SHARE / 2)


def test_one_rank_has_one_layout():
    assert choose(sample_of(ranks=1)).layout == Layout((16,), Placement("looped", 1, 1))


def test_plans_of_the_choice_are_made_with_the_options():
    found = choose(sample_of(placements=placements_of(4)[:1], options=Options(planner="seq1f1b", recompute=0)))
    by_default, again = (choose(sample_of(placements=placements_of(4)[:1])) for _ in range(2))
    assert found.makespan_us > by_default.makespan_us
    assert again == by_default


@pytest.mark.parametrize("placement", placements_of(4))
def test_an_estimate_and_a_plan_are_above_the_floor_and_the_estimate_a_little_above_the_plan(placement: Placement):
    asked = sample_of()
    work = LayerWork.of(asked.problems[:1], asked.costs_of)
    layout = work.spread(16, placement)
    made = plan(replace(asked.problems[0], placement=placement.rank_of), asked.costs_of(layout))
    known = Estimates(asked.problems[:1], asked.costs_of, asked.options, work)
    assert work.floor_us(layout) <= min(known.batch_us(layout, 0), made.predicted.makespan_us)
    assert made.predicted.makespan_us * (1 - 1e-9) <= known.batch_us(layout, 0) <= 1.2 * made.predicted.makespan_us


def test_a_rank_has_room_for_three_chunks_between_logits_and_weight_gradients():
    """The largest takes 9 in its logits and keeps 5 of them; a weight gradient takes 2 besides."""
    rows = {
        Op.S: OperationRows([[1.0] * 4], [[9, 9, 4, 4]], [[4, 4, 1, 1]], {}),
        Op.T: OperationRows([[1.0] * 4], [[2, 2, 2, 2]], [[7, 7, 5, 5]], {}),
    }
    assert shard_room(rows, trains=True) == (9 + 2 * 5,)


def test_a_shard_s_weight_gradient_that_ends_before_the_last_chunk_has_gone_back_does_not_raise_the_bound():
    tables = tabulate(whole_sequences((4000,) * 3), problem((4000,) * 3, 4), costs())

    def bound(last_us):
        gradients = tables.added[Op.T]._replace(time_us=[[0.0] * 3] * 3 + [[last_us] * 3])
        return lower_bound_us(replace(tables, added=tables.added | {Op.T: gradients}))

    assert bound(1.0) == bound(0.0) < bound(1e7)
